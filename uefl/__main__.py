"""``python -m uefl``."""

from uefl_kernels.__main__ import main

if __name__ == "__main__":
    main()
