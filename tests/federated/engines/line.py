"""A process that runs a line of Python: ``python -m tests.federated.engines.line LINE``."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
