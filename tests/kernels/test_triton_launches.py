"""Count the launches of the ops in Triton: on CPU tensors, in a new process, without a launch."""

import pytest

from . import ahead

pytest.importorskip("triton")

SCRIPT = """
import json, os
from collections import defaultdict
from importlib import import_module
from pathlib import Path
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key


class Gpu:
    get_current_device = staticmethod(lambda: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


compiled, grids = defaultdict(set), set()


def launcher(kernel, grid):
    def launch(*arguments, **options):
        _, keys, _, _, binder = kernel.device_caches[0]
        _, specialization, parsed = binder(*arguments, **options, debug=False, instrumentation_mode="")
        compiled[kernel.__name__].add(compute_cache_key(keys, specialization, parsed))
        grids.add((kernel.__name__, *grid))

    return launch


driver.set_active(Gpu())
JITFunction.__getitem__ = launcher
torch.empty, torch.Tensor.new_empty = torch.zeros, torch.Tensor.new_zeros  # zeros are valid indices
import uefl_kernels as ops
from uefl_kernels.ops.fsq import fsq
for path in Path(ops.__file__).parent.glob("ops/*/triton.py"):
    import_module(f"uefl_kernels.ops.{path.parent.name}.triton")
os.environ["TRITON_INTERPRET"] = "1"  # accepts CPU tensors; the kernels were defined before

report = []
for rows, codes, number, seed in ((100, 7, 5, 3), (1, 16, 1, 1), (16, 1, 16, 16), (4096, 8, 32, 0)):
    with ops.backend("triton"):
        x, codebook = torch.randn(rows, 12).requires_grad_(), torch.randn(codes, 12).requires_grad_()
        for estimator in ("straight_through", "rotation"):
            out = ops.vq(x, codebook, estimator=estimator)
            (out.quantized.sum() + out.loss).backward()
        ops.vq_assign(torch.randn(rows + 2, 12, 5).transpose(1, 2), torch.randn(2, codes, 6))
        if rows > 7:
            for init in ("k-means++", "k-means||", "random"):
                ops.kmeans(x, 7, init=init, seed=seed, n_init=2, max_iter=1)
        weights = [torch.randn(20, 12), torch.randn(3, 20)]
        options = {"input_dropout": True, "logit_dropout": True}
        for layers in (1, 2):
            ops.mc_dropout_mlp(x, weights[:layers], p=0.1 + seed / 40, passes=number, seed=seed, **options)
        torch.ops.uefl_triton.dropout_mask(torch.tensor(seed), rows, 33, number, number, 0.5, False)
        logits, shares = torch.randn(rows, 10).requires_grad_(), torch.full((number, number, 10), 0.1).log()
        groups, zero = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        ops.transition_nll(logits, zero, shares, groups=groups).sum().backward()
        ops.log_transition_probs(logits, shares, groups=groups).sum().backward()
        offsets, proportions = torch.arange(number + 1) * rows // number, torch.full((number, 10), 0.1)
        ops.set_proportion_loss(logits, offsets, proportions).sum().backward()
        z = torch.randn(rows, 2 + number % 3).requires_grad_()
        fsq(z, [4 + number] * z.shape[1], False, False, True)[0].sum().backward()
    report.append({name: len(keys) for name, keys in compiled.items()})
print(json.dumps([report, sorted(grids)]))
"""


@pytest.mark.slow
def test_other_numbers_of_rows_passes_or_sets_do_not_recompile(tmp_path):
    """The sizes include 1 and multiples of 16, which Triton specializes.

    Every grid has one dimension: the others end at 65535.
    """
    report, grids = ahead.report(SCRIPT, tmp_path)
    first, *others = report
    assert len(first) > 20
    for counts in others:
        assert {name: counts[name] - first[name] for name in first if counts[name] != first[name]} == {}
    assert all(len(grid) == 2 for grid in grids)
