"""Notes on the data for the user, and a check of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import UserError, listed
from . import pixels
from .images import ImageList
from .inputs import IMAGES, Inputs
from .prepare import Moments, PixelCounts, Source

ClassCounts = npt.NDArray[np.int64]
"""``[clients, classes]`` images"""

_LONGEST_NAME = 64
_DARK = 64  # a value that some training image should reach


def check_names(what: str, names: Iterable[str]) -> None:
    """Refuse long, repeated or unprintable names, because tables, plots and file names have them.

    Raises:
        UserError: a name is not valid; the message has the first such name.
    """
    seen: set[str] = set()
    for name in names:
        if not name.strip() or name != name.strip() or not name.isprintable():
            raise UserError(
                f"{what} {name[:_LONGEST_NAME]!r}: expected printable characters, without blanks around them;"
                " rename it"
            )
        if len(name) > _LONGEST_NAME:
            raise UserError(
                f"{what} {name[:20] + '...'!r} has {len(name)} characters; expected at most {_LONGEST_NAME},"
                " rename it"
            )
        if name in seen:
            raise UserError(f"{what} {name!r} occurs twice; rename one")
        seen.add(name)


def of_resizing(sources: Iterable[Source], image_size: int) -> list[str]:
    """Return a note if images lose their proportions, because they are resized to a square."""
    if not image_size:
        return []
    count, total, worst, example = 0, 0, 1.0, ""
    for images in sources:
        assert isinstance(images, ImageList)
        heights, widths = images.shapes[:, 0], images.shapes[:, 1]
        stretch = np.maximum(heights / widths, widths / heights)
        weight = images.count // len(stretch)  # len(stretch) is 1 if all images have one size
        count += weight * int((stretch > 1).sum())
        total += images.count
        if stretch.max() > worst:
            at = int(stretch.argmax())
            worst, example = float(stretch[at]), f"{images.name(at)} of {widths[at]}x{heights[at]}"
    if not count:
        return []
    return [
        f"{count} of {total} images are not square: image_size = {image_size} distorts them; the most"
        f" distorted image is {example}"
    ]


def of_kinds(sources: Iterable[Source]) -> list[str]:
    """Return a note with the number of images for each kind of change that reading makes in values."""
    kinds, total = Counter[str](), 0
    for images in sources:
        kinds.update(images.kinds)
        total += images.count
    return pixels.notes(kinds, total)


def of_contrast(statistics: PixelCounts | Moments) -> list[str]:
    """Return notes if training images are all dark or alike, such as 12-bit values that are stored as 16."""
    if not isinstance(statistics, PixelCounts):
        return []
    if max(statistics.mean_and_std()[1]) <= 1 / 255:
        return ["all pixels of the training images have nearly one value"]
    values = statistics.counts.sum(0).nonzero()
    if not len(values) or (largest := int(values.max())) >= _DARK:
        return []
    return [
        f"the largest value of the training images is {largest} of 255; if their values have fewer bits than"
        " the files, scale them to the whole range, as by 16 for 12 bits in 16"
    ]


def of_classes(
    names: Sequence[str], classes: Sequence[str], train: ClassCounts, test: ClassCounts
) -> list[str]:
    """Return notes on classes without training images, and on clients that lack a class."""
    found = []
    untrained = train.sum(0) == 0
    only_tested = [classes[k] for k in np.flatnonzero(untrained & (test.sum(0) > 0))]
    if only_tested:
        found.append(f"only test images have class {listed(map(repr, only_tested))}: no model can learn it")
    absent = [classes[k] for k in np.flatnonzero(untrained & (test.sum(0) == 0))]
    if absent:
        found.append(f"no image has class {listed(map(repr, absent))}")
    lacking = [(c, np.flatnonzero((row == 0) & ~untrained)) for c, row in enumerate(train)]
    lacking = [(c, missing) for c, missing in lacking if len(missing)]
    if lacking:
        c, missing = lacking[0]
        first = (
            f"client {names[c]!r} has no training image of class {listed(repr(classes[k]) for k in missing)}"
        )
        more = f", and {len(lacking) - 1} more of {len(names)} clients lack a class"
        found.append(first + (more if len(lacking) > 1 else ""))
    return found


def of_twins(twins: Sequence[tuple[str, str]], inputs: Inputs = IMAGES) -> list[str]:
    """Return a note on images that occur both in training and in a test."""
    if not twins:
        return []
    measured, trained = twins[0]
    more = f", and {len(twins) - 1} more such pair{'s' * (len(twins) > 2)}" if len(twins) > 1 else ""
    return [
        f"{measured} is the same {inputs.noun[:-1]} as {trained}{more}: its measurements are not reliable"
    ]


def of_clients(count: int) -> list[str]:
    """Return a note if there is a single client."""
    return ["one client only: its model is averaged with no other"] if count == 1 else []
