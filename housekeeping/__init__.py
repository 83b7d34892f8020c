"""Keeps a PostgreSQL application clean: five workers on Dramatiq, the middleware under them, the means to see it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from housekeeping import testing as testing
    from housekeeping import web as web
    from housekeeping.app import install as install
    from housekeeping.app import use as use
    from housekeeping.core import events as events
    from housekeeping.core.clock import SYSTEM_CLOCK as SYSTEM_CLOCK
    from housekeeping.core.clock import Clock as Clock
    from housekeeping.core.clock import ClockSkew as ClockSkew
    from housekeeping.core.errors import DeclarationError as DeclarationError
    from housekeeping.core.errors import HousekeepingError as HousekeepingError
    from housekeeping.core.errors import LeaseHeld as LeaseHeld
    from housekeeping.core.errors import LeaseLost as LeaseLost
    from housekeeping.core.errors import ObjectNotDeleted as ObjectNotDeleted
    from housekeeping.core.errors import ObjectStoreUnavailable as ObjectStoreUnavailable
    from housekeeping.core.errors import RecordChanged as RecordChanged
    from housekeeping.core.errors import RedisUnavailable as RedisUnavailable
    from housekeeping.core.errors import RowNotChanged as RowNotChanged
    from housekeeping.core.errors import SettingsError as SettingsError
    from housekeeping.core.errors import Unconfirmed as Unconfirmed
    from housekeeping.core.errors import UploadBeingDeleted as UploadBeingDeleted
    from housekeeping.core.errors import UploadRefused as UploadRefused
    from housekeeping.core.events import Event as Event
    from housekeeping.core.logs import error_line as error_line
    from housekeeping.core.logs import how_to_install as how_to_install
    from housekeeping.core.logs import log_rows as log_rows
    from housekeeping.core.logs import logger as logger
    from housekeeping.core.logs import mask_secrets as mask_secrets
    from housekeeping.core.logs import shortened as shortened
    from housekeeping.core.redis import read_redis_clock as read_redis_clock
    from housekeeping.core.redis import read_scripts as read_scripts
    from housekeeping.core.redis import retry_on_outage as retry_on_outage
    from housekeeping.core.redis import run_replicated as run_replicated
    from housekeeping.core.redis import shared_redis as shared_redis
    from housekeeping.core.redis import throttle as throttle
    from housekeeping.core.redis import translate_redis_errors as translate_redis_errors
    from housekeeping.core.settings import PREFIX as PREFIX
    from housekeeping.core.settings import ObjectStoreSettings as ObjectStoreSettings
    from housekeeping.core.settings import Settings as Settings
    from housekeeping.core.threads import in_thread as in_thread
    from housekeeping.database.catalog import PartitionedModel as PartitionedModel
    from housekeeping.database.catalog import identify as identify
    from housekeeping.database.catalog import key_of as key_of
    from housekeeping.database.connection import BaseModel as BaseModel
    from housekeeping.database.connection import DatabaseHandle
    from housekeeping.database.queries import NaiveUtcDateTimeField as NaiveUtcDateTimeField
    from housekeeping.database.queries import Parameter as Parameter
    from housekeeping.database.queries import StatementTime as StatementTime
    from housekeeping.database.queries import UtcDateTimeField as UtcDateTimeField
    from housekeeping.database.queries import statement_time as statement_time
    from housekeeping.database.queries import update_rows as update_rows
    from housekeeping.database.state_machines import StateMachine as StateMachine
    from housekeeping.engine import RunResult as RunResult
    from housekeeping.engine.run import run_sweep as run_sweep
    from housekeeping.erasures import erase as erase
    from housekeeping.leases.lease import ExclusiveLease as ExclusiveLease
    from housekeeping.leases.lease import fence as fence
    from housekeeping.ledger.outbox import store_in_outbox as store_in_outbox
    from housekeeping.ledger.runs import HEARTBEAT as HEARTBEAT
    from housekeeping.ledger.runs import at_work as at_work
    from housekeeping.ledger.runs import deferred as deferred
    from housekeeping.middleware.consistency import read_database as read_database
    from housekeeping.middleware.delivery import complete_in as complete_in
    from housekeeping.middleware.enqueue import enqueue_many as enqueue_many
    from housekeeping.sweeps.actions import Delete as Delete
    from housekeeping.sweeps.actions import Transition as Transition
    from housekeeping.sweeps.conditions import Column as Column
    from housekeeping.sweeps.conditions import Condition as Condition
    from housekeeping.sweeps.conditions import Row as Row
    from housekeeping.sweeps.declaration import Sweep as Sweep
    from housekeeping.sweeps.partitions import DropPartitions as DropPartitions
    from housekeeping.sweeps.rows import Call as Call
    from housekeeping.sweeps.rows import CallStage as CallStage
    from housekeeping.sweeps.rows import Rows as Rows
    from housekeeping.sweeps.send import Send as Send
    from housekeeping.sweeps.send import actor_named as actor_named
    from housekeeping.sweeps.stage import Announcement as Announcement
    from housekeeping.sweeps.stage import Backlog as Backlog
    from housekeeping.sweeps.stage import Batch as Batch
    from housekeeping.sweeps.stage import BatchResult as BatchResult
    from housekeeping.sweeps.stage import Divisible as Divisible
    from housekeeping.sweeps.stage import ExplainQuery as ExplainQuery
    from housekeeping.sweeps.stage import Failure as Failure
    from housekeeping.sweeps.stage import OtherClock as OtherClock
    from housekeeping.sweeps.stage import Position as Position
    from housekeeping.sweeps.stage import RowLog as RowLog
    from housekeeping.sweeps.stage import Stage as Stage
    from housekeeping.sweeps.stage import StagePlan as StagePlan
    from housekeeping.sweeps.subjects import Anonymise as Anonymise
    from housekeeping.sweeps.subjects import Keep as Keep
    from housekeeping.sweeps.subjects import Objects as Objects
    from housekeeping.sweeps.subjects import Subject as Subject
    from housekeeping.sweeps.table_stage import Action as Action
    from housekeeping.sweeps.table_stage import TableStage as TableStage
    from housekeeping.sweeps.table_stage import Write as Write
    from housekeeping.sweeps.tables import model_of as model_of
    from housekeeping.sweeps.values import Alerts as Alerts
    from housekeeping.sweeps.values import Argument as Argument
    from housekeeping.sweeps.values import Finding as Finding
    from housekeeping.sweeps.values import Guard as Guard
    from housekeeping.sweeps.values import Kept as Kept
    from housekeeping.sweeps.values import Lease as Lease
    from housekeeping.sweeps.values import Limits as Limits
    from housekeeping.sweeps.values import Reference as Reference
    from housekeeping.sweeps.values import Throttle as Throttle

    current_database: DatabaseHandle

__version__ = "0.1.0"

#: Modules and their public names; looked up when first used, so that importing the package costs and changes nothing.
_HOMES: Final = {
    "housekeeping.app": "install use",
    "housekeeping.core.clock": "Clock ClockSkew SYSTEM_CLOCK",
    "housekeeping.core.errors": (
        "DeclarationError HousekeepingError LeaseHeld LeaseLost ObjectNotDeleted ObjectStoreUnavailable RecordChanged "
        "RedisUnavailable RowNotChanged SettingsError Unconfirmed UploadBeingDeleted UploadRefused"
    ),
    "housekeeping.core.events": "Event",
    "housekeeping.core.logs": "error_line how_to_install log_rows logger mask_secrets shortened",
    "housekeeping.core.redis": (
        "read_redis_clock read_scripts retry_on_outage run_replicated shared_redis throttle translate_redis_errors"
    ),
    "housekeeping.core.settings": "ObjectStoreSettings PREFIX Settings",
    "housekeeping.core.threads": "in_thread",
    "housekeeping.database.catalog": "PartitionedModel identify key_of",
    "housekeeping.database.connection": "BaseModel current_database",
    "housekeeping.database.queries": (
        "NaiveUtcDateTimeField Parameter StatementTime UtcDateTimeField statement_time update_rows"
    ),
    "housekeeping.middleware.consistency": "read_database",
    "housekeeping.database.state_machines": "StateMachine",
    "housekeeping.engine": "RunResult",
    "housekeeping.engine.run": "run_sweep",
    "housekeeping.erasures": "erase",
    "housekeeping.leases.lease": "ExclusiveLease fence",
    "housekeeping.ledger.outbox": "store_in_outbox",
    "housekeeping.ledger.runs": "HEARTBEAT at_work deferred",
    "housekeeping.middleware.delivery": "complete_in",
    "housekeeping.middleware.enqueue": "enqueue_many",
    "housekeeping.sweeps.actions": "Delete Transition",
    "housekeeping.sweeps.declaration": "Sweep",
    "housekeeping.sweeps.partitions": "DropPartitions",
    "housekeeping.sweeps.conditions": "Column Condition Row",
    "housekeeping.sweeps.rows": "Call CallStage Rows",
    "housekeeping.sweeps.send": "Send actor_named",
    "housekeeping.sweeps.stage": (
        "Announcement Backlog Batch BatchResult Divisible ExplainQuery Failure OtherClock Position RowLog "
        "Stage StagePlan"
    ),
    "housekeeping.sweeps.subjects": "Anonymise Keep Objects Subject",
    "housekeeping.sweeps.table_stage": "Action TableStage Write",
    "housekeeping.sweeps.tables": "model_of",
    "housekeeping.sweeps.values": "Alerts Argument Finding Guard Kept Lease Limits Reference Throttle",
}
_PUBLIC: Final = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES: Final = {"events": "housekeeping.core.events", "testing": "housekeeping.testing", "web": "housekeeping.web"}
__all__ = ["__version__", *_PUBLIC, *_MODULES]


if not TYPE_CHECKING:  # else a misspelt name would be anything to a type checker

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name in _PUBLIC:
            # The package has a module of this name.
            attribute = "database" if name == "current_database" else name
            return getattr(importlib.import_module(_PUBLIC[name]), attribute)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
