"""FedAvg with a wider head: without additional width it is FedAvg, and additional parameters are counted."""

import pytest
import torch

from tests.federated.tiny import KEYS, arm, finish, settings, values
from uefl.errors import UserError


def test_zero_extra_parameters_is_fedavg_bit_for_bit():
    plain, wide = (arm(settings(name))[0] for name in ("fedavg", "fedavg-wide"))
    assert [r | {"arm": ""} for r in finish(plain)] == [r | {"arm": ""} for r in finish(wide)]
    assert torch.equal(values(plain), values(wide))


@pytest.mark.parametrize(("more", "units"), [(1, 1), (20, 1), (21, 2)])
def test_extra_parameters_are_whole_hidden_units(more, units):
    """One hidden unit has 16 input weights, a bias and three output weights."""
    plain, wide = arm(settings("fedavg"))[0], arm(settings("fedavg-wide", more_parameters=more))[0]
    assert len(values(wide)) - len(values(plain)) == 20 * units
    encoder = len(values(plain)) - (17 * 16 + 17 * 3)
    assert torch.equal(values(wide)[:encoder], values(plain)[:encoder])


def test_a_network_without_that_head_is_refused():
    with pytest.raises(UserError, match=r"fedavg-wide.*'cnn', .*'resnet18', 'vgg16_bn'"):
        arm(settings("fedavg-wide", KEYS | {"model": {"encoder": "resnet18_nopool"}}, more_parameters=1))
