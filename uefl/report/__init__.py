"""What a run has shown: its folder read back, as tables, pictures and ``report.md``."""

from .folder import Run, read_run, summarize
from .markdown import write_report
from .tables import Table, arm_table, client_table, spread_table

__all__ = ["Run", "Table", "arm_table", "client_table", "read_run", "spread_table", "summarize", "write_report"]
