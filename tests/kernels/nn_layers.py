"""Small VectorQuantize layers of every kind."""

from __future__ import annotations

import torch

from uefl_kernels.nn import VectorQuantize

KINDS = {
    "shared": {},
    "heads": {"heads": 4, "codebook_dim": 2},
    "per head": {"heads": 4, "codebook_dim": 2, "separate_codebook_per_head": True},
    "projected": {"heads": 2, "codebook_dim": 3},
    "cosine": {"use_cosine_sim": True},
    "learnable": {"learnable_codebook": True},
}


def layer(seed=0, **options):
    torch.manual_seed(seed)
    return VectorQuantize(**({"dim": 8, "codebook_size": 10} | options))


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}
