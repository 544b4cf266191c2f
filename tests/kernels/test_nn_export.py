"""Export of layers: ONNX runs in onnxruntime, and TorchScript raises an error."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from uefl_kernels import COMPILED, decompositions, kmeans, kmeans_step, mc_dropout_mlp, vq, vq_assign
from uefl_kernels._decompositions import vq as decomposed
from uefl_kernels._decompositions import vq_assign as decomposed_assign
from uefl_kernels.metrics import entropy
from uefl_kernels.nn import (
    FSQ,
    LFQ,
    BinaryMapper,
    ExtensibleCodebook,
    GroupedResidualVQ,
    HierarchicalVQ,
    MCDropout,
    ResidualFSQ,
    ResidualLFQ,
    ResidualSimVQ,
    ResidualVQ,
    SimVQ,
    VectorQuantize,
)

from .conftest import normal

CLASSIFIER = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
LAYERS = {
    "plain": lambda: VectorQuantize(8, 16),
    "cosine": lambda: VectorQuantize(8, 16, use_cosine_sim=True),
    "heads": lambda: VectorQuantize(8, 16, heads=2, codebook_dim=3),
    "per head": lambda: VectorQuantize(8, 16, heads=2, codebook_dim=4, separate_codebook_per_head=True),
    "learned": lambda: VectorQuantize(8, 16, learnable_codebook=True),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16),
    "shared": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, shared_codebook=True),
    "beams": lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=16, beam_size=2),
    "groups": lambda: GroupedResidualVQ(dim=8, groups=2, num_quantizers=2, codebook_size=16),
    "sim": lambda: SimVQ(8, 16),
    "residual sim": lambda: ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=16),
    "scalar": lambda: FSQ([8, 5, 5], dim=8),
    "residual scalar": lambda: ResidualFSQ(dim=8, levels=[8, 5, 5], num_quantizers=2),
    "binary": lambda: LFQ(codebook_size=16, dim=8),
    "residual binary": lambda: ResidualLFQ(dim=8, codebook_size=16, num_quantizers=2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_onnxruntime_agrees(name):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    layer = LAYERS[name]()
    layer(normal(4, 50, 8, seed=1))
    layer.eval()
    shapes = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)},)
    exported = torch.export.export(layer, (normal(2, 5, 8),), dynamic_shapes=shapes)
    program = torch.onnx.export(exported.run_decompositions(decompositions()), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    for x in (normal(2, 5, 8), normal(3, 200, 8, seed=2)):
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        quantized, indices = layer(x)[:2]
        assert torch.equal(torch.from_numpy(found[1]), indices)
        torch.testing.assert_close(torch.from_numpy(found[0]), quantized, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_the_call_of_torch_onnx(name):
    """A layer goes straight to the exporter, which knows no custom ops."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    layer, x = LAYERS[name](), normal(2, 50, 8)
    layer(normal(4, 50, 8, seed=1))
    program = torch.onnx.export(layer.eval(), (x,), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(found[1]), layer(x)[1])


