"""Move from vector-quantize-pytorch to these layers.

The import is the one line that changes, and checkpoints load.

    python examples/swap_from_vector_quantize_pytorch.py

If vector-quantize-pytorch is installed, the script loads the state of one of its layers into our layer, and
compares their results. Otherwise the script runs only our layer.
"""

from __future__ import annotations

import torch

# from vector_quantize_pytorch import VectorQuantize
from uefl_kernels.nn import VectorQuantize

OPTIONS = {
    "dim": 64,
    "codebook_size": 256,
    "heads": 2,
    "codebook_dim": 32,
    "decay": 0.9,
    "threshold_ema_dead_code": 1,
}


def main() -> float | None:
    """Load the state of a layer of vector-quantize-pytorch into our layer.

    Return the largest difference of the outputs, or None if that package is not installed.
    """
    torch.manual_seed(0)
    vq = VectorQuantize(**OPTIONS)
    x = torch.randn(8, 512, 64)
    quantized, indices, loss = vq(x)
    print(
        f"quantized {list(quantized.shape)}, indices {list(indices.shape)}, loss {loss.item():.4f},"
        f" perplexity {vq.perplexity.item():.1f}"
    )
    try:
        import vector_quantize_pytorch as peer
    except ImportError:
        print("vector-quantize-pytorch is not installed: nothing to compare with")
        return None
    theirs = peer.VectorQuantize(**OPTIONS)
    for _ in range(3):
        theirs(x)
    vq.load_state_dict(theirs.state_dict())
    vq.eval(), theirs.eval()
    for got, want in zip(vq(x)[1:], theirs(x)[1:], strict=True):
        assert torch.equal(got, want)
    difference = (vq(x)[0] - theirs(x)[0]).abs().max().item()
    print(f"its checkpoint loads; the largest difference of the outputs is {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
