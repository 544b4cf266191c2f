"""Flower as the transport: messages over its Grid to clients in other processes, on this machine or on
others.

Needs the extra ``flower``. Flower may contact no address other than the given ones: no
telemetry, no check for updates, no installing of packages. No program that Flower ships to a node is ever
run: :mod:`.node` answers messages and nothing else.
"""

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""environment of every process with Flower in it"""

os.environ.update(QUIET)  # read when flwr is imported, which happens in the modules below this one
