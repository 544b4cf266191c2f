"""Run the peers' own tests and write the tables of docs/peers.md.

    python -m tests.peers.peer_tables PATH

PATH is a checkout or a .tar.gz of vector-quantize-pytorch. A table stands between ``<!-- table: NAME -->``
and ``<!-- end -->``. Where vector-quantize-pytorch is not installed, its column stays as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.peers import sklearn_suite, vq_suite

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"


def replaced(page: str, name: str, table: str) -> str:
    """Return the page with another table of that name, or raise ValueError if the page has none."""
    pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
    found, count = re.subn(pattern, lambda match: f"{match[1]}{table}\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} tables named {name!r}, expected 1")
    return found


def main() -> int:
    """Write the tables into the page.

    Returns 1 if a test fails with ours only, and not because it reads a private attribute of the peer.
    """
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    text, failed = vq_suite.both_tables(Path(sys.argv[1]), PAGE.read_text())
    page = replaced(PAGE.read_text(), "vector-quantize-pytorch", text)
    ours, theirs = sklearn_suite.outcomes(True), sklearn_suite.outcomes(False)
    PAGE.write_text(replaced(page, "scikit-learn", vq_suite.table(ours, theirs)))
    failed += [name for name in vq_suite.worse(ours, theirs) if sklearn_suite.PRIVATE not in ours[name]]
    for name in failed:
        print(f"fails with ours only: {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
