"""Federations of the user's own arrays, tensors and Datasets."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from uefl.data import Data, Sizes, Split, from_arrays
from uefl.errors import UserError

from .common import load, pairs, same, whole

LABELS = np.arange(30) % 3
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 3, 6, 5), dtype=np.uint8)


def parts(form=lambda x, y: (x, y)):
    """Return two clients with 20 training and 10 test images each, in a given form."""
    at = [(0, 20), (20, 30), (30, 50), (50, 60)]
    a, b, c, d = (form(PIXELS[i:j], LABELS[: j - i]) for i, j in at)
    return {"north": (a, b), "south": (c, d)}


class Endless(IterableDataset):
    """A Dataset with a length, but without places."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(())


class Pictures(Dataset):
    """A Dataset of PIL images."""

    def __init__(self, pixels, labels):
        self.pixels, self.labels = pixels, labels

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        return Image.fromarray(self.pixels[i].transpose(1, 2, 0)), int(self.labels[i])


class Wrapped:
    """An object that NumPy can read, and that has no other attribute of an array."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array


FORMS = {
    "arrays": lambda x, y: (x, y),
    "channels-last": lambda x, y: (x.transpose(0, 2, 3, 1), y.astype(np.uint8)),
    "tensors": lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)),
    "floats": lambda x, y: (x.astype(np.float32) / 255, y),
    "split": lambda x, y: Split(torch.from_numpy(x), torch.from_numpy(y)),
    "tensor-dataset": lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
    "float-dataset": lambda x, y: TensorDataset(torch.from_numpy(x) / 255, torch.from_numpy(y)),
    "pictures": Pictures,
    "lists": lambda x, y: ([Image.fromarray(image.transpose(1, 2, 0)) for image in x], y.tolist()),
    "list-of-arrays": lambda x, y: (tuple(x), y),
    "wrapped": lambda x, y: (Wrapped(x), y),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_federation(form):
    expected, federation = from_arrays(parts()), from_arrays(parts(FORMS[form]))
    assert [client.name for client in federation.clients] == ["north", "south"]
    assert federation.shape == (3, 6, 5)
    assert federation.classes == ("0", "1", "2")
    for a, b in zip(load(federation), load(expected), strict=True):
        assert (len(a.train), len(a.holdout), len(a.test)) == (18, 2, 10)
        assert same(a.train, b.train)
        assert same(a.test, b.test)
    assert federation.digest == expected.digest
    assert len(federation.notes) == ("float" in form)
    assert all(re.match(r"60 of 60 images .*\[0, 1\].*8 bits", note) for note in federation.notes)


def test_nothing_is_lost_and_the_test_part_is_kept():
    north, south = load(from_arrays(parts()))
    given = parts(FORMS["split"])
    assert whole(north) == pairs(*given["north"])
    assert same(south.test, given["south"][1])


def test_without_a_test_part_one_is_taken_out():
    clients = {name: (train, None) for name, (train, _) in parts().items()}
    data = Data(train_per_client=3, test_per_client=1, holdout=0.2)
    one, other = (from_arrays(clients, data=data, seed=seed) for seed in (3, 4))
    assert [client.sizes for client in one.clients] == [Sizes(12, 3, 5)] * 2
    assert one.digest != other.digest


def test_gray_images_and_images_of_different_sizes():
    gray = {name: tuple((x[:, 0], y) for x, y in split) for name, split in parts().items()}
    assert from_arrays(gray).shape == (1, 6, 5)
    assert from_arrays({"north": gray["north"], "south": parts()["south"]}).shape == (3, 6, 5)
    wide = {"north": parts()["north"], "south": tuple((x[..., :4], y) for x, y in parts()["south"])}
    assert from_arrays(wide, data=Data(image_size=8)).shape == (3, 8, 8)
    with pytest.raises(UserError, match=r"south/train/0 .*4x6.*north/train/0 .*5x6.*image_size"):
        from_arrays(wide)


def test_names_of_classes_and_clients_that_are_only_measured():
    extra = PIXELS[::-1][:9].copy(), LABELS[:9]
    federation = from_arrays(parts(), classes=["cat", "dog", "emu", "fox"], unseen={"east": extra})
    assert federation.classes == ("cat", "dog", "emu", "fox")
    (east,) = federation.unseen
    assert (east.name, east.sizes.train, east.sizes.test) == ("east", 0, 9)
    assert torch.equal(east.load().test.images, torch.from_numpy(extra[0]))
    assert federation.manifest["unseen"]["east"]["test"]["files"][0] == "east/test/0"
    assert federation.mean == from_arrays(parts()).mean


@pytest.mark.parametrize("width", [5, 4], ids=["of-one-size", "of-two-sizes"])
def test_given_arrays_are_copied(width):
    images = PIXELS.copy()
    a = (images[:20, ..., :width], LABELS[:20]), (images[20:30, ..., :width], LABELS[:10])
    federation = from_arrays({"a": a, "b": parts()["south"]}, data=Data(image_size=0 if width == 5 else 8))
    before = federation.clients[0].load().test.images.clone()
    federation.clients[0].load().test.images.zero_()
    assert np.array_equal(images, PIXELS)
    images[:] = 0
    assert torch.equal(federation.clients[0].load().test.images, before)


GOOD = (PIXELS[:20], LABELS[:20])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "clients .*empty.*dict"),
        ([(GOOD, GOOD)], "clients: .*dict.*list"),
        ({"a": ((list(PIXELS[:20]), LABELS[:19]), None)}, r"a/train: .*\b20 labels"),
        ({"a": GOOD[0]}, r"client 'a': .*\(train, test\).*None.*ndarray"),
        ({"a": ((PIXELS[:20].astype(np.int64), LABELS[:20]), None)}, "uint8, uint16.*torch.int64"),
        ({"a": ((PIXELS[:20] * 1.0, LABELS[:20]), None)}, r"\[0, 1\].*\b0 to 255.*\b255$"),
        ({"a": ((np.full((20, 4, 4), np.nan), LABELS[:20]), None)}, r"a/train: 320 .*\b320 .*NaN"),
        ({"a": ((np.zeros((20, 5, 6, 4), np.uint8), LABELS[:20]), None)}, r"\[20, 5, 6, 4\].*PIL"),
        ({"a": ((PIXELS[:20, :2], LABELS[:20]), None)}, r"a/train: .*channels.*\[20, 2, 6, 5\]"),
        ({"a": ((PIXELS[:20, :, :, :3], LABELS[:20]), None)}, r"channels.*\[20, 3, 6, 3\]"),
        ({"a": ((PIXELS[0], LABELS[:3]), None)}, "client 'a': .*class"),
        ({"a": ((PIXELS[0, 0, 0], LABELS[:5]), None)}, r"\[N, H, W\], .*\[5\]"),
        ({"a": ((PIXELS[:20], LABELS[:19]), None)}, r"a/train: .*\b20 integers.*torch.int64 \[19\]"),
        ({"a": ((PIXELS[:20], LABELS[:20] * 1.0), None)}, r"\b20 integers.*float64"),
        ({"a": ((PIXELS[:20], LABELS[:20] - 1), None)}, "a/train: label -1 .*negative"),
        ({"a": ((PIXELS[:20], np.array(["cat", 1.5] * 10, object)), None)}, r"a/train: label 1: .*\b1\.5\b"),
        ({"a": ((PIXELS[:0], LABELS[:0]), None)}, "a/train: .*image"),
        ({"a": ([], None)}, "a/train .*image"),
        ({"a": ("images", None)}, "a/train: .*Dataset.*str"),
        ({"a": (torch.utils.data.Subset([(PIXELS[0], 1)], [7]), None)}, "a/train: item 0 .*IndexError"),
        ({"a": (Endless(), None)}, "a/train: .*Dataset .*length; .*Endless"),
        ({"a": ([1, 2, 3], None)}, "a/train: item 0 .*int;.*pair"),
        ({"a": GOOD}, r"a/train: item 0 .*ndarray;.*\(train, test\)"),
        ({"a": ([("x", 1)], None)}, "a/train: image 0 .*str;.*PIL"),
        ({"a": ([(PIXELS[0], b"cat")], None)}, "a/train: item 0: .*integer.*b'cat'.*bytes"),
        ({"a": ([(PIXELS[0, :2], 1)], None)}, r"a/train: image 0: .*\[C, H, W\] .*C = 1 .*3, .*\[2, 6, 5\]"),
        ({"a\nb": (GOOD, GOOD)}, r"client 'a\\nb': .*printable"),
    ],
)
def test_errors_have_one_line(clients, message):
    with pytest.raises(UserError, match=message) as error:
        from_arrays(clients)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"classes": 3}, r"classes: .*names; .*\bint$"),
        ({"seed": "3"}, "seed: .*integer .*'3'$"),
        ({"seed": 2**63}, r"seed: .*\b64 bits; .*808$"),
        ({"data": {"holdout": 0.2}}, r"data: .*uefl.data.Data; .*\bdict$"),
    ],
)
def test_other_arguments_of_a_wrong_type_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        from_arrays(parts(), **keys)


def test_a_seed_of_numpy_is_an_integer():
    assert from_arrays(parts(), seed=np.int64(3)).digest == from_arrays(parts(), seed=3).digest


def test_an_unseen_client_that_is_trained_on_is_refused():
    with pytest.raises(UserError, match=r"client 'north'.*unseen"):
        from_arrays(parts(), unseen={"north": GOOD})
    with pytest.raises(UserError, match=r"label 2 .*above 1\b"):
        from_arrays(parts(), classes=["cat", "dog"])


def test_the_same_image_in_train_and_test_is_noted():
    note = from_arrays({"a": (GOOD, GOOD), "b": parts()["south"]}).notes[0]
    assert re.match(r"a/test/0 \(a/test\) .*a/train/0 \(a/train\), .*19 ", note)


NAMED = {
    "array": np.array(["cat", "dog", "eel"])[LABELS],
    "list": [["cat", "dog", "eel"][k] for k in LABELS],
    "objects": np.array(["cat", "dog", "eel"], object)[LABELS],
}


NAMED["NumPy texts"] = list(NAMED["array"])


@pytest.mark.parametrize("kind", NAMED)
def test_labels_may_be_names_of_classes(kind):
    federation = from_arrays({"a": ((PIXELS[:30], NAMED[kind]), None)})
    assert federation.classes == ("cat", "dog", "eel")
    assert {type(name) for name in federation.classes} == {str}
    numbered = from_arrays({"a": ((PIXELS[:30], LABELS), None)}, classes=["cat", "dog", "eel"])
    assert federation.digest == numbered.digest


def test_names_are_counted_by_the_given_classes():
    part = PIXELS[:30], NAMED["list"]
    classes = ["eel", "dog", "cat", "fox"]
    (data,) = load(from_arrays({"a": (part, None)}, classes=classes))
    (other,) = load(from_arrays({"a": ((PIXELS[:30], 2 - LABELS), None)}, classes=classes))
    assert data.train.labels.sort().values.equal(other.train.labels.sort().values)


def test_a_dataset_may_yield_names_of_classes():
    pairs_of = [(PIXELS[i], NAMED["list"][i]) for i in range(30)]
    assert from_arrays({"a": (pairs_of, None)}).classes == ("cat", "dog", "eel")


@pytest.mark.parametrize(
    ("labels", "classes", "named"),
    [
        (NAMED["list"], ["cat", "dog"], "'eel'"),
        ([*NAMED["list"][:29], 1], None, "'cat'"),
        (NAMED["list"][:29], None, "a/train.*30.*29"),
        (np.array([0, 20240101, 20240102] * 10), None, "20240102"),
    ],
    ids=["unknown", "mixed", "too-few", "far-above-their-number"],
)
def test_labels_that_are_no_classes_are_refused(labels, classes, named):
    with pytest.raises(UserError, match=named):
        from_arrays({"a": ((PIXELS[:30], labels), None)}, classes=classes)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (np.array([0, 20240101, 20240102] * 10), None, "b/test: label 20240102 "),
        (LABELS[:30] + 1, "xyz", r"b/test: label 3 .*above 2\b"),
        (LABELS[:30] - 1, None, "b/test: label -1 .*negative"),
        (LABELS[:30].astype(np.uint64) + np.uint64(2**63), None, r"b/test: label 92233720368547758"),
        (["x", None] * 15, None, "b/test: label 1: .*None"),
        (pd.Series(["x", float("nan")] * 15), None, "b/test: label 1: .*nan"),
        (NAMED["list"][:30], None, "b/test .* a/train;"),
    ],
    ids=["dates", "too-high", "negative", "above", "missing", "missing-in-a-series", "mixed"],
)
def test_the_client_of_a_wrong_label_is_named(labels, classes, message):
    good = PIXELS[:30], LABELS[:30]
    with pytest.raises(UserError, match=message):
        from_arrays({"a": (good, None), "b": (good, (PIXELS[:30], labels))}, classes=classes)


def test_the_client_of_an_unknown_name_is_named():
    good = PIXELS[:30], NAMED["list"]
    with pytest.raises(UserError, match="b/test: label 'emu' "):
        from_arrays({"a": (good, None), "b": (good, (PIXELS[:1], ["emu"]))}, classes=["cat", "dog", "eel"])
