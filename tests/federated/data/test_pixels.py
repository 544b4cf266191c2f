"""Every way in reads images by the same rules: values, notes with their counts, refusals."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from uefl.data import from_arrays
from uefl.data.images import on_files
from uefl.data.pixels import as_bytes, as_labels, kinds_of, pixels_of
from uefl.errors import UserError

from .common import labeled, load

RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (8, 6, 3), dtype=np.uint8)
GRAY = RNG.integers(0, 256, (8, 6), dtype=np.uint8)
DEEP = RNG.integers(0, 2**16, (8, 6), dtype=np.uint16)
ALPHA = np.where(np.arange(6) < 3, 0, 255).astype(np.uint8) * np.ones((8, 1), np.uint8)


def on_white(color, alpha):
    """Return an image on white, computed in float64: transparent pixels show white."""
    share = alpha[..., None] / 255.0
    return np.round(share * color + (1 - share) * 255).astype(np.uint8)


def rotated(image, orientation):
    """Return an image with EXIF data that ask for a rotation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image, {"exif": exif}


def palette():
    return Image.fromarray(COLOR).quantize(16)


# name: an image, or an image and how to save it; the suffix; the pixels [H, W(, 3)] that are right; the kind
# that is noted
CASES = {
    "gray": (Image.fromarray(GRAY), "png", GRAY, None),
    "color": (Image.fromarray(COLOR), "png", COLOR, None),
    "bits": (Image.fromarray(GRAY > 127), "png", np.where(GRAY > 127, 255, 0), None),
    "palette": (palette(), "png", np.array(palette().convert("RGB")), None),
    "RGBA": (Image.fromarray(np.dstack([COLOR, ALPHA])), "png", on_white(COLOR, ALPHA), "transparency"),
    "LA": (
        Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)]),
        "png",
        on_white(GRAY[..., None], ALPHA)[..., 0],
        "transparency",
    ),
    "palette-tRNS": (
        (palette(), {"transparency": 0}),
        "png",
        on_white(np.array(palette().convert("RGB")), np.where(np.array(palette()) == 0, 0, 255)),
        "transparency",
    ),
    "16-bit": (Image.fromarray(DEEP), "png", DEEP >> 8, "16 bits"),
    "16-bit-tiff": (Image.fromarray(DEEP), "tiff", DEEP >> 8, "16 bits"),
    "16-bit-pgm": (Image.fromarray(DEEP), "pgm", DEEP >> 8, "16 bits"),
    "CMYK": (Image.fromarray(COLOR).convert("CMYK"), "tiff", COLOR, "neither gray nor RGB"),
    "upside-down": (rotated(Image.fromarray(COLOR), 3), "png", COLOR[::-1, ::-1], "EXIF"),
    "mirrored": (rotated(Image.fromarray(COLOR), 2), "png", COLOR[:, ::-1], "EXIF"),
    "on-its-side": (rotated(Image.fromarray(COLOR.swapaxes(0, 1)), 5), "png", COLOR, "EXIF"),
    "damaged EXIF": (
        (Image.fromarray(COLOR), {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12"}),
        "png",
        COLOR,
        None,
    ),
    "pages": (
        (Image.fromarray(COLOR), {"save_all": True, "append_images": [Image.fromarray(GRAY)]}),
        "tiff",
        COLOR,
        "several frames",
    ),
}


def write(path, image):
    image, how = image if isinstance(image, tuple) else (image, {})
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)


def folder(tmp_path, case):
    """Return a client in which one image has the tested form and nearly all others are plain."""
    image, suffix, _, _ = CASES[case]
    for label in ("cat", "dog"):
        for i in range(6):
            write(tmp_path / f"silos/a/{label}/{i}.png", Image.fromarray(COLOR + i))
    write(tmp_path / f"silos/a/cat/special.{suffix}", image)
    return tmp_path / "silos"


def everything(federation):
    return torch.cat(
        [split.images for client in load(federation) for split in (client.train, client.holdout, client.test)]
    )


def expected(pixels):
    pixels = torch.from_numpy(np.array(pixels, np.uint8, order="C"))
    return pixels.expand(3, -1, -1) if pixels.ndim == 2 else pixels.movedim(2, 0)


