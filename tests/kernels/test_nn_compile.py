"""The layers work under torch.compile with inductor, its default backend.

The tests compare the gradients and codewords of several training steps.

Inductor recomputes cheap values in the backward pass, so a clone of a buffer that the forward pass updates
is not a copy there; ``aot_eager`` does not show that. The layers with the largest graphs run in the fast
tests with ``aot_eager`` alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.config
from torch.utils.checkpoint import checkpoint

from uefl_kernels import vq, vq_with_sums
from uefl_kernels.nn import ExtensibleCodebook, ResidualVQ

from .conftest import normal
from .nn_layers import layer


class Averaged(torch.nn.Module):
    """A custom layer that updates the codebook in place after the op.

    It may have the clone that eager autograd needs, or not.
    """

    def __init__(self, cloned: bool) -> None:
        super().__init__()
        self.cloned = cloned
        self.register_buffer("codebook", normal(16, 8, seed=5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, sums = vq_with_sums(
            x, self.codebook.clone() if self.cloned else self.codebook, estimator="rotation"
        )
        with torch.no_grad():
            self.codebook.lerp_((sums / out.counts.clamp(min=1).unsqueeze(-1)).to(x.dtype), 0.5)
        return out.quantized, out.indices, out.loss


class Checkpointed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = checkpoint(
            self.inner, x, use_reentrant=False
        )
        return found


def steps(run, count=3, **given):
    found = []
    for step in range(count):
        x = normal(2, 20, 8, seed=step).requires_grad_()
        torch.manual_seed(step)
        quantized, _, loss = run(x, **given)
        (quantized.square().sum() + loss.sum()).backward()
        found.append(x.grad)
    return found


def same(plain, compiled, run=None, **given):
    torch._dynamo.reset()
    run = torch.compile(compiled, fullgraph=True) if run is None else run
    for got, want in zip(steps(run, **given), steps(plain, **given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)


def test_first_steps_have_the_gradients_of_plain_pytorch():
    same(layer(codebook_size=16), layer(codebook_size=16))


def test_residual_quantizers(full_graph):
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, num_quantizers=2, codebook_size=6, threshold_ema_dead_code=1, rotation_trick=True)
    same(rvq, compiled := copy.deepcopy(rvq), full_graph(compiled))


@pytest.mark.slow
@pytest.mark.parametrize(("rotation", "backend"), [(True, "aot_eager"), (False, "inductor")])
def test_beams_whose_codewords_are_updated_behind_the_search(rotation, backend):
    torch.manual_seed(0)
    rvq = ResidualVQ(
        dim=8, num_quantizers=2, codebook_size=16, beam_size=2, decay=0.5, rotation_trick=rotation
    )
    compiled = copy.deepcopy(rvq)
    same(rvq, compiled, torch.compile(compiled, fullgraph=True, backend=backend))


def test_drawn_codewords(full_graph):
    """In this mode, a graph draws the numbers of plain PyTorch."""
    options = {
        "stochastic_sample_codes": True,
        "straight_through": True,
        "rotation_trick": False,
        "decay": 0.5,
    }
    with torch._inductor.config.patch(fallback_random=True):
        same(layer(**options), compiled := layer(**options), full_graph(compiled))


def test_kmeans_of_the_first_batch(full_graph):
    """The first step has a graph of its own, and the next steps compile another one."""
    same(layer(kmeans_init=True), compiled := layer(kmeans_init=True), full_graph(compiled))
    assert compiled._codebook.initted


@pytest.mark.slow
def test_checkpointed_region_recomputes_with_the_same_codewords():
    plain, compiled = layer(), Checkpointed(layer())
    same(plain, compiled.inner, torch.compile(compiled, fullgraph=True))


@pytest.mark.slow
@pytest.mark.parametrize("cloned", [False, True])
def test_a_codebook_of_the_user_that_is_updated_behind_the_op(cloned):
    same(Averaged(True), Averaged(cloned))


@pytest.mark.slow
def test_a_codebook_that_an_optimizer_moves():
    codewords, gradients = normal(6, 8, seed=2), []
    for compiled in (False, True):
        codebook = ExtensibleCodebook(codewords, capacity=6)
        run = torch.compile(codebook, fullgraph=True) if compiled else codebook
        optimizer = torch.optim.SGD(codebook.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            run(normal(30, 8, seed=step)).loss.backward()
            optimizer.step()
        gradients.append((codebook.weights[0].grad, codebook.weights[0].detach()))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"learnable_codebook": True}], ids=str)
def test_the_mode_with_little_overhead(options):
    """On a GPU, this mode records CUDA graphs, and on a CPU, it must change nothing."""
    same(
        layer(**options),
        compiled := layer(**options),
        torch.compile(compiled, fullgraph=True, mode="reduce-overhead"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [{"activation_memory_budget": 0.3}, {"aggressive_recomputation": True}], ids=str
)
def test_a_small_budget_for_memory_changes_nothing(budget):
    with torch._functorch.config.patch(**budget):
        same(layer(), layer())


def test_no_budget_at_all_is_refused():
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(activation_memory_budget=0),
        pytest.raises(Exception, match="activation_memory_budget is 0"),
    ):
        steps(torch.compile(layer(), fullgraph=True), 1)


@pytest.mark.slow
def test_dynamic_shapes():
    torch._dynamo.reset()
    run = torch.compile(lambda x, codebook: vq(x, codebook).loss, fullgraph=True, dynamic=True)
    for n in (3, 40, 41):
        x, codebook = normal(n, 8).requires_grad_(), normal(5, 8, seed=1).requires_grad_()
        run(x, codebook).backward()
        a, b = normal(n, 8).requires_grad_(), normal(5, 8, seed=1).requires_grad_()
        vq(a, b).loss.backward()
        torch.testing.assert_close((x.grad, codebook.grad), (a.grad, b.grad))
