"""What a run has shown: its folder read back, as tables, pictures and ``report.md``; TensorBoard events while it goes on."""

from .events import EventWriter, open_event_writer
from .folder import Run, read_run, summarize
from .markdown import write_report
from .tables import Table, arm_table, client_table, differing_keys, protocol_table, repeated, spread_table, tables

__all__ = [
    "EventWriter",
    "Run",
    "Table",
    "arm_table",
    "client_table",
    "differing_keys",
    "open_event_writer",
    "protocol_table",
    "read_run",
    "repeated",
    "spread_table",
    "summarize",
    "tables",
    "write_report",
]
