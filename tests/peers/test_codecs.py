"""Quantizers of transformers and diffusers with random weights agree with converted ones.

They give equal codes, and equal parameters after five steps of training.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from uefl_kernels.nn import convert

pytestmark = pytest.mark.slow  # the imports take seconds
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def package(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def randomized(model, seed=0):
    """Give every parameter and codebook random values without ties."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if value.is_floating_point() and name.rsplit(".", 1)[-1] not in ("inited", "initialized"):
            scale = 1.0 if "codebook" in name or "embedding" in name else 0.2
            value.copy_(torch.randn(value.shape, generator=generator) * scale)
            if "cluster" in name:
                value.abs_().add_(0.5)
    return model


def after_steps(model, loss_of, inputs, steps=5):
    """Return the parameters after steps of Adam, and the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2, momentum=0.9)
    losses = []
    for x in inputs[:steps]:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return dict(model.named_parameters()), torch.stack(losses)


def assert_same_training(theirs, ours, loss_of, inputs, shared):
    """Assert that shared parameters and losses are equal after five steps, and that parameters have moved."""
    before = copy.deepcopy(dict(theirs.named_parameters()))
    (want, want_losses), (got, got_losses) = (after_steps(m, loss_of, inputs) for m in (theirs, ours))
    torch.testing.assert_close(got_losses, want_losses, **CLOSE)
    moved = 0
    for name in shared(want):
        torch.testing.assert_close(got[name], want[name], **CLOSE)
        moved += not torch.equal(before[name], want[name])
    assert moved


# --- EnCodec and Mimi: transformers trains the decoder behind a fixed quantizer --------------------------


class Codes(nn.Module):
    """A quantizer with the methods that transformers' audio codecs call, of layers of ours."""

    def __init__(self, *layers, codebook_first):
        super().__init__()
        self.layers, self.codebook_first = nn.ModuleList(layers), codebook_first

    def encode(self, x, number=None):
        """Return codes ``[Q, B, T]``."""
        return torch.cat([layer.encode(x) for layer in self.layers], -1).movedim(-1, 0)

    def decode(self, codes):
        """Return the sum of the codewords of codes ``[Q, B, T]``, or ``[B, Q, T]``."""
        codes = codes.movedim(0 if self.codebook_first else 1, -1)
        pieces = codes.split([layer.num_quantizers for layer in self.layers], -1)
        return sum(layer.decode(piece) for layer, piece in zip(self.layers, pieces, strict=True))


def encodec():
    transformers = package("transformers")
    config = transformers.EncodecConfig(
        sampling_rate=1000, num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16,
        upsampling_ratios=[2, 2], num_lstm_layers=1, target_bandwidths=[5.0], use_conv_shortcut=False,
    )  # fmt: skip
    return randomized(transformers.EncodecModel(config))


def mimi():
    transformers = package("transformers")
    config = transformers.MimiConfig(
        sampling_rate=1000, frame_rate=125.0, num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=8,
        vector_quantization_hidden_dimension=8, upsampling_ratios=[2, 2], num_quantizers=5,
        num_semantic_quantizers=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=16, upsample_groups=1, attn_implementation="eager",
    )  # fmt: skip
    return randomized(transformers.MimiModel(config))


def stand_in(name, model):
    """Return a copy of the model with the quantizer of ours."""
    state, ours = model.state_dict(), copy.deepcopy(model)
    layers = [convert.from_encodec(state)] if name == "encodec" else convert.from_mimi(state)
    ours.quantizer = Codes(*layers, codebook_first=name == "encodec").eval().requires_grad_(False)
    return ours, list(layers)


AUDIO = {"encodec": encodec, "mimi": mimi}


@pytest.mark.parametrize("name", AUDIO)
def test_an_audio_codec_has_the_same_codes(name):
    model = AUDIO[name]().eval()
    ours, _ = stand_in(name, model)
    x = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))
    codes = model.quantizer.encode(x)
    assert torch.equal(ours.quantizer.encode(x), codes)
    given = codes if name == "encodec" else codes.transpose(0, 1)
    torch.testing.assert_close(ours.quantizer.decode(given), model.quantizer.decode(given), **CLOSE)


@pytest.mark.parametrize("name", AUDIO)
def test_audio_codec_state_dict_round_trip(name):
    model = AUDIO[name]()
    _, layers = stand_in(name, model)
    back = convert.to_encodec(*layers) if name == "encodec" else convert.to_mimi(*layers)
    state = model.state_dict()
    assert {key for key in state if key.startswith("quantizer.")} == back.keys()
    for key, value in back.items():
        assert torch.equal(value, state[key]), key
    model.load_state_dict(back, strict=False)


