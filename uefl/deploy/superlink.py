"""A SuperLink that ends with the process that started it: ``python -m uefl.deploy.superlink PARENT
OPTIONS...``."""

import sys

from ..engines import flower  # noqa: F401 its import keeps Flower quiet

if __name__ == "__main__":
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.superlink.cli import flower_superlink

    start_parent_process_monitor(int(sys.argv.pop(1)))
    flower_superlink()
