"""End all processes that a module of these tests has started, and their descendants."""

import os
from pathlib import Path

import pytest

from tests.federated.deploy.chaos.cluster import until
from tests.federated.deploy.runs import content


@pytest.fixture(scope="module", autouse=True)
def nothing_survives(request):
    """Check that no process survives a test.

    Every process inherits a mark, and keeps it when its parent has ended.
    """
    mark = f"{request.node.nodeid}-{os.getpid()}"
    os.environ["UEFL_TEST"] = mark
    yield
    del os.environ["UEFL_TEST"]
    until("processes to end", lambda: not _marked(mark), 30)


def _marked(mark: str) -> list[Path]:
    return [
        path
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"UEFL_TEST={mark}\0".encode() in content(path)
    ]