@pytest.mark.parametrize("name", AUDIO)
def test_an_audio_codec_trains_the_same(name):
    model = AUDIO[name]()
    for module in model.quantizer.modules():
        module.requires_grad_(False)
    ours, _ = stand_in(name, model)
    inputs = torch.randn(5, 2, 1, 320, generator=torch.Generator().manual_seed(2)) * 0.3

    def loss_of(model, x):
        found = model(x)
        return (found.audio_values[..., :300] - x[..., :300]).square().mean()

    def decoder(names):
        return [key for key in names if key.startswith("decoder.")]

    assert_same_training(model, ours, loss_of, inputs, decoder)


# --- DAC: commitment and codebook losses, straight through --------------------------------------------------


def dac():
    package("transformers")
    from transformers.models.dac.configuration_dac import DacConfig
    from transformers.models.dac.modeling_dac import DacResidualVectorQuantizer

    config = DacConfig(
        encoder_hidden_size=4, downsampling_ratios=[2, 2], decoder_hidden_size=16, n_codebooks=4,
        codebook_size=32, codebook_dim=4, hidden_size=16, quantizer_dropout=0.0,
    )  # fmt: skip
    return randomized(DacResidualVectorQuantizer(config))


def test_dac_has_the_same_codes():
    model = dac().eval()
    layer = convert.from_dac(model.state_dict()).eval()
    x = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))
    want, codes, *_ = model(x)
    assert torch.equal(layer.encode(x).movedim(-1, 1), codes)
    assert torch.equal(layer.encode(x, n_q=2)[..., :2].movedim(-1, 1), model(x, 2)[1])
    torch.testing.assert_close(layer(x)[0], want, **CLOSE)
    torch.testing.assert_close(layer.decode(codes.movedim(1, -1)), model.from_codes(codes)[0], **CLOSE)


@pytest.mark.parametrize("weight_norm", [False, True])
def test_dac_state_dict_round_trip(weight_norm):
    model = dac()
    back = convert.to_dac(convert.from_dac(model.state_dict()), prefix="", weight_norm=weight_norm)
    if weight_norm:
        back = convert.to_dac(convert.from_dac(back), prefix="")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back[key], value, rtol=1e-6, atol=0)
    assert list(model.load_state_dict(back)) == [[], []]


def test_dac_trains_the_same():
    model = dac().train()
    layer = convert.from_dac(model.state_dict())
    inputs = torch.randn(5, 2, 16, 40, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(3))

    def theirs(model, x):
        quantized, _, _, commitment, codebook = model(x)
        return (quantized * weight).mean() + 0.25 * commitment.mean() + codebook.mean()

    def ours(model, x):
        quantized, _, losses = model(x)
        return (quantized * weight).mean() + losses.sum()

    _, want = after_steps(model, theirs, inputs)
    _, got = after_steps(layer, ours, inputs)
    torch.testing.assert_close(got, want, **CLOSE)
    for key, value in convert.to_dac(layer, prefix="").items():
        torch.testing.assert_close(value, model.state_dict()[key], **CLOSE)


# --- VQModel: a whole autoencoder -----------------------------------------------------------------------


class Quantize(nn.Module):
    """A quantizer with the result that diffusers' VQModel expects."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, z):
        """Return the quantized map, the loss and the indices in a tuple."""
        quantized, indices, loss = self.layer(z)
        return quantized, loss, (None, None, indices.flatten())


def vqmodel(legacy=True):
    diffusers = package("diffusers")
    model = diffusers.VQModel(
        block_out_channels=(8,), latent_channels=4, vq_embed_dim=4, num_vq_embeddings=16, norm_num_groups=4,
        mid_block_add_attention=False,
    )  # fmt: skip
    model.quantize.legacy = legacy
    return randomized(model)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_vqmodel_trains_the_same(legacy):
    model = vqmodel(legacy)
    ours = copy.deepcopy(model)
    layer = convert.from_vqmodel(model.state_dict(), legacy=legacy)
    ours.quantize = Quantize(layer)
    inputs = torch.randn(5, 2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    latents = model.encode(inputs[0]).latents
    assert torch.equal(layer.encode(latents).flatten(), model.quantize(latents)[2][2])

    def loss_of(model, x):
        found = model(x)
        return (found.sample - x).square().mean() + found.commit_loss

    def around(names):
        return [key for key in names if not key.startswith("quantize.")]

    assert_same_training(model, ours, loss_of, inputs, around)
    back = convert.to_vqmodel(layer)
    torch.testing.assert_close(back["quantize.embedding.weight"], model.quantize.embedding.weight, **CLOSE)
    assert not model.load_state_dict(back, strict=False).unexpected_keys