def has(images, pixels):
    return bool((images == expected(pixels)).flatten(1).all(1).any())


def check_notes(federation, count, kind):
    """Check that one note has the kind of change and the number of images, or that there is no note."""
    notes = [note for note in federation.notes if f"of {count.split()[-1]} images" in note]
    assert len(notes) == bool(kind)
    assert all(note.startswith(f"{count} images") and kind in note for note in notes)


def dataset(tmp_path, case):
    """Return the images of :func:`folder` as a Dataset of PIL images."""
    image, suffix, _, _ = CASES[case]
    write(tmp_path / f"special.{suffix}", image)
    plain = [(Image.fromarray(COLOR + i), i % 2) for i in range(12)]
    return [*plain, (Image.open(tmp_path / f"special.{suffix}"), np.int64(1))]


@pytest.mark.parametrize("way", ["files", "dataset"])
@pytest.mark.parametrize("case", CASES)
def test_an_image_of_every_kind(tmp_path, case, way, recwarn):
    _, _, pixels, kind = CASES[case]
    if way == "files":
        federation, allowed = labeled(folder(tmp_path, case)), set()  # Pillow's warnings name no file
    else:
        federation, allowed = from_arrays({"a": (dataset(tmp_path, case), None)}), {ResourceWarning}
    assert {shown.category for shown in recwarn} <= allowed
    assert has(everything(federation), pixels)
    check_notes(federation, "1 of 13", kind)


