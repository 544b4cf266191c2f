"""Convert state dicts of codecs and image tokenizers to our layers and back.

Their formulas are written out here.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from uefl_kernels.nn import ResidualVQ, VectorQuantize, convert

from .conftest import normal

Q, K, D = 3, 16, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def encodec_state(start="quantizer.layers.{}.codebook."):
    state = {"encoder.layers.0.conv.weight": torch.zeros(4, 1, 3)}
    for place in range(Q):
        codewords, sizes = normal(K, D, seed=place), normal(K, seed=place).abs() + 0.5
        pieces = {"inited": torch.ones(1), "cluster_size": sizes, "embed": codewords}
        pieces["embed_avg"] = codewords * sizes.unsqueeze(-1)
        state |= {start.format(place) + name: value for name, value in pieces.items()}
    return state


def mimi_state(inner=D):
    state = {}
    for half, number in (("semantic", 1), ("acoustic", Q)):
        start = f"quantizer.{half}_residual_vector_quantizer."
        if inner != D:
            state[f"{start}input_proj.weight"] = normal(inner, D, 1, seed=50)
            state[f"{start}output_proj.weight"] = normal(D, inner, 1, seed=51)
        for place in range(number):
            at = f"{start}layers.{place}.codebook."
            state[at + "initialized"] = torch.ones(1)
            state[at + "cluster_usage"] = normal(K, seed=place).abs() * 2
            state[at + "embed_sum"] = normal(K, inner, seed=place)
    return state


def dac_state(form="weight"):
    state = {}
    for place in range(Q):
        start = f"quantizer.quantizers.{place}."
        state[start + "codebook.weight"] = normal(K, 4, seed=place)
        for name, shape in (("in_proj", (4, D, 1)), ("out_proj", (D, 4, 1))):
            weight = normal(*shape, seed=place + 10)
            length = weight.norm(dim=(1, 2), keepdim=True)
            pieces = {
                "weight": {"weight": weight},
                "g and v": {"weight_g": length, "weight_v": weight * 3},
                "parametrized": {
                    "parametrizations.weight.original0": length,
                    "parametrizations.weight.original1": weight / 2,
                },
            }[form]
            pieces["bias"] = normal(shape[0], seed=place + 20)
            state |= {f"{start}{name}.{piece}": value for piece, value in pieces.items()}
    return state


def codes_of(x, codebooks):
    """Return the codes ``[Q, B, T]`` and the sum of the codewords of x ``[B, D, T]`` by plain search."""
    residual, found = x.movedim(1, -1), []
    for codebook in codebooks:
        found.append(torch.cdist(residual, codebook.unsqueeze(0)).argmin(-1))
        residual = residual - codebook[found[-1]]
    return torch.stack(found), x - residual.movedim(-1, 1)


@pytest.mark.parametrize("start", ["quantizer.layers.{}.codebook.", "quantizer.vq.layers.{}._codebook."])
def test_encodec_round_trip(start):
    state = encodec_state(start)
    layer = convert.from_encodec(state).eval()
    x = normal(2, D, 20, seed=9)
    codes, total = codes_of(x, [state[f"{start.format(place)}embed"] for place in range(Q)])
    assert torch.equal(layer.encode(x).movedim(-1, 0), codes)
    torch.testing.assert_close(layer.decode(codes.movedim(0, -1).int()), total, **CLOSE)
    back = convert.to_encodec(layer, original="_codebook" in start)
    assert back.keys() == {name for name in state if "codebook" in name}
    assert all(torch.equal(value, state[name]) for name, value in back.items())


def encodec_step(x, codebook, decay=0.99, eps=1e-5):
    """Quantize rows and move the averages as ``EuclideanCodebook`` of encodec does, without revival."""
    indices = torch.cdist(x, codebook["embed"]).argmin(-1)
    chosen = F.one_hot(indices, K).float()
    quantized = codebook["embed"][indices]
    codebook["cluster_size"].mul_(decay).add_(chosen.sum(0), alpha=1 - decay)
    codebook["embed_avg"].mul_(decay).add_(chosen.t() @ x, alpha=1 - decay)
    total = codebook["cluster_size"].sum()
    sizes = (codebook["cluster_size"] + eps) / (total + K * eps) * total
    codebook["embed"].copy_(codebook["embed_avg"] / sizes.unsqueeze(-1))
    return quantized


def test_five_steps_of_encodecs_training():
    state = encodec_state()
    layer = convert.from_encodec(state, threshold_ema_dead_code=0)
    codebooks = [
        {
            name: state[f"quantizer.layers.{place}.codebook.{name}"]
            for name in ("cluster_size", "embed_avg", "embed")
        }
        for place in range(Q)
    ]
    for step in range(5):
        x = normal(2, D, 50, seed=100 + step).requires_grad_()
        quantized, _, losses = layer(x)
        (quantized.sum() + losses.sum()).backward()
        residual, total, want_losses = x.detach().movedim(1, -1).reshape(-1, D), 0, []
        for codebook in codebooks:
            codewords = encodec_step(residual, codebook)
            want_losses.append((residual - codewords).square().mean())
            residual, total = residual - codewords, total + codewords
        torch.testing.assert_close(quantized.movedim(1, -1).reshape(-1, D), total, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(losses, torch.stack(want_losses), rtol=1e-5, atol=1e-5)
        for place, codebook in enumerate(codebooks):
            found = layer.layers[place]._codebook
            for name, value in codebook.items():
                torch.testing.assert_close(getattr(found, name)[0], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", [D, 4])
def test_mimi_round_trip(inner):
    state = mimi_state(inner)
    layers = convert.from_mimi(state)
    x, codes, total = normal(2, D, 20, seed=9), [], 0
    for half, layer in zip(("semantic", "acoustic"), layers, strict=True):
        start = f"quantizer.{half}_residual_vector_quantizer."
        codebooks = [
            state[f"{start}layers.{place}.codebook.embed_sum"]
            / state[f"{start}layers.{place}.codebook.cluster_usage"].clamp(min=1e-5).unsqueeze(-1)
            for place in range(layer.num_quantizers)
        ]
        given = F.conv1d(x, state[f"{start}input_proj.weight"]) if inner != D else x
        found, piece = codes_of(given, codebooks)
        piece = F.conv1d(piece, state[f"{start}output_proj.weight"]) if inner != D else piece
        assert torch.equal(layer.encode(x).movedim(-1, 0), found)
        codes.append(found)
        total = total + piece
    out = sum(layer.decode(piece.movedim(0, -1)) for layer, piece in zip(layers, codes, strict=True))
    torch.testing.assert_close(out, total, rtol=1e-5, atol=1e-5)
    back = convert.to_mimi(*layers)
    assert back.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in back.items())


def test_mimis_codewords_after_a_step():
    layers = convert.from_mimi(mimi_state())
    layers[0](normal(2, D, 50, seed=3))
    back = convert.to_mimi(*layers)
    again = convert.from_mimi(back)
    torch.testing.assert_close(again[0].codebooks, layers[0].codebooks, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["weight", "g and v", "parametrized"])
def test_dac_round_trip(form):
    state = dac_state(form)
    layer = convert.from_dac(state).eval()
    plain = dac_state()
    x = normal(2, D, 20, seed=9)
    residual, total, codes = x, 0, []
    for place in range(Q):
        pieces = {name.removeprefix(f"quantizer.quantizers.{place}."): value for name, value in plain.items()}
        rows = F.conv1d(residual, pieces["in_proj.weight"], pieces["in_proj.bias"]).movedim(1, -1)
        codebook = pieces["codebook.weight"]
        codes.append((F.normalize(rows, dim=-1) @ F.normalize(codebook, dim=-1).t()).argmax(-1))
        chosen = codebook[codes[-1]].movedim(-1, 1)
        chosen = F.conv1d(chosen, pieces["out_proj.weight"], pieces["out_proj.bias"])
        residual, total = residual - chosen, total + chosen
    assert torch.equal(layer.encode(x), torch.stack(codes, -1))
    torch.testing.assert_close(layer.decode(torch.stack(codes, -1)), total, rtol=1e-5, atol=1e-5)
    for name, value in convert.to_dac(layer).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-7)
    normed = convert.to_dac(layer, weight_norm=True)
    torch.testing.assert_close(
        convert.from_dac(normed).eval().decode(layer.encode(x)), layer.decode(layer.encode(x))
    )


def test_losses_of_dacs_quantizer_dropout():
    layer = convert.from_dac(dac_state())
    x, n_q = normal(3, D, 20, seed=9), torch.tensor([1, 3, 2])
    share = (n_q.unsqueeze(-1) > torch.arange(Q)).float().mean(0)
    each = [layer(x[place : place + 1], n_q=int(number))[2] for place, number in enumerate(n_q)]
    torch.testing.assert_close(layer(x, n_q=n_q)[2] * share, torch.stack(each).mean(0))


@pytest.mark.parametrize("name", ["quantize.embedding.weight", "embedding.weight"])
@pytest.mark.parametrize("legacy", [True, False])
def test_five_steps_of_a_vqmodel(name, legacy):
    codebook = normal(K, 4).requires_grad_()
    layer = convert.from_vqmodel(
        {name: codebook.detach().clone(), "decoder.bias": torch.zeros(2)}, legacy=legacy
    )
    optimizers = [torch.optim.SGD(given, 0.5, momentum=0.9) for given in ([codebook], layer.parameters())]
    for step in range(5):
        x, weight, found = normal(2, 4, 6, 6, seed=step), normal(2, 4, 6, 6, seed=90 + step), []
        rows = x.movedim(1, -1).clone().requires_grad_()
        indices = torch.cdist(rows.reshape(-1, 4), codebook).argmin(-1)
        codewords = codebook[indices].view(rows.shape)
        pull, push = (codewords.detach() - rows).square().mean(), (codewords - rows.detach()).square().mean()
        want = pull + 0.25 * push if legacy else 0.25 * pull + push
        ((rows + (codewords - rows).detach()).movedim(-1, 1) * weight).sum().add(want).backward()
        mine = x.clone().requires_grad_()
        quantized, found, loss = layer(mine)
        ((quantized * weight).sum() + loss).backward()
        assert torch.equal(found.flatten(), indices)
        torch.testing.assert_close(loss, want, **CLOSE)
        torch.testing.assert_close(mine.grad.movedim(1, -1), rows.grad, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(layer.codebook, codebook, **CLOSE)
    assert torch.equal(convert.to_vqmodel(layer, "")["embedding.weight"], layer.codebook)


def test_codewords_of_a_mimi_in_bfloat16():
    state = {name: value.bfloat16() for name, value in mimi_state().items()}
    start = "quantizer.semantic_residual_vector_quantizer.layers.0.codebook."
    usage = state[start + "cluster_usage"].clamp(min=1e-5).unsqueeze(-1)
    semantic, _ = convert.from_mimi(state)
    assert torch.equal(semantic.codebooks[0], (state[start + "embed_sum"] / usage).float())


def test_a_mimi_with_only_one_projection_is_refused():
    state = mimi_state(4)
    del state[next(name for name in state if "output_proj" in name)]
    with pytest.raises(ValueError, match="input_proj"):
        convert.from_mimi(state)


@pytest.mark.parametrize(
    "read", [convert.from_encodec, convert.from_mimi, convert.from_dac, convert.from_vqmodel]
)
def test_a_state_dict_of_something_else(read):
    with pytest.raises(ValueError, match=f"^{read.__name__}: found"):
        read({"encoder.weight": torch.zeros(3)})


def test_a_state_dict_that_lacks_a_quantizer():
    state = {name: value for name, value in encodec_state().items() if "layers.1.c" not in name}
    with pytest.raises(ValueError, match=r"\[0, 2\]"):
        convert.from_encodec(state)
    state = encodec_state()
    del state["quantizer.layers.1.codebook.embed"]
    with pytest.raises(ValueError, match="embed_avg"):
        convert.from_encodec(state)


@pytest.mark.parametrize(
    ("read", "state", "part"),
    [
        *((convert.from_encodec, encodec_state, part) for part in ("inited", "cluster_size", "embed_avg")),
        *((convert.from_mimi, mimi_state, part) for part in ("initialized", "cluster_usage", "embed_sum")),
        *((convert.from_dac, dac_state, part) for part in ("codebook.weight", "in_proj.bias")),
        (convert.from_dac, dac_state, "out_proj.weight"),
        (convert.from_dac, lambda: dac_state("g and v"), "in_proj.weight_v"),
    ],
)
def test_a_state_dict_without_a_part_of_a_quantizer(read, state, part):
    rest = {name: value for name, value in state().items() if not name.endswith(f".{part}")}
    with pytest.raises(ValueError, match=f"^{read.__name__}: .*{re.escape(part)}"):
        read(rest)


@pytest.mark.parametrize(
    ("read", "state"),
    [
        (convert.from_encodec, encodec_state),
        (convert.from_mimi, mimi_state),
        (convert.from_dac, dac_state),
        (convert.from_vqmodel, lambda: {"quantize.embedding.weight": normal(K, 4)}),
    ],
)
def test_a_state_dict_of_two_models(read, state):
    both = {f"{model}.{name}": value for model in ("first", "second") for name, value in state().items()}
    with pytest.raises(ValueError, match=r"first\..*second\."):
        read(both)


@pytest.mark.parametrize(
    ("read", "state", "name"),
    [
        (convert.from_encodec, encodec_state, "quantizer.layers.1.project_in.weight"),
        (convert.from_mimi, mimi_state, "quantizer.acoustic_residual_vector_quantizer.layers.0.scale"),
        (
            convert.from_mimi,
            lambda: mimi_state(4),
            "quantizer.semantic_residual_vector_quantizer.input_proj.bias",
        ),
        (convert.from_dac, dac_state, "quantizer.quantizers.2.norm.weight"),
        *(
            (convert.from_vqmodel, lambda: {"quantize.embedding.weight": normal(K, 4)}, f"quantize.{name}")
            for name in ("used", "embedding.cluster_size")  # renumbered codes, and moving averages
        ),
        (convert.from_vqmodel, lambda: {"embedding.weight": normal(K, 4)}, "used"),
    ],
)
def test_a_part_of_a_quantizer_that_no_layer_has(read, state, name):
    with pytest.raises(ValueError, match=rf"^{read.__name__}: .*{re.escape(name)}"):
        read(state() | {name: torch.zeros(4)})
    read(state() | {"decoder." + name.rpartition(".")[2]: torch.zeros(4)})


def test_a_codebook_and_another_embedding():
    codewords = normal(K, 4)
    state = {"quantize.embedding.weight": codewords, "words.embedding.weight": normal(3, 2)}
    assert torch.equal(convert.from_vqmodel(state).codebook, codewords)


LAYERS = {
    "projected": lambda: ResidualVQ(dim=D, codebook_dim=4, num_quantizers=2, codebook_size=K),
    "cosine": lambda: ResidualVQ(dim=D, num_quantizers=2, codebook_size=K, use_cosine_sim=True),
    "sizes": lambda: ResidualVQ(dim=D, codebook_size=(K, 8)),
    "implicit": lambda: ResidualVQ(dim=D, num_quantizers=2, codebook_size=K, implicit_neural_codebook=True),
}


@pytest.mark.parametrize("write", [convert.to_encodec, convert.to_dac])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_a_codec_cannot_store(name, write):
    with pytest.raises(ValueError, match=f"^{write.__name__}: "):
        write(LAYERS[name]())


def test_layers_that_mimi_and_vqmodel_cannot_store():
    with pytest.raises(ValueError, match="bias"):
        convert.to_mimi(LAYERS["projected"](), LAYERS["projected"]())
    for options in ({"heads": 2}, {"codebook_dim": 4}, {"use_cosine_sim": True}, {"cosine_search": True}):
        with pytest.raises(ValueError, match="to_vqmodel"):
            convert.to_vqmodel(VectorQuantize(D, K, **options))


DAC = {"codebook_dim": 4, "project_each": True, "cosine_search": True}


def stored_by(write, **options):
    """Return the state dict that a codec would store of a new layer with the options."""
    if write is convert.to_vqmodel:
        return write(VectorQuantize(D, K, **options))
    if write is convert.to_dac:
        options = DAC | options
    layer = ResidualVQ(dim=D, num_quantizers=2, codebook_size=K, **options)
    return write(layer, layer) if write is convert.to_mimi else write(layer)


WRITERS = [convert.to_encodec, convert.to_mimi, convert.to_dac, convert.to_vqmodel]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["affine_param", "vq_bridge"])
def test_codewords_that_a_codec_cannot_store(name, write):
    bridge = {"vq_bridge": nn.Tanh(), "learnable_codebook": True}
    with pytest.raises(ValueError, match=f"^{write.__name__}: .*{name}"):
        stored_by(write, **(bridge if name == "vq_bridge" else {name: True}))


@pytest.mark.parametrize("options", [{"codebook_dim": D}, {"layernorm_after_project_in": True}])
def test_projections_that_dac_cannot_store(options):
    with pytest.raises(ValueError, match=r"^to_dac: "):
        stored_by(convert.to_dac, **options)


@pytest.mark.parametrize("write", WRITERS)
def test_learned_codewords_are_stored_without_gradients(write):
    state = stored_by(write, learnable_codebook=True)
    assert not any(value.requires_grad for value in state.values())


def test_encodec_moves_learned_codewords_on():
    layer = convert.from_encodec(encodec_state(), learnable_codebook=True)
    with torch.no_grad():
        layer.layers[0]._codebook.embed += 1
    state = convert.to_encodec(layer, prefix="")
    codewords, average = (state[f"layers.0.codebook.{name}"] for name in ("embed", "embed_avg"))
    usage = state["layers.0.codebook.cluster_size"].unsqueeze(-1)
    torch.testing.assert_close(average / usage, codewords)


def test_a_default_of_bfloat16_rounds_no_projection():
    state = dac_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = convert.from_dac(state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(value, state[name]) for name, value in convert.to_dac(layer).items())


def test_options_of_the_layer():
    assert convert.from_encodec(encodec_state(), decay=0.5).layers[0].decay == 0.5
    assert convert.from_vqmodel({"embedding.weight": normal(K, 4)}, rotation_trick=True).rotation_trick


@pytest.mark.parametrize(
    ("read", "state"),
    [
        (convert.from_encodec, encodec_state),
        (convert.from_mimi, mimi_state),
        (convert.from_mimi, lambda: mimi_state(4)),
        (convert.from_dac, dac_state),
        (convert.from_dac, lambda: dac_state("g and v")),
        (convert.from_vqmodel, lambda: {"quantize.embedding.weight": normal(K, D)}),
    ],
)
def test_damaged_values_of_a_state_dict_are_refused(read, state):
    state, own = state(), rf"^{read.__name__}: "
    for given in (None, nn.Linear(2, 2), [*state.items()]):
        with pytest.raises(TypeError, match=f"{own}state.*state_dict()"):
            read(given)
    read(state | {0: torch.ones(1)})
    for name, value in state.items():
        if not re.search("quantize", name):
            continue
        for damaged in (None, value.numpy(), value + 0j, value.to("meta")):
            with pytest.raises(TypeError, match=f"{own}{re.escape(name)}.*tensor.*numbers"):
                read(state | {name: damaged})
        if value.numel() > 1:
            for damaged in (value[:0], value.unsqueeze(0), value.flatten()[0]):
                with pytest.raises(ValueError, match=own):
                    read(state | {name: damaged})
    with pytest.raises(ValueError, match=f"{own}.*embed.*16.*17"):
        read(state, codebook_size=17)


@pytest.mark.parametrize("write", [convert.to_encodec, convert.to_dac, convert.to_vqmodel])
def test_something_else_than_a_layer_is_refused(write):
    with pytest.raises(TypeError, match=rf"^{write.__name__}: layer.*Linear"):
        write(nn.Linear(2, 2))
