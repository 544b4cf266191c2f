"""Data sets of color images are read from small files of the published formats, or from one .npz."""

import io
import pickle
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.files import write_pickle
from uefl.data import SOURCES
from uefl.errors import UserError

from .common import both, labeled, load


def test_cifar10_is_read_in_file_order_with_its_channels_first(cifar_root):
    table = SOURCES["cifar10"](cifar_root)
    train, test = both(table)
    assert (train.images.shape, test.images.shape) == ((200, 3, 32, 32), (40, 3, 32, 32))
    assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
    assert train.images.is_contiguous()
    files = [cifar_root / "cifar-10-batches-py" / f"data_batch_{i}" for i in range(1, 6)]
    stored = [pickle.loads(file.read_bytes()) for file in files]
    assert np.array_equal(train.images.flatten(1), np.concatenate([part["data"] for part in stored]))
    assert train.labels.tolist() == [label for part in stored for label in part["labels"]]
    assert test.labels.tolist() == [i % 10 for i in range(40)]
    assert table.classes[:4] == ("airplane", "automobile", "bird", "cat")


def test_cifar10_that_is_not_the_published_one_is_not_unpickled(cifar_root, monkeypatch):
    (cifar_root / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps([1]))
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled"))
    advice = r"torchvision.datasets.CIFAR10\(ROOT, download=True\)"
    with pytest.raises(UserError, match=f"cifar10 .*corrupted.*{advice}"):
        SOURCES["cifar10"](cifar_root)


def test_cifar100_is_read_through_torchvision(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR100

    folder, meta = tmp_path / CIFAR100.base_folder, CIFAR100.meta
    folder.mkdir()
    names = [f"thing-{k}" for k in range(100)]
    digest = write_pickle(folder / meta["filename"], {"fine_label_names": names})
    monkeypatch.setattr(CIFAR100, "meta", meta | {"md5": digest})
    pixels = np.random.default_rng(0).integers(0, 256, (120, 3072), dtype=np.uint8)
    for part, rows in (("train", slice(0, 100)), ("test", slice(100, 120))):
        labels = list(range(100))[: len(pixels[rows])]
        digest = write_pickle(folder / part, {"data": pixels[rows], "fine_labels": labels})
        monkeypatch.setattr(CIFAR100, f"{part}_list", [[part, digest]])
    table = SOURCES["cifar100"](tmp_path)
    train, test = both(table)
    assert table.classes == tuple(names)
    np.testing.assert_array_equal(train.images.flatten(1).numpy(), pixels[:100])
    assert test.labels.tolist() == list(range(20))


def npz_pool(path, classes, size=8, count=60):
    rng = np.random.default_rng(0)
    labels = np.arange(count) * classes // count
    images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[::2], y_test=labels[::2], track=labels)


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("cifar10", 10),
        ("cifar100", 20),
        ("gtsrb", 43),
        ("mnist", 10),
        ("fashion_mnist", 10),
        ("emnist_letters", 26),
    ],
)
def test_an_npz_replaces_the_published_files(tmp_path, name, classes):
    path = tmp_path / f"{name}_subset.npz"
    npz_pool(path, classes)
    by_name, by_path = (labeled(x, clients=2, data_root=tmp_path) for x in (name, path))
    assert re.match(rf"{name} .*{name}_subset\.npz: 60 training .*30 test", by_name.notes[0])
    named = {"cifar10": "airplane", "fashion_mnist": "T-shirt/top", "emnist_letters": "A"}
    assert by_name.classes[0] == named.get(name, "0")
    for a, b in zip(load(by_name), load(by_path), strict=True):
        assert torch.equal(a.train.images, b.train.images)
    npz_pool(tmp_path / f"{name}.npz", classes)
    with pytest.raises(UserError, match=rf" {name}\.npz, {name}_subset\.npz"):
        SOURCES[name](tmp_path)


def test_cifar100_is_refused_as_cifar10(tmp_path):
    npz_pool(tmp_path / "cifar100.npz", 20)
    with pytest.raises(UserError, match="cifar10"):
        SOURCES["cifar10"](tmp_path)


def test_an_npz_of_other_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "gtsrb.npz", images=np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(UserError, match=r"gtsrb.npz .*images; .*x_train, y_train, x_test, y_test"):
        SOURCES["gtsrb"](tmp_path)
    npz_pool(tmp_path / "gtsrb.npz", 44)
    with pytest.raises(UserError, match=r"y_train: label 43 .*above 42\b"):
        SOURCES["gtsrb"](tmp_path)


