"""Floor 1: the engine. One declaration in, one recorded run out; knows no worker by name.

What a sweep of one's own is written with is here by name, and all of it the five built-in families are written with,
too. The most used are in `housekeeping` as well.
"""

from __future__ import annotations

from housekeeping.foundation.clock import SYSTEM_CLOCK, Clock
from housekeeping.foundation.db import BaseModel, UtcDateTimeField, database, one_line
from housekeeping.foundation.errors import (
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
from housekeeping.foundation.extras import how_to_install
from housekeeping.foundation.identity import identify, key_of
from housekeeping.foundation.logs import logger
from housekeeping.foundation.naive_time import NaiveUtcDateTimeField
from housekeeping.foundation.prepared import Place
from housekeeping.foundation.printable import shortened
from housekeeping.foundation.redis_client import insist, reaching_redis, shared_redis
from housekeeping.foundation.secrets import masked
from housekeeping.foundation.settings import PREFIX, ObjectStoreSettings, Settings
from housekeeping.foundation.state_machines import StateMachine
from housekeeping.foundation.statement_time import StatementTime, statement_time
from housekeeping.sweeps.actions import Action, Delete, Transition, Write
from housekeeping.sweeps.actors import actor_named
from housekeeping.sweeps.breaker import Breaker
from housekeeping.sweeps.call import Call, CallPass
from housekeeping.sweeps.declaration import Alarms, LeaseTerms, Sweep
from housekeeping.sweeps.deferral import deferred
from housekeeping.sweeps.findings import Finding
from housekeeping.sweeps.gates import Gates
from housekeeping.sweeps.ledger import HEARTBEAT, at_work
from housekeeping.sweeps.outbox import store as store_in_outbox
from housekeeping.sweeps.passes import (
    Announcement,
    Backlog,
    Divisible,
    Failure,
    Pass,
    PassPlan,
    Position,
    Preflight,
    PreflightResult,
    Reading,
    Settled,
    Step,
)
from housekeeping.sweeps.record_line import RecordLine
from housekeeping.sweeps.results import RunResult
from housekeeping.sweeps.run import perform
from housekeeping.sweeps.table_models import model_of
from housekeeping.sweeps.table_pass import TablePass

__all__ = [
    "HEARTBEAT",
    "PREFIX",
    "SYSTEM_CLOCK",
    "Action",
    "Alarms",
    "Announcement",
    "Backlog",
    "BaseModel",
    "Breaker",
    "Call",
    "CallPass",
    "Clock",
    "DeclarationError",
    "Delete",
    "Divisible",
    "Failure",
    "Finding",
    "Gates",
    "HousekeepingError",
    "LeaseTerms",
    "NaiveUtcDateTimeField",
    "ObjectNotDeleted",
    "ObjectStoreSettings",
    "ObjectStoreUnavailable",
    "Pass",
    "PassPlan",
    "Place",
    "Position",
    "Preflight",
    "PreflightResult",
    "Reading",
    "RecordChanged",
    "RecordLine",
    "RedisUnavailable",
    "RunResult",
    "Settings",
    "SettingsError",
    "Settled",
    "StateMachine",
    "StatementTime",
    "Step",
    "Sweep",
    "TablePass",
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
    "insist",
    "key_of",
    "logger",
    "masked",
    "model_of",
    "one_line",
    "perform",
    "reaching_redis",
    "shared_redis",
    "shortened",
    "statement_time",
    "store_in_outbox",
]
