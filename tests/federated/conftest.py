"""What several files of tests share."""

import pytest

from .whole_run import Watcher, start


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run: its folder, who watched it, and its summary."""
    out, observer = tmp_path_factory.mktemp("runs") / "whole", Watcher()
    summary = start(out, observer=observer)
    return out, observer, summary
