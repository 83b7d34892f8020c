"""Sweeps: what they are, how they run, and what is known about their runs.

Start with `declaration` (`Sweep`), then `engine.runner` (one run, top to bottom) and `engine.executor` (its batches).
`stages` has the statements, `ledger` the tables, `limits` breaker and throttle, `insight` plan, status and alerts,
`checks` the validation of declarations. The names below are public: your own sweeps and the built-in ones use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from housekeeping.core.clock import SYSTEM_CLOCK, Clock
from housekeeping.core.errors import (
    DeclarationError,
    HousekeepingError,
    ObjectNotDeleted,
    ObjectStoreUnavailable,
    RecordChanged,
    RedisUnavailable,
    SettingsError,
    UploadBeingDeleted,
    UploadRefused,
)
from housekeeping.core.redis.client import retry_redis, run_replicated, shared_redis, translate_redis_errors
from housekeeping.core.sanitize import error_line, mask_secrets, shortened
from housekeeping.core.settings import PREFIX, ObjectStoreSettings, Settings
from housekeeping.core.telemetry.logs import log_rows, logger
from housekeeping.core.wording import how_to_install
from housekeeping.database.compiled_query import Parameter
from housekeeping.database.connection import BaseModel, database
from housekeeping.database.primary_key import identify, key_of
from housekeeping.database.state_machines import StateMachine
from housekeeping.database.times import NaiveUtcDateTimeField, StatementTime, UtcDateTimeField, statement_time
from housekeeping.sweeps.actor_registry import actor_named
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.lease_config import LeaseConfig
from housekeeping.sweeps.ledger.outbox import store as store_in_outbox
from housekeeping.sweeps.ledger.run_queries import at_work, deferred
from housekeeping.sweeps.ledger.runs import HEARTBEAT
from housekeeping.sweeps.limits.declared import AlertThresholds, Breaker, ThrottleLimits
from housekeeping.sweeps.partitions.action import DropPartitions
from housekeeping.sweeps.registry import Finding
from housekeeping.sweeps.stages.actions import Action, Delete, Transition, Write
from housekeeping.sweeps.stages.call import Call, CallStage
from housekeeping.sweeps.stages.row_log import RowLog
from housekeeping.sweeps.stages.stage import (
    Announcement,
    Backlog,
    Batch,
    BatchResult,
    Divisible,
    ExplainQuery,
    Failure,
    Position,
    Preflight,
    PreflightResult,
    Stage,
    StagePlan,
)
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.sweeps.table_models import model_of

if TYPE_CHECKING:
    from housekeeping.sweeps.engine.runner import run_sweep
else:

    def __getattr__(name: str) -> Any:
        # The runner imports the servers' clients, which declarations do without.
        if name != "run_sweep":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from housekeeping.sweeps.engine.runner import run_sweep

        return run_sweep


__all__ = [
    "HEARTBEAT",
    "PREFIX",
    "SYSTEM_CLOCK",
    "Action",
    "AlertThresholds",
    "Announcement",
    "Backlog",
    "BaseModel",
    "Breaker",
    "Call",
    "CallStage",
    "Clock",
    "DeclarationError",
    "Delete",
    "Divisible",
    "DropPartitions",
    "Failure",
    "Finding",
    "ThrottleLimits",
    "HousekeepingError",
    "LeaseConfig",
    "NaiveUtcDateTimeField",
    "ObjectNotDeleted",
    "ObjectStoreSettings",
    "ObjectStoreUnavailable",
    "Stage",
    "StagePlan",
    "Parameter",
    "Position",
    "Preflight",
    "PreflightResult",
    "ExplainQuery",
    "RecordChanged",
    "RowLog",
    "RedisUnavailable",
    "RunResult",
    "Settings",
    "SettingsError",
    "BatchResult",
    "StateMachine",
    "StatementTime",
    "Batch",
    "Sweep",
    "TableStage",
    "Transition",
    "UploadBeingDeleted",
    "UploadRefused",
    "UtcDateTimeField",
    "Write",
    "actor_named",
    "at_work",
    "database",
    "deferred",
    "how_to_install",
    "identify",
    "retry_redis",
    "run_replicated",
    "key_of",
    "log_rows",
    "logger",
    "mask_secrets",
    "model_of",
    "error_line",
    "run_sweep",
    "translate_redis_errors",
    "shared_redis",
    "shortened",
    "statement_time",
    "store_in_outbox",
]