def gtsrb_root(root):
    """Return a folder like the published one, with 4 training and 2 test images of 3 classes, of any size."""
    rng = np.random.default_rng(0)
    base = root / "gtsrb" / "GTSRB"
    lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]

    def store(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(15, 40, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)

    for k in (0, 1, 2):
        for i in range(4):
            store(base / "Training" / f"{k:05}" / f"{i:05}.ppm")
        (base / "Training" / f"{k:05}" / f"GT-{k:05}.csv").write_text("Filename;ClassId")
        for i in range(2):
            store(base / "Final_Test" / "Images" / f"{k:03}{i:02}.ppm")
            lines.append(f"{k:03}{i:02}.ppm;20;20;5;5;15;15;{k}")
    (root / "gtsrb" / "GT-final_test.csv").write_text("\n".join(lines))
    return root


def test_gtsrb_is_read_as_torchvision_stores_it(tmp_path):
    from torchvision.datasets import GTSRB

    root = gtsrb_root(tmp_path)
    table = SOURCES["gtsrb"](root)
    assert len(table.classes) == 43
    (partial,) = table.notes
    assert re.search(rf"^{root}/gtsrb/GTSRB .*\b12 .*\b6 test .*; 26640 and 12630 ", partial)
    for rows, part in ((table.train, "train"), (table.test, "test")):
        theirs = {
            Path(path).relative_to(root).as_posix(): label for path, label in GTSRB(str(root), part)._samples
        }
        assert {table.images.files[row]: int(table.labels[row]) for row in rows} == theirs
    assert table.train.tolist() != sorted(table.train)  # the files are sorted by class
    federation = labeled(
        "gtsrb", clients=2, train_per_client=6, test_per_client=3, image_size=16, data_root=root
    )
    assert federation.shape == (3, 16, 16)
    assert any("image_size = 16" in note for note in federation.notes)
    assert federation.manifest["silos"]["silo-0"]["test"]["files"][0].startswith(
        "gtsrb/GTSRB/Final_Test/Images/"
    )
    with pytest.raises(UserError, match="image_size"):
        labeled("gtsrb", clients=2, train_per_client=6, test_per_client=3, data_root=root)


def test_a_byte_order_mark_in_the_table_of_gtsrb(tmp_path):
    root = gtsrb_root(tmp_path)
    expected = SOURCES["gtsrb"](root)
    path = root / "gtsrb" / "GT-final_test.csv"
    text = path.read_text()
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert SOURCES["gtsrb"](root).labels.tolist() == expected.labels.tolist()
    path.write_text(text.replace("ClassId", "Class"))
    with pytest.raises(UserError, match=r"GT-final_test.csv \(.*ClassId\)"):
        SOURCES["gtsrb"](root)


def test_gtsrb_without_its_table_of_test_images(tmp_path):
    (gtsrb_root(tmp_path) / "gtsrb" / "GT-final_test.csv").unlink()
    with pytest.raises(UserError, match=r"GT-final_test.csv .*torchvision.datasets.GTSRB"):
        SOURCES["gtsrb"](tmp_path)


DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def pacs_files(count=3):
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for kind in ("dog", "house"):
            for i in range(count):
                buffer = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
                yield f"{domain}/{kind}/{i}.png", buffer.getvalue()


def pacs_folder(root):
    for name, content in pacs_files():
        path = root / "PACS" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def pacs_archive(root, count=3):
    root.mkdir(exist_ok=True)
    with tarfile.open(root / "pacs.tar", "w") as archive:
        for name, content in reversed(list(pacs_files(count))):
            member = tarfile.TarInfo(f"pacs/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return root


def test_pacs_is_the_same_from_a_folder_and_from_an_archive(tmp_path):
    federations = [
        labeled("pacs", data_root=make(tmp_path / make.__name__)) for make in (pacs_folder, pacs_archive)
    ]
    for fed in federations:
        assert [client.name for client in fed.clients] == list(DOMAINS)
        assert fed.classes == ("dog", "house")
        assert fed.shape == (3, 8, 8)
    assert federations[0].digest == federations[1].digest
    for a, b in zip(load(federations[0]), load(federations[1]), strict=True):
        assert torch.equal(a.train.images, b.train.images)
        assert torch.equal(a.train.labels, b.train.labels)


def test_incomplete_pacs_is_refused(tmp_path):
    import shutil

    root = pacs_folder(tmp_path / "a")
    shutil.rmtree(root / "PACS" / "sketch")
    with pytest.raises(UserError, match=r"\bsketch: .*ROOT/pacs"):
        SOURCES["pacs"](root)
    pacs_archive(root)
    with pytest.raises(UserError, match=r"PACS.*pacs\.tar"):
        SOURCES["pacs"](root)
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b" / "pacs.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("pacs/readme.txt"))
    with pytest.raises(UserError, match=r"pacs/readme.txt .*class"):
        SOURCES["pacs"](tmp_path / "b")
    (tmp_path / "b" / "pacs.tar").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"pacs.tar \("):
        SOURCES["pacs"](tmp_path / "b")


@pytest.mark.slow
@pytest.mark.data
def test_real_pacs(data_root):
    table = SOURCES["pacs"](data_root)
    assert table.groups == DOMAINS
    assert np.bincount(table.group_of).tolist() == [2048, 2344, 1670, 3929]
    assert table.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert table.images.read(np.array([0, 9990]), 0).shape == (2, 3, 64, 64)
