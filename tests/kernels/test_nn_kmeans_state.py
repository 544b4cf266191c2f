"""The buffer ``initted`` records in every copy whether k-means of the first batch is done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from uefl_kernels.nn import VectorQuantize

from .conftest import no_waiting, normal
from .nn_layers import layer, state


def trained():
    vq = layer(kmeans_init=True)
    vq(normal(40, 8))
    return vq


def waiting():
    return layer(1, kmeans_init=True)


def kept(vq, codewords):
    """Return True if another batch leaves the codewords unchanged.

    The batch is seen in training without updates, and in evaluation.
    """
    vq(normal(40, 8, seed=9), freeze_codebook=True)
    vq.eval()(normal(40, 8, seed=8))
    return torch.equal(vq.codebook, codewords)


AVERAGES = {"mean": {}, "moving": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("options", [{"kmeans_init": True}, {"affine_param": True}], ids=str)
def test_averaged_model(options, kind):
    """All buffers are averaged, and codes belong to the averaged codewords, in a loaded copy, too."""
    source, expected = layer(**options), {}
    average = AveragedModel(layer(1, **options), use_buffers=True, **AVERAGES[kind])
    for step in range(4):
        source(normal(40, 8, seed=step))
        now = {name: value.clone() for name, value in source.named_buffers() if value.is_floating_point()}
        weight = 0.1 if kind == "moving" else 1 / (step + 1)
        expected = {name: expected[name].lerp(now[name], weight) for name in now} if expected else now
        average.update_parameters(source)
    found = dict(average.module.named_buffers())
    torch.testing.assert_close({name: found[name] for name in expected}, expected)
    saved, other = state(average.module), layer(2, **options)
    assert [value.dtype for value in saved.values() if value.dim() == 0] == [
        torch.bool for name in found if name.endswith(("initted", "needs_init"))
    ]
    other.load_state_dict(saved, assign=True)
    average = AveragedModel(other, use_buffers=True)
    average.update_parameters(other), average.update_parameters(other)
    for vq in (average.module, other):
        quantized, indices, _ = vq.eval()(normal(40, 8, seed=8))
        assert torch.equal(quantized, vq.decode(indices))
        assert torch.equal(vq._codebook.embed, found["_codebook.embed"])


def test_buffers_copied_into_a_deepcopy():
    source, copied = trained(), copy.deepcopy(waiting())
    for mine, other in zip(copied.buffers(), source.buffers(), strict=True):
        mine.copy_(other)
    assert kept(copied, source.codebook)


def test_assigned_buffers():
    source, other = trained(), waiting()
    for name, buffer in source._codebook.named_buffers():
        setattr(other._codebook, name, buffer.clone())
    assert kept(other, source.codebook)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_state(assign):
    source, other = trained(), waiting()
    other.load_state_dict(source.state_dict(), assign=assign)
    assert kept(other, source.codebook)
    fresh = layer()  # and a layer made without k-means takes over the pending k-means
    fresh.load_state_dict(waiting().state_dict(), assign=assign)
    fresh.eval()(normal(40, 8))
    assert fresh.codebook.any()


def test_tensors_of_the_state_filled_in_place():
    source, other = trained(), waiting()
    for name, tensor in other.state_dict().items():
        tensor.copy_(source.state_dict()[name])
    assert kept(other, source.codebook)


def test_set_back_to_the_beginning():
    vq = trained()
    vq._codebook.initted.fill_(False)
    before = vq.codebook.clone()
    vq.eval()(normal(40, 8, seed=3))
    assert not torch.equal(vq.codebook, before)
    assert vq._codebook.initted


def test_data_parallel_replicas():
    vq = trained()
    for step in range(3):
        replica = vq._replicate_for_data_parallel()
        replica._codebook = vq._codebook._replicate_for_data_parallel()
        replica._codebook._buffers = {
            name: value if value is None else value.clone() for name, value in vq._codebook._buffers.items()
        }
        replica._modules = {**replica._modules, "_codebook": replica._codebook}
        before = replica.codebook.clone()
        replica(normal(40, 8, seed=step), freeze_codebook=True)
        assert torch.equal(replica.codebook, before)


def test_functional_call():
    vq = waiting()
    others = state(vq)
    functional_call(vq, others, (normal(40, 8),))
    assert others["_codebook.initted"]
    assert others["_codebook.embed"].any()
    assert not vq._codebook.initted
    vq(normal(40, 8))
    assert vq._codebook.initted
    assert vq.codebook.any()


def test_training_begins_from_codewords_that_were_set():
    codewords = normal(10, 8, seed=4)
    for options in (
        {"kmeans_init": True},
        {},
        {"kmeans_init": True, "separate_codebook_per_head": True, "heads": 1},
    ):
        vq = layer(**options)
        for _ in range(2):
            vq.codebook = codewords.view(vq.codebook.shape)
            vq.eval()(normal(40, 8))
            assert torch.equal(vq.codebook.flatten(0, -2), codewords)
            vq.train()(codewords)  # every codeword gets itself, so the averages stay where they are
            torch.testing.assert_close(vq.codebook.flatten(0, -2), codewords, rtol=1e-4, atol=1e-4)
            vq(normal(40, 8))  # now the codewords differ in their use


def test_compiled_after_a_copy_and_after_a_move(full_graph):
    source = trained()
    for other in (copy.deepcopy(source), copy.deepcopy(source).to(torch.float64), copy.deepcopy(waiting())):
        if not other._codebook.initted:
            for mine, value in zip(other.buffers(), source.buffers(), strict=True):
                # behind the compiler's back: k-means is traced, and its result is not taken
                mine.copy_(value)
        run, codewords = full_graph(other), other.codebook.clone()
        run(normal(40, 8), freeze_codebook=True)
        run(normal(40, 8), freeze_codebook=True)
        assert torch.equal(other.codebook, codewords)


def test_meta_device():
    with torch.device("meta"):
        vq = VectorQuantize(8, 10, kmeans_init=True)
    assert vq(torch.empty(4, 8, device="meta"))[0].shape == (4, 8)
    vq.load_state_dict(trained().state_dict(), assign=True)
    assert vq._codebook.initted


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_gpu_is_read_once():
    vq, x = trained().cuda(), normal(40, 8).cuda()
    vq(x)
    with no_waiting():
        vq(x)
