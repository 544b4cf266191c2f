import pytest
import torch

from uefl.algorithms.uefl.clustering import kmeans
from uefl.errors import RunError


def test_separated_clusters_are_found_with_their_sizes():
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    rows = torch.cat(
        [c + 0.1 * torch.randn(n, 2, generator=generator) for c, n in zip(means, (20, 30, 50), strict=True)]
    )
    centers, mass = kmeans(rows, 3, seed=0)
    order = torch.cdist(means, centers).argmin(1)
    torch.testing.assert_close(centers[order], means, atol=0.1, rtol=0)
    assert mass[order].tolist() == [20, 30, 50]


def test_weights_move_the_centers():
    centers, mass = kmeans(torch.tensor([[0.0], [1.0]]), 1, seed=0, weights=torch.tensor([3.0, 1.0]))
    assert centers.item() == pytest.approx(0.25)
    assert mass.tolist() == [4.0]


def test_same_seed_same_bits():
    rows = torch.randn(500, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(kmeans(rows, 8, seed=5)[0], kmeans(rows, 8, seed=5)[0])


def test_every_problem_has_its_own_seed():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    centers, mass = kmeans(torch.stack([x, x]), 7, 5)
    for i in range(2):
        expected = kmeans(x, 7, 5 + i)
        assert torch.equal(centers[i], expected[0])
        assert torch.equal(mass[i], expected[1])
    assert not torch.equal(*centers)


def test_too_few_rows():
    with pytest.raises(RunError, match=r"\b8 feature .*\b8 codewords.*\b5\b"):
        kmeans(torch.randn(5, 2), 8, seed=0)


def test_diverged_features():
    with pytest.raises(RunError, match=r"\blr$"):
        kmeans(torch.full((9, 2), float("nan")), 3, seed=0)
