"""torch's vector functions are called on one element before anything calls them on many."""

import pytest

from tests.fresh import python
from uefl_kernels._vector_math import FUNCTIONS

TRACE = """
import torch
with torch.profiler.profile(record_shapes=True) as trace:
    {}
calls = [event for event in trace.events() if event.input_shapes and event.name.startswith("aten::")]
assert all(shape == [1] for event in calls for shape in event.input_shapes if shape), calls
print(*sorted(event.name.removeprefix("aten::") for event in calls))
"""


@pytest.mark.parametrize(
    "use",
    ["from uefl_kernels import vq_assign", "import uefl_kernels.ops.vq_assign", "import uefl.models.saved"],
)
def test_first_use_calls_each_function_in_either_precision(use):
    done = python(TRACE.format(use))
    assert done.returncode == 0, done.stderr
    called = done.stdout.split()
    for name in FUNCTIONS:
        assert called.count(name) == 2, name
