import re

import numpy as np
import pytest
import torch
from PIL import Image

from uefl.data.sources.own_folder import read
from uefl.errors import UserError

from .common import labeled, splits


def test_classes_are_the_union_of_folder_names_over_clients(make_images):
    root = make_images("south/cat", "south/dog", "north/dog", "north/ant")
    own = read(root)
    assert list(own.groups) == ["north", "south"]
    assert own.classes == ("ant", "cat", "dog")
    train, test = splits(own, "south")
    assert test is None
    assert train.images.shape == (10, 1, 6, 8)
    assert train.labels.tolist() == [1] * 5 + [2] * 5
    np.testing.assert_array_equal(train.images[7, 0].numpy(), np.array(Image.open(root / "south/dog/2.png")))


def test_train_and_test_folders_are_the_splits(make_images):
    own = read(make_images("a/train/cat", "a/train/dog", "a/test/dog", "b/cat", "b/dog", count=3))
    train, test = splits(own, "a")
    assert test is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 0, 1, 1, 1], [1, 1, 1])
    assert splits(own, "b")[1] is None


def test_a_stray_file_next_to_the_classes_of_a_split_is_noted(make_images):
    root = make_images("a/train/cat", "a/train/dog", "a/test/dog", count=3)
    assert read(root).notes == ()
    (root / "a/test/notes.txt").write_text("x")
    assert "a/test/notes.txt" in read(root).notes[0]


def test_a_folder_of_another_format_names_the_formats(tmp_path):
    (tmp_path / "a/cat").mkdir(parents=True)
    (tmp_path / "a/cat/scan.dcm").write_bytes(b"DICM")
    with pytest.raises(UserError, match=r"\ba .*PNG.*convert .*DICOM"):
        read(tmp_path)


@pytest.mark.parametrize("place", ["a/cat", "b/train/dog"])
def test_a_text_among_images_is_noted(make_images, place):
    root = make_images("a/cat", "a/dog", "b/train/cat", "b/train/dog", "b/test/dog", count=3)
    (root / place / "notes.txt").write_text("x")
    own = read(root)
    assert [note.endswith(f": {root / place / 'notes.txt'}") for note in own.notes] == [True]
    assert own.images.count == 15


def test_train_and_test_may_be_classes(make_images):
    assert read(make_images("a/train", "a/test")).classes == ("test", "train")


def test_gray_images_join_color_ones_as_rgb(make_images):
    make_images("a/cat", "a/dog", "b/cat", mode="L")
    root = make_images("b/dog", mode="RGB")
    own = read(root)
    gray = splits(own, "a")[0].images
    assert gray.shape == (10, 3, 6, 8)
    assert torch.equal(gray[:, 0], gray[:, 2])
    np.testing.assert_array_equal(
        splits(own, "b")[0].images[5].numpy(), np.array(Image.open(root / "b/dog/0.png")).transpose(2, 0, 1)
    )


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "1", "LA"])
def test_other_modes_of_eight_bits_are_converted(make_images, mode):
    root = make_images("a/cat", "a/dog")
    path = root / "a/dog" / ("z.tif" if mode == "CMYK" else "z.png")
    Image.new("L", (8, 6), 255).convert(mode).save(path)
    images = splits(read(root), "a")[0].images
    assert images.shape[1] == (1 if mode in ("1", "LA") else 3)
    assert images[-1].unique().tolist() == [255]


def test_image_size_makes_different_sizes_one(make_images):
    make_images("a/cat", size=(8, 6))
    root = make_images("a/dog", size=(12, 12))
    assert labeled(root, image_size=10).clients[0].load().train.images.shape == (6, 1, 10, 10)
    with pytest.raises(UserError, match=r"dog/0.png .*12x12 .*cat/0.png .*8x6.*image_size"):
        labeled(root)


def test_hidden_files_and_notes_next_to_clients_are_skipped(make_images):
    root = make_images("a/cat", "a/dog")
    (root / "a/cat/.DS_Store").write_bytes(b"x")
    (root / ".cache").mkdir()
    (root / "README.txt").write_text("text")
    own = read(root)
    assert list(own.groups) == ["a"]
    assert len(splits(own, "a")[0]) == 10
    assert [note.endswith(f": {root / 'README.txt'}") for note in own.notes] == [True]
    (root / "a/labels.csv").write_text("x")
    (note,) = read(root).notes
    assert re.search(f": {root / 'README.txt'} .*1 more", note)


def test_classes_that_look_the_same_are_noted(make_images):
    notes = read(make_images("a/caf\u00e9", "a/dog", "b/cafe\u0301", "b/dog ")).notes
    assert [r"'cafe\u0301' and 'caf\xe9'" in notes[0], "'dog' and 'dog '" in notes[1]] == [True, True]


@pytest.mark.parametrize(("there", "other"), [("train", "test"), ("test", "train")])
def test_one_part_of_a_split_names_the_other(make_images, there, other):
    with pytest.raises(UserError, match=rf"silos/a/{there} .*silos/a/{other}, .*silos/a,"):
        read(make_images(f"a/{there}/cat", f"a/{there}/dog"))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: truncate(root / "a/cat/3.png"), "a/cat/3.png"),
        (lambda root: (root / "a/cat/labels.png").write_text("text"), "labels.png .*format"),
        (lambda root: Image.new("F", (8, 6)).save(root / "a/cat/x.tiff"), "x.tiff .*floats"),
        (lambda root: Image.new("L", (8, 6)).save(root / "a/cat/x.eps"), "x.eps .*format"),
        (lambda root: (root / "a/cat/x.ppm").write_bytes(b"P6 100000 100000 255\n"), r"x.ppm .*\b1(0){10}\b"),
        (lambda root: (root / "a/0.png").write_bytes(b""), "a/0.png .*FOLDER/CLIENT/CLASS"),
        (lambda root: (root / "0.jpg").write_bytes(b""), "0.jpg .*FOLDER/CLIENT/CLASS"),
        (lambda root: (root / "a/cat/more").mkdir(), "a/cat/more .*folder"),
        (lambda root: (root / "empty").mkdir(), "empty .*subfolders"),
        (lambda root: (root / "b/cat").mkdir(parents=True), r"\bb .*image"),
        (
            lambda root: [(root / f"b/{part}/cat").mkdir(parents=True) for part in ("train", "test")],
            "b/(train|test) .*image",
        ),
    ],
)
def test_unusable_files_are_named_and_never_skipped(make_images, spoil, message):
    root = make_images("a/cat", "a/dog")
    spoil(root)
    with pytest.raises(UserError, match=message) as error:
        labeled(root)
    assert "\n" not in str(error.value)


def test_folder_without_clients_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"subfolders.*CLASS"):
        read(tmp_path)
