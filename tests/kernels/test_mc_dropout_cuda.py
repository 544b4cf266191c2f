"""mc_dropout_mlp on a GPU against the float64 reference on the CPU.

Without a GPU, the tests are skipped.
"""

import pytest
import torch

from uefl_kernels import MCStats, backend, mc_dropout_mlp
from uefl_kernels._library import triton_available

from .conftest import captured, cuda_built, no_waiting
from .mc_dropout_cases import FIELDS, SHAPES, loss_of, mlp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BACKENDS = {"cuda": lambda: cuda_built("mc_dropout_mlp"), "triton": triton_available}
HEADS = {  # B, then the widths from the first dropout on
    "head": (300, 512, 10),
    "head of 32 classes": (40, 70, 32),
    "43 classes": (70, 40, 43),
    "1000 classes": (20, 65, 1000),
    "two layers": (70, 512, 100, 10),
    "logits alone": (33, 7),
}


@pytest.fixture(params=BACKENDS)
def forced(request):
    if not BACKENDS[request.param]():
        pytest.skip(f"the {request.param} kernels are not built here")
    return request.param


def run(name, device, x, weights, biases, **options):
    with backend(name):
        found = mc_dropout_mlp(
            x.to(device), [w.to(device) for w in weights], [b.to(device) for b in biases], **options
        )
    return MCStats(*(piece.cpu() for piece in found))


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize(("rows", "columns", "p"), [(5, 33, 0.3), (300, 40, 0.1), (0, 4, 0.5)])
def test_small_masks_equal_the_definition(rows, columns, p, consistent, forced):
    found = getattr(torch.ops, f"uefl_{forced}").dropout_mask(
        torch.tensor(5, device="cuda"), rows, columns, 7, 2, p, consistent
    )
    expected = torch.ops.uefl_reference.dropout_mask(torch.tensor(5), rows, columns, 7, 2, p, consistent)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
def test_small_equals_the_definition(shape, consistent, forced):
    x, weights, biases = (
        mlp(shape)
        if len(shape) > 2
        else (mlp((*shape, 3))[0], [torch.eye(shape[1])], [torch.zeros(shape[1])])
    )
    rates = [0.1, *[0.5] * (len(shape) - 3), 0.3] if len(shape) > 2 else [0.0, 0.3]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        options = {
            "p": rates,
            "passes": 21,
            "input_dropout": True,
            "logit_dropout": True,
            "consistent": consistent,
            "seed": 3,
        }
        arguments = x.to(dtype), [weight.to(dtype) for weight in weights], [bias.to(dtype) for bias in biases]
        found, expected = (
            run(forced, "cuda", *arguments, **options),
            run("reference", "cpu", *arguments, **options),
        )
        for name, got, want in zip(FIELDS, found, expected, strict=True):
            torch.testing.assert_close(
                got, want, rtol=0, atol=5e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_small_gradients_equal_the_cpu(shape, forced):
    gradients = []
    for name, device in ((forced, "cuda"), ("reference", "cpu")):
        leaves = [
            tensor.to(device).requires_grad_()
            for piece in mlp(shape)
            for tensor in (piece if isinstance(piece, list) else [piece])
        ]
        count = (len(leaves) - 1) // 2
        with backend(name):
            loss_of(
                mc_dropout_mlp(leaves[0], leaves[1 : 1 + count], leaves[1 + count :], p=0.3, passes=4, seed=7)
            ).backward()
        gradients.append(
            [torch.zeros_like(leaf).cpu() if leaf.grad is None else leaf.grad.cpu() for leaf in leaves]
        )
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_small_never_waits_and_replays_in_a_graph(forced):
    x, weights, biases = (
        piece.cuda() if isinstance(piece, torch.Tensor) else [t.cuda() for t in piece]
        for piece in mlp((70, 40, 33, 10))
    )
    with backend(forced):
        call = lambda: mc_dropout_mlp(x, weights, biases, p=0.3, seed=1)  # noqa: E731
        graph, found = captured(call)
        with no_waiting():
            call()
        x.mul_(-2)
        graph.replay()
        assert torch.equal(found.mean_probs, call().mean_probs)


def test_a_row_does_not_depend_on_the_size_of_the_batch(forced):
    x, weights, biases = mlp((1000, 64, 10))
    options = {"p": 0.3, "input_dropout": True, "passes": 30, "seed": 1}
    whole, piece = (run(forced, "cuda", rows, weights, biases, **options) for rows in (x, x[:37]))
    for got, want in zip(piece, whole, strict=True):
        assert torch.equal(got, want[:37])


def test_memory_does_not_grow_with_the_passes(forced):
    x, weights, biases = (
        piece.cuda() if isinstance(piece, torch.Tensor) else [t.cuda() for t in piece]
        for piece in mlp((2000, 64, 256, 10))
    )
    x.requires_grad_()

    def peak(passes):
        torch.cuda.reset_peak_memory_stats()
        with backend(forced):
            loss_of(mc_dropout_mlp(x, weights, biases, p=0.3, passes=passes, seed=1)).backward()
        return torch.cuda.max_memory_allocated()

    # A slot of the CUDA kernel is a range of passes. From some hundred passes on, it uses all slots.
    peak(200)
    assert peak(800) <= peak(200)
