"""Notes for the user on unusual data, and names that cannot be printed."""

import re

import numpy as np
import pytest
from PIL import Image

from uefl.data import from_arrays
from uefl.data.notes import of_clients
from uefl.errors import UserError

from .common import labeled, sets


def labeled_client(rng, labels, size=(6, 6)):
    return rng.integers(0, 256, (len(labels), *size), dtype=np.uint8), np.array(labels)


def made(*clients, **keys):
    """Return a federation from (training labels, test labels) of each client."""
    rng = np.random.default_rng(0)
    made = [tuple(labeled_client(rng, labels) for labels in parts) for parts in clients]
    return from_arrays({f"c{i}": parts for i, parts in enumerate(made)}, **keys)


EVERY = [0, 1, 2] * 10


def test_a_clean_federation_has_no_notes():
    assert made((EVERY, [0, 1, 2]), (EVERY, [0, 1])).notes == ()


def test_a_class_that_only_the_test_split_has():
    notes = made((EVERY, [0, 3]), (EVERY, [4])).notes
    assert len(notes) == 1
    assert re.search("test images .*class '3', '4'", notes[0])


def test_a_class_without_images():
    (note,) = made((EVERY, [0]), (EVERY, [1]), classes="abcd").notes
    assert "class 'd'" in note


def test_clients_that_lack_a_class():
    (note,) = made((EVERY, [0]), ([0, 2] * 10, [1])).notes
    assert re.search("client 'c1' .*training .*class '1'$", note)
    (note,) = made((EVERY, [0]), ([0, 2] * 10, [1]), ([0, 1] * 10, [1]), ([1, 2] * 10, [0])).notes
    assert re.search("client 'c1' .*training .*class '1', .*2 more .*4 clients", note)


def test_a_single_silo():
    (note,) = made((EVERY, [0])).notes
    assert [note] == of_clients(1)
    assert sets(clients=1, train_per_client=300, test_per_client=20).notes[0] == note


def test_images_that_are_measured_and_trained_on(make_npz):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 6, 6), dtype=np.uint8)
    images[20] = images[0]
    path = make_npz(images=images, silo=np.repeat(["a", "b"], 20), test=np.isin(np.arange(40), (5, 20)))
    (note,) = labeled(path).notes
    assert re.match(r"image 20 \(b/test\) .*image 0 \(a/holdout\):", note)
    images[20] = images[21]
    images[22] = images[23]
    (note,) = labeled(
        make_npz(images=images, silo=np.repeat(["a", "b"], 20), test=np.isin(np.arange(40), (5, 20, 22)))
    ).notes
    assert re.match(r"image 20 \(b/test\) .*image 21 \(b/train\), .*1 more", note)


def test_images_that_resizing_distorts(make_images):
    root = make_images("a/cat", "a/dog", "b/cat", "b/dog", size=(8, 8))
    assert labeled(root, image_size=4).notes == ()
    Image.new("L", (40, 10), 3).save(root / "b/dog/0.png")
    Image.new("L", (10, 20), 3).save(root / "b/dog/1.png")
    (note,) = labeled(root, image_size=4).notes
    assert re.match(rf"2 of 20 images .*image_size = 4 .*{root}/b/dog/0\.png .*40x10", note)


def test_notes_are_printable(make_images):
    root = make_images("a/cat", "a/dog", "b/cat", "b/dog", size=(8, 8))
    Image.new("L", (40, 10), 3).save(root / "b/dog/a\n\x1b[31m\u202e.png")
    (note,) = labeled(root, image_size=4).notes
    assert "b/dog/a??[31m?.png" in note


def test_images_of_one_shape_that_resizing_distorts(make_npz):
    images = np.random.default_rng(0).integers(0, 256, (40, 5, 10), dtype=np.uint8)
    path = make_npz(images=images)
    assert labeled(path).notes == ()
    (note,) = labeled(path, image_size=8).notes
    assert re.match(rf"40 of 40 images .*image_size = 8 .*{path} .*10x5", note)


@pytest.mark.parametrize(
    ("bits", "message"), [(8, "nearly one value"), (12, r"\b15 of 255; .*12 bits in 16$"), (15, None)]
)
def test_fewer_bits_in_files_of_16_are_noted(tmp_path, bits, message):
    images = np.random.default_rng(0).integers(0, 2**bits, (20, 5, 5), dtype=np.uint16)
    for i, image in enumerate(images):
        path = tmp_path / "ab"[i % 2] / ("cat", "dog")[i // 10] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    deep, *dark = labeled(tmp_path).notes
    assert "16 bits" in deep
    assert len(dark) == (message is not None)
    assert message is None or re.search(message, dark[0])


def test_class_folders_in_another_case_or_empty(make_images):
    root = make_images("a/cat", "a/dog", "b/Cat", "b/dog")
    (root / "a/emu").mkdir()
    federation = labeled(root)
    notes = federation.notes
    assert federation.classes == ("Cat", "cat", "dog")
    assert len(notes) == 3
    assert notes[0].endswith(f": {root}/a/emu")
    assert "'Cat' and 'cat'" in notes[1]
    assert re.match("client 'a' .*class 'Cat', .*1 more .*2 clients", notes[2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clinic\nnorth", r"^client 'clinic\\nnorth': .*printable"),
        ("n" * 120, r"^client 'nnnnnnnnnnnnnnnnnnnn\.\.\.'.*\b120 .*\b64\b"),
        (" a", "printable"),
        ("", "printable"),
        ("\x1b[31mred", "printable"),
        ("a\u202eb", "printable"),
    ],
)
def test_names_that_cannot_be_shown_are_refused_in_one_line(make_npz, tmp_path, name, message):
    with pytest.raises(UserError, match=message) as error:
        labeled(make_npz(silo=np.repeat([name, "other"], 20)))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_names_that_are_the_same_once_they_are_text(make_npz):
    with pytest.raises(UserError, match=r"client 'K\ufffdln'.*twice"):
        labeled(make_npz(silo=np.repeat([b"K\xf6ln", b"K\xfcln"], 20)))


def test_names_in_other_scripts_are_fine(make_npz):
    federation = labeled(make_npz(silo=np.repeat(["東京", "Köln ☂"], 20)))
    assert [client.name for client in federation.clients] == ["Köln ☂", "東京"]


def test_a_client_of_sets_with_a_newline(tmp_path):
    from .test_own_sets import write

    root = write(tmp_path, table="none")
    (root / "clients" / "berlin").rename(root / "clients" / "ber\nlin")
    with pytest.raises(UserError, match=r"client 'ber\\nlin': .*printable"):
        sets(root, priors="estimated")
