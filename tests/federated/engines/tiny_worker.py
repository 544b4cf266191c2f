"""A worker with the clients of the tests.

By the run's seed, silo-1 raises, is late, or kills its process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from tests.federated.engines.conformance import DIES, LATE, RAISES, federation
from uefl.deploy.workers import work


class Tiny:
    name = None

    def federation(self, cfg):
        return replace(federation(cfg), manifest={"silos": {}, "unseen": {}})

    def data(self, client, cfg, classes, channels):
        if client == "silo-1" and cfg.run.seed == RAISES:
            raise RuntimeError("patient 7")
        if client == "silo-1" and cfg.run.seed == LATE:
            time.sleep(2)
        if client == "silo-1" and cfg.run.seed == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        found = federation(cfg)
        return next(each for each in (*found.clients, *found.unseen) if each.name == client).load()


if __name__ == "__main__":
    end, rank, device = sys.argv[1:]
    work(int(end), int(rank), device, Tiny())
