"""Neural collapse is zero at an exact simplex equiangular tight frame.

Each metric reacts to its quantity.
"""

import math

import pytest
import torch

from uefl.collapse import ClassSums, Collapse, class_sums, geometry, neural_collapse, spread


def frame(classes, dimensions=16):
    """Return vertices ``[C, D]`` of a simplex equiangular tight frame of unit vectors, turned at random."""
    generator = torch.Generator().manual_seed(classes)
    turn, _ = torch.linalg.qr(torch.randn(dimensions, classes, generator=generator, dtype=torch.float64))
    return (
        math.sqrt(classes / (classes - 1)) * (torch.eye(classes, dtype=torch.float64) - 1 / classes) @ turn.T
    )


def around(vertices, noise=0.0, per_class=50):
    labels = torch.arange(len(vertices)).repeat(per_class)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(labels), vertices.shape[1], generator=generator, dtype=torch.float64)
    return vertices[labels] + noise * drawn, labels


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_all_are_zero_at_an_exact_frame(classes):
    vertices = frame(classes)
    assert neural_collapse(*around(vertices), vertices) == pytest.approx(
        Collapse(0, 0, 0, 0, 0, 0), abs=1e-12
    )


def test_they_are_zero_for_any_rotation_and_scale_of_the_frame():
    vertices = frame(4)
    features, labels = around(7 * vertices + 3)
    bias = -3 * vertices.sum(1)
    assert neural_collapse(features, labels, 0.5 * vertices, 0.5 * bias) == pytest.approx(
        Collapse(0, 0, 0, 0, 0, 0), abs=1e-12
    )


def test_the_cosines_of_a_frame_of_four_are_minus_a_third():
    vertices = frame(4)
    cosines = vertices @ vertices.T
    assert torch.allclose(
        cosines, torch.where(torch.eye(4, dtype=torch.bool), 1.0, -1 / 3).double(), atol=1e-12
    )


def test_noise_within_classes_raises_nc1_by_its_square():
    small, large = (neural_collapse(*around(frame(4), noise), frame(4)).nc1 for noise in (0.01, 0.02))
    assert small > 0
    assert large / small == pytest.approx(4, rel=0.01)


def test_nc1_is_the_trace_of_its_definition():
    features, labels = around(frame(5), 0.3)
    means = torch.stack([features[labels == k].mean(0) for k in range(5)])
    away = features - means[labels]
    centered = means - means.mean(0)
    within, between = away.T @ away / len(away), centered.T @ centered / 5
    expected = torch.trace(within @ torch.linalg.pinv(between, rtol=1e-9)) / 5
    assert neural_collapse(features, labels, frame(5)).nc1 == pytest.approx(float(expected))


def test_lengths_angles_and_the_last_layer():
    vertices = frame(3)
    longer = neural_collapse(*around(vertices), torch.tensor([[1.0], [2.0], [3.0]]) * vertices)
    assert longer.nc2a == pytest.approx(0, abs=1e-12)
    assert longer.nc2a_weights == pytest.approx(math.sqrt(2 / 3) / 2)
    line = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    flat = neural_collapse(*around(line[[0, 2]]), line[[2, 0]])
    # the last layer is reversed, so no two clients agree
    assert (flat.nc3, flat.nc4) == (pytest.approx(4), 1)
    square = neural_collapse(*around(line[[0, 2, 3, 4]]), line[[0, 2, 3, 4]])
    assert square.nc2b == pytest.approx((4 * abs(-1 + 1 / 3) + 8 / 3) / 12)
    assert square.nc2a == pytest.approx(1 / 3)


def test_classes_without_images_are_ignored():
    vertices = frame(3)
    features, labels = around(vertices)
    wide = torch.zeros(6, 16, dtype=torch.float64)
    wide[[1, 2, 5]] = vertices
    assert neural_collapse(features, torch.tensor([1, 2, 5])[labels], wide) == pytest.approx(
        Collapse(0, 0, 0, 0, 0, 0), abs=1e-12
    )
    with pytest.raises(ValueError, match=r"\b1$"):
        neural_collapse(features[:1], labels[:1], vertices)


def test_parts_add_up():
    features, labels = around(frame(4), 0.5)
    weight, bias = torch.randn(4, 16), torch.randn(4)
    pieces = [(features[i::3], labels[i::3]) for i in range(3)]
    sums = [class_sums(*piece, 4) for piece in pieces]
    total = ClassSums(sum(s.sums for s in sums), sum(s.counts for s in sums))
    within, disagree = (sum(spread(total, *piece, weight, bias) for piece in pieces) / len(features)).tolist()
    expected = neural_collapse(features, labels, weight, bias)
    assert Collapse(within, *geometry(total, weight).tolist(), disagree) == pytest.approx(expected)
