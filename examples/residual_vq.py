"""Quantize image patches in several stages.

Each further index lowers the error. A decoder can use any number of the first indices.

python examples/residual_vq.py
"""

from __future__ import annotations

import torch

from uefl.data import SOURCES
from uefl_kernels.nn import ResidualVQ


def main() -> list[float]:
    """Learn codewords by moving averages, and return the test error after each quantizer."""
    torch.manual_seed(0)
    digits = SOURCES["digits"](None)
    images = digits.images.read(digits.train, 0).float() / 255
    patches = images.unfold(2, 7, 7).unfold(3, 7, 7).reshape(len(images), 16, 49)  # [images, patches, pixels]
    train, test = patches[:4000], patches[4000:]
    rvq = ResidualVQ(
        dim=49, num_quantizers=6, codebook_size=64, decay=0.9, kmeans_init=True, threshold_ema_dead_code=1
    )
    for _ in range(2):
        for batch in torch.randperm(len(train)).split(250):
            rvq(train[batch])
    rvq.eval()
    _, indices, _ = rvq(test)
    errors = []
    for depth in range(1, rvq.num_quantizers + 1):
        output = rvq.get_output_from_indices(indices[..., :depth])
        errors.append((output - test).square().mean().item())
        perplexity = rvq.layers[depth - 1].perplexity.item()
        print(
            f"{depth} indices, {6 * depth} bits per patch: mean squared error {errors[-1]:.5f}, perplexity of"
            f" the last quantizer {perplexity:.1f}"
        )
    return errors


if __name__ == "__main__":
    main()