@pytest.mark.parametrize("name", LAYERS)
def test_onnx_gets_the_ops_of_pytorch(name, monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    layer, x = LAYERS[name]().eval(), normal(2, 50, 8)
    expected = layer(x)
    program = torch.export.export(layer, (x,), strict=False).run_decompositions()
    ops = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert ops
    assert not {op for op in ops if op.startswith("uefl") or "foreach" in op}
    found = program.module()(x)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("name", LAYERS)
def test_decompositions_leave_no_op(name):
    layer, x = LAYERS[name]().eval(), normal(2, 50, 8)
    program = torch.export.export(layer, (x,)).run_decompositions(decompositions())
    assert not [node for node in program.graph.nodes if str(node.target).startswith("uefl")]
    assert torch.equal(program.module()(x)[1], layer(x)[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [VectorQuantize, HierarchicalVQ])
@pytest.mark.parametrize("how", ["export", "strict", "trace"])
def test_a_codebook_that_waits_for_k_means_is_refused(make, how, monkeypatch):
    """The program would run k-means in every call."""
    options = {"accept_image_fmap": True, "scales": (1, 2)} if make is HierarchicalVQ else {}
    layer, x = make(dim=8, codebook_size=16, kmeans_init=True, **options).eval(), normal(2, 8, 8, 8)
    x = x if options else x.flatten(0, 2)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: how != "trace")
    run = torch.jit.trace if how == "trace" else partial(torch.export.export, strict=how == "strict")
    with pytest.raises(Exception, match="k-means"):
        run(layer, (x,))
    assert not any(buffer.any() for name, buffer in layer.named_buffers() if name.endswith("initted"))


class FunctionLayer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


WITHOUT_ONNX = {
    "MCDropout": lambda: MCDropout(CLASSIFIER),
    "MCDropout: ": lambda: MCDropout(nn.Sequential(nn.Linear(8, 8), nn.Dropout1d(0.5), nn.Linear(8, 3))),
    "mc_dropout_mlp": lambda: FunctionLayer(
        lambda x: tuple(mc_dropout_mlp(x, [x[:3]], [None], p=[0.5], input_dropout=True))
    ),
    "kmeans": lambda: FunctionLayer(lambda x: kmeans(x, 2).centers),
    "kmeans_step": lambda: FunctionLayer(lambda x: tuple(kmeans_step(x, x[:3]))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", WITHOUT_ONNX)
def test_what_onnx_cannot_express_is_refused(name, strict, monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(Exception, match=rf"{name}.*torch\.onnx\.export"):
        torch.export.export(WITHOUT_ONNX[name](), (normal(20, 8),), strict=strict)


def test_onnx_gets_the_entropy_of_probabilities(monkeypatch):
    probs = torch.tensor([[0.0, 1.0], [0.25, 0.75]])
    expected = entropy(probs)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(FunctionLayer(entropy), (probs,))
    assert not [node for node in program.graph.nodes if "entr" in str(node.target)]
    torch.testing.assert_close(program.module()(probs), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith(("scalar", "binary"))])
def test_the_exporter_that_traces_is_refused(name):
    with pytest.raises(NotImplementedError, match=r"dynamo=False.*torch\.export") as error:
        torch.onnx.export(LAYERS[name]().eval(), (normal(2, 5, 8),), "unwritten.onnx", dynamo=False)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("codebooks", [None, 2])
def test_decompositions_are_the_ops(metric, codebooks):
    x, codebook = normal(3, 40, 8), normal(16, 4, seed=1) if codebooks is None else normal(2, 16, 4, seed=1)
    codebook[..., 3, :] = 0
    x[0, 0, 0], x[0, 1, 2] = torch.nan, torch.inf
    assert torch.equal(decomposed_assign(x, codebook, metric, True), vq_assign(x, codebook, metric=metric))
    x[0, :2] = 1.0
    want = torch.ops.uefl.vq(x, codebook, metric, True, True, 1.0, 0.5, False)
    got = decomposed(x, codebook, metric, True, True, 1.0, 0.5, False)
    assert [piece.dtype for piece in got] == [piece.dtype for piece in want]
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[3], want[3])
    for place in (2, 4):
        torch.testing.assert_close(got[place], want[place])
    assert vq(x, codebook, metric=metric).indices.shape == (3, 40, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        *LAYERS.values(),
        lambda: ResidualSimVQ(dim=8, num_quantizers=2, codebook_size=16),
        lambda: ExtensibleCodebook(normal(4, 8), capacity=8),
        lambda: MCDropout(CLASSIFIER),
        lambda: BinaryMapper(bits=8),
    ],
)
def test_torchscript_is_refused(make):
    layer = make()
    for model in (layer, nn.Sequential(nn.Linear(8, 8), layer)):
        with pytest.raises(NotImplementedError, match=rf"^{type(layer).__name__}: .*torch\.export"):
            torch.jit.script(model)
