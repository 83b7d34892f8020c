"""Parts of `housekeeping.sweeps` that tests use."""

from __future__ import annotations

from housekeeping.engine import failures as bad_rows
from housekeeping.sweeps import actions, partition_catalog, tree
from housekeeping.sweeps.actions import moved
from housekeeping.sweeps.cascade import CascadeStage
from housekeeping.sweeps.cascade_statements import Statements
from housekeeping.sweeps.conditions import as_condition, check_expression
from housekeeping.sweeps.dependents import Graph, Link, read_graph
from housekeeping.sweeps.keyset import held_condition, hold_of_another_table, is_not_held
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import CallStage, takes_time
from housekeeping.sweeps.stage import Backlog, Batch, BatchResult, Failure, RowLog, Stage, StagePlan
from housekeeping.sweeps.table_stage import Action, TableStage, Write
from housekeeping.sweeps.tables import (
    EnumField,
    SqlField,
    TableColumn,
    TableDescription,
    build_model,
    field_of,
    keyset_order,
    model_of,
)
from housekeeping.sweeps.validate_tables import problems_of, stages_of
from housekeeping.sweeps.values import Setup, SetupProblem
