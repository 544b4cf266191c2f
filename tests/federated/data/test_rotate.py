import math

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode, functional

from uefl.data.rotate import augment, resize, rotate, rotate_each


def random_images(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def by_definition(image, degrees, center):
    """Sample one channel [H, W] bilinearly, in float64, at each pixel turned back about ``center`` (x, y)."""
    height, width = image.shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    padded = torch.zeros(height + 2, width + 2, dtype=torch.float64)  # black outside
    padded[1:-1, 1:-1] = image
    out = torch.zeros(height, width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            # y points down, so that a counter-clockwise turn of the picture samples from here
            dx, dy = x - center[0], y - center[1]
            sx, sy = center[0] + cos * dx - sin * dy, center[1] + sin * dx + cos * dy
            if not (-1 < sx < width and -1 < sy < height):
                continue
            x0, y0 = math.floor(sx), math.floor(sy)
            fx, fy = sx - x0, sy - y0
            square = padded[y0 + 1 : y0 + 3, x0 + 1 : x0 + 3]
            weight = torch.tensor(
                [[(1 - fy) * (1 - fx), (1 - fy) * fx], [fy * (1 - fx), fy * fx]], dtype=torch.float64
            )
            out[y, x] = (square * weight).sum()
    return out


@pytest.mark.parametrize("degrees", [0, 360, -720])
@pytest.mark.parametrize("legacy", [False, True], ids=["center", "legacy"])
def test_no_turn_is_the_identity(degrees, legacy):
    images = random_images(3, 1, 7, 9)
    assert torch.equal(rotate(images, degrees, legacy_center=legacy), images)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 28])
def test_quarter_turns_are_exact_and_counter_clockwise(turns, size):
    images = random_images(2, 3, size, size)
    assert torch.equal(rotate(images, 90 * turns), torch.rot90(images, turns, (-2, -1)))


@pytest.mark.parametrize("degrees", [-50, 120, 7.5])
@pytest.mark.parametrize("legacy", [False, True], ids=["center", "legacy"])
@pytest.mark.parametrize("shape", [(9, 9), (8, 11)], ids=["square", "wide"])
def test_agrees_with_bilinear_sampling_by_definition(degrees, legacy, shape):
    height, width = shape
    images = random_images(2, 2, height, width)
    turned = rotate(images, degrees, legacy_center=legacy)
    assert turned.dtype == torch.uint8
    assert turned.shape == images.shape
    center = (width / 2, height / 2) if legacy else ((width - 1) / 2, (height - 1) / 2)
    for image, result in zip(images.flatten(0, 1), turned.flatten(0, 1), strict=True):
        expected = by_definition(image, degrees, center)
        assert (result.double() - expected).abs().max() <= 0.5 + 1e-2  # rounding, and float32 coordinates


def test_images_are_turned_one_by_one():
    images = random_images(5, 1, 28, 28)
    assert torch.equal(rotate(images, -50), torch.cat([rotate(image[None], -50) for image in images]))


@pytest.mark.cuda
def test_gpu_agrees_to_one_gray_level():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    images = random_images(20, 3, 28, 28)
    difference = rotate(images.cuda(), 120).cpu().int() - rotate(images, 120).int()
    assert difference.abs().max() <= 1


@pytest.mark.parametrize("shape", [(4, 1, 6, 9), (3, 20, 20)], ids=["batch", "one"])
def test_resize_gives_a_square_of_bytes(shape):
    images = torch.full(shape, 77, dtype=torch.uint8)
    assert torch.equal(resize(images, 5), torch.full((*shape[:-2], 5, 5), 77, dtype=torch.uint8))


@pytest.mark.parametrize("size", [(28, 28), (7, 9)])
def test_each_image_by_its_own_angle(size):
    images = torch.randint(1, 256, (6, 3, *size), dtype=torch.uint8)
    degrees = torch.tensor([0.0, 11.3, -17.9, 5.5, 19.99, -0.4])
    turned = rotate_each(images, degrees)
    for image, angle, result in zip(images, degrees.tolist(), turned, strict=True):
        expected = functional.rotate(image, angle, InterpolationMode.NEAREST)
        assert (result != expected).float().mean() < 0.02  # some sources are half way between two pixels
    square = torch.randint(0, 256, (1, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(rotate_each(square, torch.tensor([90.0])), square.rot90(1, (2, 3)))


def test_augmentation_is_per_image_and_repeats_with_its_seed():
    images = torch.randint(0, 256, (64, 1, 10, 10), dtype=torch.uint8)
    assert augment(images, "none") is images
    torch.manual_seed(0)
    flipped = augment(images, "flip")
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert 20 < int(mirrored.sum()) < 44
    assert torch.equal(flipped[~mirrored], images[~mirrored])
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(augment(images, "rotate"))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("channels", [1, 3])
def test_photos_are_changed_one_by_one(channels):
    """Compare with torchvision, image by image, from the same seed."""
    one = torch.randint(0, 256, (1, channels, 12, 16), dtype=torch.uint8)
    images = one.expand(40, -1, -1, -1)
    torch.manual_seed(0)
    changed = augment(images, "photo")
    assert (changed.shape, changed.dtype) == (images.shape, torch.uint8)
    assert len(changed.unique(dim=0)) == 40
    change = v2.Compose(
        [
            v2.RandomResizedCrop((12, 16), (0.7, 1.0)),
            v2.RandomHorizontalFlip(0.5),
            v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.3),
            v2.RandomGrayscale(0.1),
        ]
    )
    torch.manual_seed(0)
    assert torch.equal(changed, torch.stack([change(image) for image in images]))
    gray = (changed == changed[:, :1]).flatten(1).all(1).float().mean()
    assert gray == 1 if channels == 1 else 0 < gray < 0.5
