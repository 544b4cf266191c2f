"""Saved models: inputs and refusals."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.federated.tiny import arm, federation, settings
from uefl import checkpoint, config
from uefl.config import Model
from uefl.data.rotate import resize
from uefl.errors import UserError
from uefl.models import net, saved
from uefl.models.networks import resnet18


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of three models, each after one round."""
    out = tmp_path_factory.mktemp("models")
    for name in ("fedavg", "uefl", "fedper"):
        write(out / f"model-{name}.safetensors", settings(name))
    return out


def write(path, cfg, fed=None):
    algorithm, workspace, _ = arm(cfg, fed)
    algorithm.turn()
    saved.save(path, cfg, "arm", fed or federation(), algorithm.networks(workspace))
    return algorithm, workspace


def replaced(key, value, about):
    return json.dumps(about | {key: value})


def rewrite(path, change, out):
    """Write a model file with another description, which is a function of the dict of the old one."""
    with safe_open(path, "pt") as file:
        about = file.metadata()["uefl-model-4"]
    checkpoint.save_tensors(out, load_file(path), {"uefl-model-4": change(json.loads(about))})


@pytest.fixture
def model(folder):
    return saved.load(folder / "model-uefl.safetensors")


IMAGES = federation().clients[0].load().test.images  # [12, 1, 8, 8]


def test_repr_is_a_line(model):
    assert repr(model) == "SavedModel(1 x Net with parts of silo-0, silo-1, silo-2: [1, 8, 8] -> 3 classes)"


def test_arrays_tensors_and_gray_images_predict_alike(model):
    probs = model.predict(IMAGES, "silo-0")
    assert (probs.shape, probs.dtype) == ((12, 3), torch.float32)
    torch.testing.assert_close(probs.sum(1), torch.ones(12))
    strided = IMAGES.repeat_interleave(2, 3)[..., ::2]
    for same in (
        IMAGES.numpy(),
        IMAGES[:, 0],
        IMAGES.numpy()[:, 0],
        strided,
        np.asfortranarray(IMAGES.numpy()),
        strided.numpy(),
        IMAGES / 255,
        IMAGES.numpy() / 255,
    ):
        assert torch.equal(model.predict(same, "silo-0"), probs)


def test_any_number_of_images(model, monkeypatch):
    assert model.predict(IMAGES[:0], "silo-0").shape == (0, 3)
    whole = model.predict(IMAGES, "silo-0")
    monkeypatch.setattr(saved, "_BATCH", 5)
    torch.testing.assert_close(model.predict(IMAGES, "silo-0"), whole)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES.float(), r"images: .*\[0, 1\], .*\b0 to 205; .*\b255$"),
        (IMAGES.numpy() / 255 - 0.5, r"images: .*\[0, 1\], .*-0.5 to"),
        (IMAGES.long(), "images: .*uint8, uint16.*torch.int64"),
        (IMAGES[..., :7], r"images: .*\[B, 1, 8, 8\], .*\[12, 1, 8, 7\]"),
        (IMAGES.expand(-1, 3, -1, -1), r"images: .*\[B, 1, 8, 8\], .*\[12, 3, 8, 8\]"),
        (IMAGES[0, 0], r"images: .*\[B, 1, 8, 8\], .*\[8, 8\]"),
        (IMAGES.movedim(1, 3), r"\[12, 8, 8, 1\] \(channels.*permute"),
        ([[0, 1]], r"images: .*NumPy .*\blist .*list$"),
        ([], r"images: .*NumPy .*\blist .*\b0$"),
    ],
    ids=["0-255", "normalized", "int64", "size", "channels", "one-image", "channels-last", "list", "empty"],
)
def test_images_that_would_give_a_wrong_prediction_are_refused(model, images, message):
    with pytest.raises(UserError, match=message):
        model.predict(images, "silo-0")


def test_wrong_image_size_error_names_the_size(folder):
    write(folder / "resized.safetensors", settings("fedavg", image_size=8))
    model = saved.load(folder / "resized.safetensors")
    large = IMAGES.repeat_interleave(2, 2).repeat_interleave(2, 3).numpy()
    for images in (large, large[:, 0]):
        shapes = rf"\[B, 1, 8, 8\], .*{re.escape(str(list(images.shape)))}"
        with pytest.raises(
            UserError, match=rf"images: .*{shapes}; .*8x8: uefl\.data\.rotate\.resize\(.*, 8\)"
        ):
            model.predict(images)
        one, other = (model.predict(resize(torch.as_tensor(each), 8)) for each in (images, large))
        assert torch.equal(one, other)
    with pytest.raises(UserError, match=r"got \[12, 3, 8, 8\]$"):
        model.predict(IMAGES.expand(-1, 3, -1, -1))


