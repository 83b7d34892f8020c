"""Parts of `housekeeping.cli` that tests use."""

from __future__ import annotations

from housekeeping.cli import install as doctor
from housekeeping.cli.main import LazyCommand, main
from housekeeping.cli.operate import narrow
from housekeeping.cli.output import out, print_table, say, table
from housekeeping.cli.run import in_foreground, print_plan
from housekeeping.cli.sample_rows import add_sample_rows
from housekeeping.cli.status import workers_table
from housekeeping.cli.undo import purge
