"""FedAvg with a wider head has whole hidden units of additional parameters."""

import pytest
import torch

from tests.federated.tiny import KEYS, arm, settings, values
from uefl.errors import UserError


@pytest.mark.parametrize(("more", "units"), [(1, 1), (20, 1), (21, 2)])
def test_extra_parameters_are_whole_hidden_units(more, units):
    """One hidden unit has 16 input weights, a bias and three output weights."""
    plain, wide = arm(settings("fedavg"))[0], arm(settings("fedavg-wide", more_parameters=more))[0]
    assert len(values(wide)) - len(values(plain)) == 20 * units
    encoder = len(values(plain)) - (17 * 16 + 17 * 3)
    assert torch.equal(values(wide)[:encoder], values(plain)[:encoder])


def test_a_network_without_that_head_is_refused():
    with pytest.raises(UserError, match=r"fedavg-wide.*'cnn', .*'resnet18', .*'vgg16_bn'"):
        arm(settings("fedavg-wide", KEYS | {"model": {"encoder": "resnet18_nopool"}}, more_parameters=1))