def test_a_client_that_is_not_there_is_refused(model, folder):
    assert model.clients == ("silo-0", "silo-1", "silo-2")
    with pytest.raises(UserError, match=r"client 'berlin' .*silo-0, silo-1, silo-2"):
        model.predict(IMAGES, "berlin")
    with pytest.raises(UserError, match=r"client 'silo-0' .*None"):
        saved.load(folder / "model-fedavg.safetensors").predict(IMAGES, "silo-0")


def test_a_folder_with_one_model_can_be_loaded(folder, tmp_path):
    with pytest.raises(UserError, match=r"\bfedavg, fedper, uefl .*--arm"):
        saved.load(folder)
    with pytest.raises(UserError, match=r"model-<arm>.safetensors"):
        saved.load(tmp_path)
    (tmp_path / "model-uefl.safetensors").write_bytes((folder / "model-uefl.safetensors").read_bytes())
    assert saved.load(str(tmp_path)).clients == ("silo-0", "silo-1", "silo-2")


def test_loading_fetches_no_pretrained_weights(folder, monkeypatch):
    seen, build = [], resnet18.resnet18

    def built(channels, pretrained):
        seen.append(pretrained)
        return build(channels, False)

    monkeypatch.setattr(resnet18, "resnet18", built)
    base = {"arms": {"arm": {"algorithm": "fedavg"}}}
    cfg = config.load(base, encoder="resnet18", pretrained=True)
    weights = net.Net(Model(encoder="resnet18"), (1, 8, 8), 3).state_dict()
    floats = {name: value for name, value in weights.items() if value.is_floating_point()}
    saved.save(folder / "pretrained.safetensors", cfg, "arm", federation(), [(floats, {})])
    saved.load(folder / "pretrained.safetensors")
    assert seen
    assert not any(seen)


def test_private_layers_do_not_change_the_network(folder):
    model, probs = saved.load(folder / "model-fedper.safetensors"), {}
    before = {name: value.clone() for name, value in model.members[0].net.state_dict().items()}
    for client in model.clients:
        assert set(model.members[0].clients[client]) == {"head.fc2.weight", "head.fc2.bias"}
        probs[client] = model.predict(IMAGES, client)
    assert not torch.equal(probs["silo-0"], probs["silo-1"])
    assert all(torch.equal(value, before[name]) for name, value in model.members[0].net.state_dict().items())


def test_an_algorithm_that_is_not_known_here_is_named(folder, tmp_path):
    path = tmp_path / "model-a.safetensors"
    rewrite(folder / "model-fedavg.safetensors", partial(replaced, "algorithm", "fedavgg"), path)
    with pytest.raises(UserError, match=r"'fedavgg' .*'fedavg'"):
        saved.load(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"normalize": "imagenet"}, r"key 'data.normalize': 'imagenet' .*\b3 channels, .*\b1; .*'standard'"),
        ({"model": {"encoder": "resnet50"}}, "key 'model.encoder': expected 'cnn', 'cnn5x5'"),
        ({"model": {"width": -3}}, r"key 'model.width': .*\b1; .*-3"),
        ({"model": {"width": 8}}, r"weights 'encoder.0.weight': .*\[8, 1, 3, 3\], .*\[4, 1, 3, 3\]"),
        ({"parameters": {"mu": 1}}, r"key 'mu' .*\[parameters\]"),
        ({"members": 2}, r"key .description.members.: .*\b2 members"),
        ({"members": 4}, r"weights 'encoder.0.weight': .*\[4, 1, 3, 3\], .*none"),
        ({"members": 1}, r"weights 'encoder.0.weight': .*\[4, 1, 3, 3\], .*none"),
        ({"clients": {"silo-0": ["codebook"]}}, "'codebook' .*client 'silo-0'"),
    ],
    ids=["imagenet", "resnet50", "width", "wider", "parameter", "none", "more", "single", "codebook"],
)
def test_a_model_with_a_changed_description_is_rejected(tmp_path, keys, message):
    cfg = settings("fedavg")
    weights = net.Net(cfg.model, (1, 8, 8), 3).state_dict()
    floats = {name: value for name, value in weights.items() if value.is_floating_point()}
    path = tmp_path / "model-fedavg.safetensors"
    saved.save(path, cfg, "arm", federation(), [(floats, {})] * 3)
    assert len(saved.load(path).members) == 3
    ((key, value),) = keys.items()
    value = cfg.model.model_dump() | value if key == "model" else value
    rewrite(path, partial(replaced, key, value), path)
    with pytest.raises(UserError, match=rf"^{path}: .*{message}.*\bversion\b"):
        saved.load(path)


