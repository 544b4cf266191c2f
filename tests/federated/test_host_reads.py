"""Count how often a round reads a value of a tensor.

On a GPU the host waits for the device at each read.

The tests count the calls in Python that read values. On the CPU, where the tests run, such a read does not
wait. The kernels of the ops have tests of their own.
"""

import sys
from collections import Counter

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .tiny import arm, settings

_READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"}
_CHECKED_ON_THE_CPU_ONLY = "_check"  # a function of uefl_kernels.metrics


def _place() -> str | None:
    """Return the line of the project that reads, or None for a check that is skipped on a GPU."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in ("uefl", "uefl_kernels"):
            if frame.f_code.co_name == _CHECKED_ON_THE_CPU_ONLY and name == "uefl_kernels.metrics":
                return None
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return None


class Calls(TorchFunctionMode):
    """Count the methods of tensors that give their values to Python."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in _READS and (place := _place()):
            self.found[place] += 1
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Count the operations that read, whoever calls them."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        read = function._schema.name.partition("::")[2]
        if read in ("_local_scalar_dense", "nonzero", "equal", "masked_select") and (place := _place()):
            self.found[place] += 1
        return function(*args, **(kwargs or {}))


def reads(name: str, *, measure: bool, train: bool, **keys) -> Counter:
    """Return the reads of one turn, by place, for each client."""
    one, _, _ = arm(settings(name, **keys))
    one.exchange(measure=False, train=True)
    one.trained += 1
    one.round += 1
    with Calls() as calls, Operations() as operations:
        one.exchange(measure=measure, train=train)
    found = calls.found | operations.found  # a read that both saw counts once
    return Counter({place: count / len(one.context.clients) for place, count in found.items()})


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fedavg", {}),
        ("fedprox", {}),
        ("uefl", {}),
        ("fedavg", {"clients_at_once": 3}),
        ("uefl", {"clients_at_once": 3}),
    ],
)
def test_a_client_that_trains_is_read_once(name, keys):
    """The server reads the largest elements and the running variances of the update.

    For UEFL it also reads the usage. At the end it checks the average.
    """
    found = reads(name, measure=False, train=True, **keys)
    of_client = {place: count for place, count in found.items() if place.startswith("uefl.client.work:")}
    assert list(of_client.values()) == [1.0]
    assert sum(found.values()) < 5


@pytest.mark.parametrize(("name", "most"), [("fedavg", 1), ("uefl", 2)])
def test_a_client_that_measures_is_read_for_its_metrics(name, most):
    """The second read is for the algorithm's own metrics."""
    found = reads(name, measure=True, train=True)
    found.subtract(reads(name, measure=False, train=True))
    assert 0 < sum(found.values()) <= most
