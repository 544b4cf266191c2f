"""Networks."""

import uefl_kernels._library  # noqa: F401  # settles torch's vector mathematics (uefl_kernels/_vector_math.py)
