"""Without the terms of its own, an algorithm is FedAvg."""

import pytest
import torch

from tests.federated.tiny import arm, finish, settings, values, without

OFF = {
    "fedavg-wide": {},
    "fedbr": {"contrast": 0.0, "uniform": 0.0},
    "fediir": {"invariance": 0.0},
    "fedper": {"personal": "none"},
    "fedprox": {"mu": 0.0},
    "scaffold": {"correction": 0.0},
}


@pytest.mark.parametrize("keys", [{}, {"optimizer": "sgd", "participation": 0.5}], ids=["adam", "sgd"])
@pytest.mark.parametrize("name", OFF)
def test_without_its_terms_it_is_fedavg_bit_for_bit(name, keys):
    own, average = arm(settings(name, **OFF[name], **keys))[0], arm(settings("fedavg", **keys))[0]
    more = ["bytes"] if name == "scaffold" else []  # it sends its control variates
    assert without(finish(own), *more) == without(finish(average), *more)
    assert torch.equal(values(own), values(average))