@pytest.mark.parametrize(
    ("description", "message"), [("{", "Expecting"), ("{}", "description")], ids=["json", "empty"]
)
def test_a_model_whose_description_is_damaged_is_refused_by_name(tmp_path, description, message):
    checkpoint.save_tensors(
        tmp_path / "model-uefl.safetensors", {"x": torch.zeros(1)}, {"uefl-model-4": description}
    )
    with pytest.raises(UserError, match=f"{tmp_path / 'model-uefl.safetensors'}: .*{message}"):
        saved.load(tmp_path)


def test_a_changed_byte_of_a_model_is_found(folder, tmp_path):
    whole = (folder / "model-fedper.safetensors").read_bytes()
    path = tmp_path / "model-fedper.safetensors"
    for place in (whole.index(b'[\\"a\\"') + 3, len(whole) // 2, len(whole) - 1):  # a class, and two weights
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=rf"^{path} .*checksum"):
            saved.load(path)


def test_a_model_moves_as_a_whole_and_the_first_stays(model):
    there = model.to("meta")
    (net, clients), before = there.members[0], model.predict(IMAGES, "silo-0")
    of_clients = [tensor for own in clients.values() for tensor in own.values()]
    tensors = [*net.state_dict().values(), *of_clients, there.mean, there.std]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert there.clients == model.clients
    assert torch.equal(model.predict(IMAGES, "silo-0"), before)
    assert torch.equal(model.to("cpu").predict(IMAGES, "silo-0"), before)


@pytest.mark.parametrize("device", ["nope:0", "cuda:99"])
def test_a_device_that_is_not_here_is_a_line(model, device):
    with pytest.raises(UserError, match=rf"^device '{device}' .*: ."):
        model.to(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_on_a_gpu_takes_and_returns_tensors_of_the_cpu(folder):
    for name, client in (("fedavg", None), ("uefl", "silo-0"), ("fedper", "silo-0")):
        model = saved.load(folder / f"model-{name}.safetensors")
        found = model.to("cuda").predict(IMAGES, client)
        assert found.device.type == "cpu"
        # TF32 convolutions
        torch.testing.assert_close(found, model.predict(IMAGES, client), atol=2e-3, rtol=0)


HOSTILE = [
    ("members", 10**9, "key .description.members."),
    ("members", -1, "key .description.members."),
    ("members", float("inf"), "key 'description.members'"),
    ("passes", 10**9, "key 'description.passes'"),
    ("passes", "x", "key 'description.passes'"),
    ("image_size", -1, "key 'description.image_size'"),
    ("normalize", "other", "key 'description.normalize'"),
    ("shape", [], "1 means"),
    ("shape", [-1, 8, 8], r"key 'description.shape.0'"),
    ("shape", [1, 10**9, 10**9], "images"),
    ("mean", [], "0 means"),
    ("mean", {}, "key 'description.mean'"),
    ("std", [float("nan")], "key 'description.std.0'"),
    ("classes", ["a\x1b[2J", "b", "c"], r"class 'a\\x1b"),
    ("clients", {"silo-0": 3}, "key 'description.clients.silo-0'"),
    ("inputs", {"kind": "other"}, "'other'"),
]
"""keys of the description of a file, with values of an attacker"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda about: json.dumps(about)[:-1] + ', "deep": ' + 100_000 * "[", "nested"),
        (
            lambda about: json.dumps(about | {"model": about["model"] | {"width": 4096, "hidden": 65536}}),
            "weights '",
        ),
        *((partial(replaced, key, value), reason) for key, value, reason in HOSTILE),
    ],
    ids=["deep", "large", *(f"{key}-{i}" for i, (key, *_) in enumerate(HOSTILE))],
)
def test_untrusted_file_needs_only_its_size_in_memory(folder, tmp_path, change, reason):
    path = tmp_path / "model.safetensors"
    rewrite(folder / "model-fedavg.safetensors", change, path)
    with pytest.raises(UserError, match=reason):
        saved.load(path)
