"""The report of a run: its folder is read, and shown as tables, pictures and pages; TensorBoard events are
written while it runs."""

from .compare import by_data, differing_keys, paired_table, repeated, spread_table
from .events import EventWriter, open_event_writer
from .folder import Run, own_columns, parted, read_run, summarize
from .samples import write as write_samples
from .tables import Table, arm_table, client_table, left_out_table, protocol_table, tables
from .words import count, means
from .write import write_report

__all__ = [
    "EventWriter",
    "Run",
    "Table",
    "arm_table",
    "by_data",
    "client_table",
    "count",
    "differing_keys",
    "left_out_table",
    "means",
    "open_event_writer",
    "own_columns",
    "paired_table",
    "parted",
    "protocol_table",
    "read_run",
    "repeated",
    "spread_table",
    "summarize",
    "tables",
    "write_report",
    "write_samples",
]