IMAGES = RNG.integers(0, 256, (24, 8, 6, 3), dtype=np.uint8)
LABELS = np.arange(24) % 3
FORMS = {
    "reversed channels": (IMAGES[..., ::-1].copy()[..., ::-1], None),
    "reversed rows": (IMAGES[:, ::-1].copy()[:, ::-1], None),
    "reversed": (IMAGES[::-1].copy()[::-1], None),
    "Fortran order": (np.asfortranarray(IMAGES), None),
    "read-only": (np.frombuffer(IMAGES.tobytes(), np.uint8).reshape(IMAGES.shape), None),
    "big-endian floats": ((IMAGES / 255).astype(">f4"), "floats"),
    "halves": ((IMAGES / 255).astype(np.float16), "floats"),
    "long doubles": ((IMAGES / 255).astype(np.longdouble), "floats"),
    "16 bits": (IMAGES.astype(np.uint16) * 257, "16 bits"),
    "big-endian 16 bits": ((IMAGES.astype(np.uint16) * 256).astype(">u2"), "16 bits"),
    "16-bit tensor": (torch.from_numpy(IMAGES.astype(np.int32) * 257).to(torch.uint16), "16 bits"),
    "channels first": (np.moveaxis(IMAGES, 3, 1), None),
    "nothing masked": (np.ma.masked_array(IMAGES, np.zeros(IMAGES.shape, bool)), None),
    "needs a gradient": (torch.from_numpy(IMAGES / 255).requires_grad_(), "floats"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["arrays", "npz", "dataset"])
def test_arrays_of_every_form(tmp_path, form, way):
    images, kind = FORMS[form]
    if way == "arrays":
        federation = from_arrays({"a": ((images, LABELS), None)})
    elif way == "dataset":
        federation = from_arrays(
            {"a": ([(image, int(label)) for image, label in zip(images, LABELS, strict=True)], None)}
        )
    else:
        array = images.detach().numpy() if isinstance(images, torch.Tensor) else images
        np.savez(tmp_path / "silos.npz", images=array, labels=LABELS, silo=np.zeros(24, int))
        federation = labeled(tmp_path / "silos.npz")
    read, right = everything(federation), torch.from_numpy(IMAGES).movedim(3, 1)
    assert sorted(map(bytes, read.flatten(1).numpy())) == sorted(map(bytes, right.flatten(1).numpy()))
    check_notes(federation, "24 of 24", kind)


@pytest.mark.parametrize(
    "labels",
    [
        LABELS[::-1],
        LABELS.astype(">i8"),
        LABELS.astype(np.uint8),
        LABELS.tolist(),
        tuple(LABELS.tolist()),
        torch.from_numpy(LABELS),
        torch.from_numpy(LABELS).to(torch.int16),
        pytest.importorskip("pandas").Series(LABELS),
        LABELS.astype(object),
    ],
    ids=["reversed", "big-endian", "uint8", "list", "tuple", "tensor", "int16", "series", "object"],
)
def test_labels_of_every_form(labels):
    right = LABELS[::-1] if isinstance(labels, np.ndarray) and labels[0] == 2 else LABELS
    assert as_labels(labels, 24, "a").tolist() == right.tolist()
    federation = from_arrays({"a": ((IMAGES, labels), None)})
    entry = federation.manifest["silos"]["a"]
    assert sum(np.array(part["images_of_class"]) for part in entry.values()).tolist() == [8, 8, 8]


NO_INTEGERS = [
    1.0,
    1.5,
    True,
    np.float32(1),
    np.bool_(True),
    "1",
    None,
    [1],
    torch.tensor(1.0),
    torch.tensor(True),
    torch.tensor(1.5, dtype=torch.bfloat16),
    float("nan"),
    np.uint64(2**63),
]


@pytest.mark.parametrize("label", NO_INTEGERS, ids=repr)
def test_a_label_that_is_no_integer_is_refused(label):
    pairs = [(image, k) for image, k in zip(IMAGES, LABELS.tolist(), strict=True)]
    with pytest.raises(UserError, match=r"a/train: .* 24: .*integer"):
        from_arrays({"a": ([*pairs, (IMAGES[0], label)], None)})
    with pytest.raises(UserError, match=r"a/train: label 23: .*integer"):
        from_arrays({"a": ((IMAGES, [*LABELS[:-1].tolist(), label]), None)})


@pytest.mark.parametrize(
    "labels",
    [
        LABELS * 1.0,
        LABELS > 1,
        LABELS.astype(str),  # names of classes: only in Python
        np.array(list("abc"))[LABELS],
        LABELS[:, None],
        LABELS.astype(object) / 2,
    ],
)
def test_arrays_of_labels_that_are_no_integers_are_refused(tmp_path, labels):
    if labels.dtype.kind != "U":
        with pytest.raises(UserError, match=r"a/train: .*\binteger"):
            from_arrays({"a": ((IMAGES, labels), None)})
    if np.asarray(labels).dtype.kind != "O":
        np.savez(tmp_path / "silos.npz", images=IMAGES, labels=labels, silo=np.zeros(24, int))
        with pytest.raises(UserError, match=r"silos.npz: labels: .*\b24 integers"):
            labeled(tmp_path / "silos.npz")


@pytest.mark.parametrize(
    ("labels", "advice"),
    [
        (LABELS * 1.0, r"labels\.astype\(int\)$"),
        (LABELS > 1, r"labels\.astype\(int\)$"),
        (LABELS / 2, r"float64 \[24\]$"),
        (np.eye(24), r"reshape\(-1\), or .*labels\.argmax\(1\)$"),
        (set(range(24)), r"\bset$"),
        (torch.from_numpy(LABELS).bfloat16(), r"labels\.long\(\)$"),
        (torch.from_numpy(LABELS) / 2, r"float32 \[24\]$"),
        ([1.0] * 24, r"int\(label\)$"),
        ([1.5] * 24, "float$"),
    ],
)
def test_labels_of_another_type_have_their_conversion(labels, advice):
    with pytest.raises(UserError, match=advice):
        from_arrays({"a": ((IMAGES, labels), None)})


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.bool, torch.Tensor.cfloat])
def test_tensors_of_labels_that_are_no_integers_are_refused(change):
    with pytest.raises(UserError, match=r"a/train: .*\b24 integers"):
        from_arrays({"a": ((IMAGES, change(torch.from_numpy(LABELS))), None)})


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse"),
        (lambda x: x.to("meta"), "meta"),
        (lambda x: torch.nested.nested_tensor([x], layout=torch.jagged), "nested"),
        (lambda x: torch.quantize_per_tensor(x.float(), 1, 0, torch.quint8), "quantized"),
    ],
    ids=["sparse", "meta", "nested", "quantized"],
)
def test_tensors_that_are_not_dense_are_refused(change, kind):
    labels, rows = torch.from_numpy(LABELS), torch.ones(24, 4)
    parts = [(IMAGES, change(labels)), (change(rows), labels)]
    if kind != "nested":
        parts += [[(change(row), 1) for row in rows], [(rows[0].numpy(), change(labels[1])) for _ in rows]]
    for part in parts:
        with pytest.raises(UserError, match=rf"a/train: .*\b{kind}\b"):
            from_arrays({"a": (part, None)})


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES.astype(object), "uint8, uint16.*object"),
        (IMAGES > 9, r"\bbool\b"),
        (IMAGES.astype(complex), "got complex128"),
        (np.ma.masked_array(IMAGES, IMAGES > 250), r"array\.filled\(0\)"),
        (torch.from_numpy(IMAGES) > 9, "torch.bool"),
        (torch.from_numpy(IMAGES).to_sparse(), "sparse"),
        (torch.from_numpy(IMAGES).to("meta"), "meta"),
        (
            torch.quantize_per_tensor(torch.from_numpy(IMAGES / 255).float(), 1 / 255, 0, torch.quint8),
            "quantized",
        ),
    ],
)
def test_images_of_no_known_range_are_refused(images, message):
    with pytest.raises(UserError, match=message):
        as_bytes(images, "a")
    with pytest.raises(UserError, match=message):
        from_arrays({"a": ((images, LABELS), None)})


