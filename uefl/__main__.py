"""``python -m uefl``."""

from .cli import main

if __name__ == "__main__":
    main()
