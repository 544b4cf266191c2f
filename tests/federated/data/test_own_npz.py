"""The user's own .npz: clients, or a data set to be dealt."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from uefl.data.sources.own_npz import read as npz_file
from uefl.errors import UserError

from .common import split_of, splits


def test_npz_of_own_clients(make_npz):
    path = make_npz()
    own = npz_file(path)
    assert list(own.groups) == ["north", "south"]
    assert own.classes == ("0", "1", "2", "3")
    train, test = splits(own, "south")
    assert test is None
    np.testing.assert_array_equal(train.images[:, 0].numpy(), np.load(path)["images"][:20])
    assert train.labels.tolist() == [0, 1, 2, 3] * 5


def pool_arrays(**changes):
    rng = np.random.default_rng(1)
    arrays = {
        "x_train": rng.integers(0, 256, (30, 6, 6, 3), dtype=np.uint8),
        "y_train": np.arange(30) // 10,
        "x_test": rng.integers(0, 256, (9, 6, 6, 3), dtype=np.uint8),
        "y_test": np.arange(9) % 3,
    }
    return {"images": None, "labels": None, "silo": None, **arrays, **changes}


@pytest.mark.parametrize(
    ("changes", "classes"),
    [
        ({"labels": np.arange(40) % 2 * 5}, 6),
        ({"labels": np.arange(40) % 4 + 1}, 5),
        (pool_arrays(y_train=np.arange(30) % 2 * 5), 6),
        (pool_arrays(y_test=np.full(9, 3)), 4),
    ],
)
def test_npz_classes_are_the_numbers_up_to_the_highest_label(make_npz, changes, classes):
    """The rule is the same as for arrays in Python, and a note names the classes without images."""
    assert npz_file(make_npz(**changes)).classes == tuple(map(str, range(classes)))


def test_npz_with_test_mask_splits_by_it(make_npz):
    mask = np.arange(40) % 5 == 0
    own = npz_file(make_npz(test=mask))
    train, test = splits(own, "north")
    assert test is not None
    assert test.labels.tolist() == (np.arange(40) % 4)[20:][mask[20:]].tolist()
    assert train.labels.tolist() == (np.arange(40) % 4)[20:][~mask[20:]].tolist()


@pytest.mark.parametrize(
    ("silo", "names"),
    [(np.array([10, 9] * 20), ["9", "10"]), (np.array([b"b", b"a"] * 20), ["a", "b"])],
    ids=["integers-in-numeric-order", "bytes"],
)
def test_npz_client_names(make_npz, silo, names):
    own = npz_file(make_npz(silo=silo))
    assert list(own.groups) == names


def test_npz_pool_keeps_its_pairs_in_one_random_order(make_npz):
    arrays = pool_arrays()
    path = make_npz(**arrays)
    table, again = npz_file(path), npz_file(path)
    train, test = split_of(table, table.train), split_of(table, table.test)
    assert torch.equal(train.images, split_of(again, again.train).images)
    for split, name in ((train, "y_train"), (test, "y_test")):
        assert split.labels.tolist() != arrays[name].tolist()
        assert sorted(split.labels.tolist()) == sorted(arrays[name].tolist())
    images = [image.transpose(2, 0, 1).tobytes() for image in arrays["x_train"]]
    label_of = dict(zip(images, arrays["y_train"].tolist(), strict=True))
    assert [label_of[image.numpy().tobytes()] for image in train.images] == train.labels.tolist()
    assert len(label_of) == len({image.numpy().tobytes() for image in train.images})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silo": None}, "images, labels; .*images, labels, silo .* x_train, y_train, x_test, y_test"),
        ({"images": None, "labels": None, "silo": None}, "nothing; .*x_train"),
        ({"images": np.zeros((40, 6, 6), np.int32)}, "images: .*uint8, uint16.*torch.int32"),
        ({"images": np.zeros((40, 6, 6, 4), np.uint8)}, "C = 1 or 3"),
        (
            {"images": np.zeros((0, 6, 6), np.uint8), "labels": np.zeros(0, int), "silo": np.zeros(0, int)},
            r"images: .*\[0, 1, 6, 6\]",
        ),
        ({"labels": np.arange(40) % 4 * 1.0}, r"labels .*\b40 integers.*float64"),
        ({"labels": np.array(["a", "b"] * 20)}, r"labels .*\b40 integers.*numpy\.unique"),
        ({"labels": np.arange(39) % 4}, r"labels .*\b40 integers.*\[39\]"),
        ({"labels": np.arange(40) % 4 - 1}, "labels: label -1 .*negative"),
        ({"labels": np.arange(40) % 2 * 20240101}, "labels: label 20240101 .* 2;"),
        ({"silo": np.arange(40) / 2}, r"silo .*\b40 names.*float64"),
        ({"silo": np.arange(7)}, r"silo .*\b40 names.*int64 \(7,\)"),
        ({"test": np.zeros(40, int)}, r"test .*\b40 booleans.*int64"),
        ({"silo": np.array(["a", 1] * 20, dtype=object)}, r"\.npz \(.*\.npz .*arrays"),
        (pool_arrays(x_test=np.zeros((9, 5, 6, 3), np.uint8)), "x_train .*x_test .*shape"),
        (pool_arrays(y_test=np.arange(9) % 3 - 1), "y_test: label -1 .*negative"),
    ],
)
def test_npz_that_does_not_fit_is_refused_in_one_line(make_npz, changes, message):
    with pytest.raises(UserError, match=message) as error:
        npz_file(make_npz(**changes))
    assert "\n" not in str(error.value)


def stored(path, *names, method=zipfile.ZIP_STORED):
    """Write an .npz with the same array under each name of a member."""
    data = io.BytesIO()
    np.save(data, np.zeros((40, 6, 6), np.uint8))
    with zipfile.ZipFile(path, "w", method) as file:
        for name in names:
            file.writestr(name, data.getvalue())


def damaged(path, method):
    """Write an .npz with a member that is compressed by a method, and damaged behind its header."""
    stored(path, "images.npy", method=method)
    content = bytearray(path.read_bytes())
    content[70:74] = b"\xff" * 4
    path.write_bytes(content)


def marked(path, offsets, value):
    """Write an .npz with another value at an offset of its local and its central headers."""
    stored(path, "images.npy")
    content = bytearray(path.read_bytes())
    for signature, offset in zip((b"PK\x03\x04", b"PK\x01\x02"), offsets, strict=True):
        content[content.index(signature) + offset] = value
    path.write_bytes(content)


def of_header(path, header):
    with zipfile.ZipFile(path, "w") as file:
        length = len(header).to_bytes(2, "little")
        file.writestr("images.npy", b"\x93NUMPY\x01\x00" + length + header)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: path.write_bytes(pickle.dumps([1])), ""),
        (lambda path: path.write_bytes(b""), ""),
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), ""),
        (lambda path: damaged(path, zipfile.ZIP_DEFLATED), ""),
        (lambda path: damaged(path, zipfile.ZIP_BZIP2), ""),
        (lambda path: damaged(path, zipfile.ZIP_LZMA), ""),
        (lambda path: marked(path, (6, 8), 1), "encrypted"),
        (lambda path: marked(path, (8, 10), 99), "compression"),
        (lambda path: of_header(path, b"(" * 5000), ""),
        (lambda path: of_header(path, b"1" * 9000), ""),
        (lambda path: stored(path, "images.npy", "images"), "images"),
    ],
)
def test_npz_that_cannot_be_read_is_one_short_line(tmp_path, make, word):
    path = tmp_path / "data.npz"
    make(path)
    with pytest.raises(UserError, match=rf"data\.npz \(.*{word}.*\.npz") as error:
        npz_file(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_missing_npz_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent.npz.*\.npz"):
        npz_file(tmp_path / "absent.npz")


def test_header_of_more_data_than_stored_is_one_line(tmp_path):
    """The header claims 730 GB of images, and the file has 64 bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 27, 27)}
    )
    path = tmp_path / "claims.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("images.npy", header.getvalue() + bytes(64))
    with pytest.raises(UserError, match=r"images .*\b729000000000 .*\b64\b"):
        npz_file(path)