@pytest.mark.parametrize("images", [IMAGES.astype(np.uint16), torch.from_numpy(IMAGES).to(torch.uint16)])
def test_bytes_as_uint16_do_not_become_black(images):
    with pytest.raises(UserError, match=r"a/train: .*uint16 .*uint8"):
        from_arrays({"a": ((images, LABELS), None)})


def test_halves_are_rounded_by_their_exact_value():
    """In half precision the product would be rounded twice."""
    halves = torch.linspace(0, 1, 999).bfloat16()
    assert torch.equal(as_bytes(halves, "a")[0], (halves.double() * 255).round().byte())


def test_a_transparent_value_of_16_bits(tmp_path):
    clear = int(DEEP[0, 0])
    Image.fromarray(DEEP).save(tmp_path / "a.png", transparency=clear)
    pixels = pixels_of(Image.open(tmp_path / "a.png"))[0].numpy()
    assert np.array_equal(pixels, np.where(np.equal(DEEP, clear), 255, DEEP >> 8))


def png(path, depth, color, rows, *more):
    """Write a PNG that Pillow cannot write, with more chunks before the pixels."""
    header = struct.pack(">IIBBBBB", 6, 8, depth, color, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    text = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in ((b"IHDR", header), *more, (b"IDAT", data), (b"IEND", b""))
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + text)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_transparent_gray_of_few_bits(tmp_path, depth):
    """Pillow decodes to 8 bits and leaves the transparent value in the bits of the file."""
    most = 2**depth - 1
    gray = np.arange(48).reshape(8, 6) % (most + 1)
    bits = [
        np.packbits(np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, 8 - depth :]).tobytes()
        for row in gray
    ]
    png(tmp_path / "a.png", depth, 0, bits, (b"tRNS", struct.pack(">H", 1)))
    pixels = on_files([tmp_path / "a.png"]).read(np.arange(1), 0)[0]
    assert torch.equal(pixels[0], torch.from_numpy(np.where(gray == 1, 255, gray * 255 // most)).byte())


def test_a_transparent_color_of_16_bits(tmp_path):
    color = np.repeat(DEEP, 3, 1).reshape(8, 6, 3)
    clear = struct.pack(">HHH", *color[0, 0].tolist())
    png(tmp_path / "a.png", 16, 2, [row.astype(">u2").tobytes() for row in color], (b"tRNS", clear))
    pixels = on_files([tmp_path / "a.png"]).read(np.arange(1), 0)[0]
    assert torch.equal(pixels, expected(np.where((color == color[0, 0]).all(2)[..., None], 255, color >> 8)))
    assert torch.equal(pixels_of(Image.open(tmp_path / "a.png").copy()), pixels)  # as a Dataset may yield it


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("white", [0, 1])
def test_a_tiff_in_which_0_is_white(tmp_path, white, bits):
    """Pillow writes the tag and no inverted values of 16 bits."""
    stored = DEEP if bits == 16 else GRAY
    (image := Image.fromarray(stored)).save(tmp_path / "a.tiff", tiffinfo={262: white})
    right = np.array(image) if white or bits == 8 else 2**16 - 1 - DEEP
    pixels = on_files([tmp_path / "a.tiff"]).read(np.arange(1), 0)[0]
    assert torch.equal(pixels[0], torch.from_numpy((right >> (bits - 8)).astype(np.uint8)))


def test_a_gray_image_with_multiplied_alpha():
    image = Image.fromarray(np.dstack([GRAY, ALPHA]).astype(np.uint8), "LA").convert("La")
    assert torch.equal(pixels_of(image)[0], torch.from_numpy(on_white(GRAY[..., None], ALPHA)[..., 0]))


def test_color_of_16_bits_is_noted(tmp_path):
    """Pillow rounds the values of a PPM, and drops the lower bits in other formats."""
    color = np.stack([DEEP, DEEP.T.reshape(8, 6), DEEP[::-1]], 2)
    png(tmp_path / "a.png", 16, 2, [row.astype(">u2").tobytes() for row in color])
    sgi = struct.pack(">HBBHHHH", 474, 0, 2, 3, 6, 8, 3).ljust(512, b"\0")
    (tmp_path / "a.sgi").write_bytes(sgi + color[::-1].transpose(2, 0, 1).astype(">u2").tobytes())
    for name, most in (("a", 2**16 - 1), ("b", 1023)):
        stored = (color & most).astype(">u2").tobytes()
        (tmp_path / f"{name}.ppm").write_bytes(b"P6\n6 8\n%d\n" % most + stored)
    rounded = {
        name: np.round((color & most) * (255 / most)) for name, most in (("a", 2**16 - 1), ("b", 1023))
    }
    for name, right in (
        ("a.png", color >> 8),
        ("a.sgi", color >> 8),
        ("a.ppm", rounded["a"]),
        ("b.ppm", rounded["b"]),
    ):
        images = on_files([tmp_path / name])
        assert torch.equal(images.read(np.arange(1), 0)[0], expected(right)), name
        (kind,) = images.kinds
        assert "16 bits" in kind
        assert ("rounded" in kind) == name.endswith("ppm")
    Image.fromarray(COLOR).save(tmp_path / "8.ppm")
    assert not on_files([tmp_path / "8.ppm"]).kinds


@pytest.mark.parametrize(
    ("suffix", "before", "depth"),
    [("jp2", b"ihdr", 14), ("j2k", b"\xff\x4f\xff\x51", 42), ("avif", b"pixi", 9)],
)
def test_the_depth_of_compressed_colors_is_noted(tmp_path, suffix, before, depth):
    """Pillow writes 8 bits only, so the test changes the depth in the header."""
    Image.fromarray(COLOR).save(tmp_path / f"a.{suffix}")
    image = Image.open(tmp_path / f"a.{suffix}")
    assert not kinds_of(image)
    changed = bytearray((tmp_path / f"a.{suffix}").read_bytes())
    changed[changed.index(before) + depth] = 12 if suffix == "avif" else 11
    image.fp = io.BytesIO(changed)
    assert [kind for kind in kinds_of(image) if "16 bits" in kind]


def test_a_tiff_of_12_bits(tmp_path):
    """Pillow leaves the values as they are, with at most 4095."""
    bits = np.unpackbits((DEEP >> 4).astype(">u2").view(np.uint8).reshape(8, 6, 2), axis=2)[:, :, 4:]
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(tmp_path / "a.tiff")
    whole = bytearray((tmp_path / "a.tiff").read_bytes())
    tags = int.from_bytes(whole[4:8], "little") + 2
    values = {256: 6, 258: 12}  # width, bits per value
    for place in range(tags, tags + 12 * int.from_bytes(whole[tags - 2 : tags], "little"), 12):
        tag = int.from_bytes(whole[place : place + 2], "little")
        if tag in values:
            whole[place + 8 : place + 12] = values[tag].to_bytes(4, "little")
        if tag == 273:
            begin = int.from_bytes(whole[place + 8 : place + 12], "little")
    whole[begin : begin + 72] = np.packbits(bits.reshape(8, -1), axis=1).tobytes()
    (tmp_path / "a.tiff").write_bytes(whole)
    images = on_files([tmp_path / "a.tiff"])
    assert torch.equal(images.read(np.arange(1), 0)[0], torch.from_numpy((DEEP >> 8).astype(np.uint8))[None])
    assert [kind for kind in images.kinds if "16 bits" in kind]
    (decoded := Image.open(tmp_path / "a.tiff")).load()  # as a Dataset may yield it
    assert torch.equal(pixels_of(decoded), images.read(np.arange(1), 0)[0])


@pytest.mark.parametrize(
    ("suffix", "orientation", "turned"), [("tiff", 6, True), ("png", 6, True), ("jpg", 9, False)]
)
def test_the_size_is_that_of_the_upright_pixels(tmp_path, suffix, orientation, turned):
    image, how = rotated(Image.fromarray(GRAY), orientation)
    image.save(tmp_path / f"a.{suffix}", **how)
    images = on_files([tmp_path / f"a.{suffix}"])
    assert images.shapes.tolist() == [list(images.read(np.arange(1), 0).shape[2:])]
    assert images.shapes.tolist() == [[6, 8] if turned else [8, 6]]
    assert bool(images.kinds) == turned


def test_hidden_colors_do_not_matter():
    """Two images are equal if their visible pixels are equal."""
    hidden = np.dstack([np.where(ALPHA[..., None] > 0, COLOR, 240), ALPHA])
    shown = [
        pixels_of(Image.fromarray(array.astype(np.uint8))) for array in (np.dstack([COLOR, ALPHA]), hidden)
    ]
    assert torch.equal(*shown)


def test_all_damaged_files_are_named(tmp_path):
    """The error also names images of other clients, with damaged headers or pixels."""
    root = tmp_path / "silos"
    for client in ("a", "b"):
        for label in ("cat", "dog"):
            for i in range(6):
                write(root / client / label / f"{i}.png", Image.fromarray(COLOR + i))
    cut = [root / "a/cat/3.png", root / "b/dog/5.png"]
    for path in cut:
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError) as error:
        labeled(root)
    assert all(str(path) in str(error.value) for path in cut)
    (root / "b/cat/0.png").write_text("text")
    (root / "b/cat/gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match=r"\b4 images") as error:
        labeled(root)
    assert all(
        str(path) in str(error.value) for path in [*cut, root / "b/cat/0.png", root / "b/cat/gone.png"]
    )
    assert "\n" not in str(error.value)


def test_many_damaged_files_are_counted(tmp_path):
    root = tmp_path / "silos"
    for i in range(200):
        write(root / "a/cat" / f"{i:03}.tif", Image.fromarray(np.zeros((4, 4), np.float32)))
    with pytest.raises(UserError, match=r"\b200 .*099\.tif.*\b100 more") as error:
        labeled(root)
    assert "100.tif" not in str(error.value)


def test_huge_image_is_noted_without_a_warning(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 47)
    federation = labeled(folder(tmp_path, "color"))
    assert not recwarn.list
    assert any(re.match("13 of 13 images .*million", note) for note in federation.notes)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_values_of_no_known_range_are_refused(tmp_path, mode):
    write(tmp_path / "x.tiff", Image.new(mode, (6, 8)))
    with pytest.raises(UserError, match=r"x\.tiff .*values"):
        labeled(_one_more(tmp_path))


def _one_more(tmp_path):
    for label in ("cat", "dog"):
        write(tmp_path / f"silos/a/{label}/0.png", Image.fromarray(COLOR))
    (tmp_path / "x.tiff").rename(tmp_path / "silos/a/cat/x.tiff")
    return tmp_path / "silos"
