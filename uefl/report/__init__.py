"""Read run folders, and write their tables, pictures, pages and TensorBoard events."""

from .compare import by_data, check_arm, compare, differing_keys, paired_table, repeated, spread_table
from .events import EventWriter, open_event_writer
from .run_folder import outcomes, own_columns, parted, read_run, summarize
from .samples import write as write_samples
from .samples import write_uncertain
from .tables import arm_table, client_tables, protocol_table, rejected_table, tables
from .write import folder_of_comparison, write_comparison, write_report

__all__ = [
    "EventWriter",
    "arm_table",
    "by_data",
    "check_arm",
    "compare",
    "folder_of_comparison",
    "write_comparison",
    "write_uncertain",
    "client_tables",
    "differing_keys",
    "rejected_table",
    "open_event_writer",
    "outcomes",
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
