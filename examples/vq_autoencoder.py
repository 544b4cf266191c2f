"""Train a VQ autoencoder on the 5,000 digits that come with the package.

It turns 28 x 28 pixels into 7 x 7 indices of 128 codewords.

python examples/vq_autoencoder.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from uefl.data import SOURCES
from uefl_kernels.nn import VectorQuantize

EPOCHS, BATCH, WIDTH = 4, 100, 32


class Autoencoder(nn.Module):
    """[B, 1, 28, 28] -> the same, through a 7 x 7 map of codewords."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 16, 1),
        )
        # k-means on the first batch and revival of dead codewords keep all 128 in use.
        self.vq = VectorQuantize(
            dim=16,
            codebook_size=128,
            accept_image_fmap=True,
            kmeans_init=True,
            threshold_ema_dead_code=1,
            commitment_weight=0.25,
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(16, WIDTH, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1),
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the reconstruction, the indices [B, 7, 7] and the commitment loss."""
        quantized, indices, commitment = self.vq(self.encoder(images))
        return self.decoder(quantized), indices, commitment


def main() -> dict[str, float]:
    """Train, and return the errors on the test digits."""
    torch.manual_seed(0)
    digits = SOURCES["digits"](None)
    images = digits.images.read(digits.train, 0).float() / 255
    train, test = images[:4000], images[4000:]
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    result = {}
    for epoch in range(EPOCHS):
        model.train()
        for batch in torch.randperm(len(train)).split(BATCH):
            optimizer.zero_grad()
            output, _, commitment = model(train[batch])
            (F.mse_loss(output, train[batch]) + commitment).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            output, indices, _ = model(test)
            # the indices are all that a decoder needs
            decoded = model.decoder(model.vq.get_output_from_indices(indices))
        assert torch.equal(decoded, output)
        result = {
            "error": F.mse_loss(output, test).item(),
            "mean image's error": F.mse_loss(train.mean(0).expand_as(test), test).item(),
            "perplexity": model.vq.perplexity.item(),
            "codewords in use": model.vq.usage.item(),
        }
        print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in result.items()))
    print(f"the indices of an image of 784 bytes take {49 * 7 / 8:.0f} bytes")
    return result


if __name__ == "__main__":
    main()
