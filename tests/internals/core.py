"""Parts of `housekeeping.core` that tests use."""

from __future__ import annotations

from housekeeping.core import cron as cron_fields
from housekeeping.core import interrupts as thread_interrupt
from housekeeping.core import logs
from housekeeping.core import telemetry as error_reporting
from housekeeping.core import telemetry as metrics
from housekeeping.core.clock import SYSTEM_CLOCK, RunBudget, ServerClock, SystemClock, impatient, limit_ms
from housekeeping.core.cron import Cron, in_words
from housekeeping.core.errors import (
    BreakerTripped,
    BrokerUnavailable,
    ClocksDiffer,
    DatabaseUnavailable,
    DeadLetterRefused,
    DeclarationError,
    EmbeddedServerError,
    HousekeepingError,
    IllegalEvent,
    LeaseHeld,
    LeaseLost,
    ObjectStoreUnavailable,
    RecordChanged,
    RedisUnavailable,
    Refused,
    RowNotChanged,
    RunTakenOver,
    SchemaMissing,
    SettingsError,
    TransactionEnded,
    UploadBeingDeleted,
    UploadRefused,
    WrongArgument,
)
from housekeeping.core.events import entity_timed_out, event, import_timed_out
from housekeeping.core.interrupts import LostLease, interrupt, interrupter, retract, run_interruptibly, run_shielded
from housekeeping.core.logs import (
    DISTRIBUTION,
    StderrHandler,
    counted,
    error_line,
    format_duration,
    how_to_install,
    in_one_line,
    mask_secrets,
    printable,
    typed_error_line,
)
from housekeeping.core.pings import pings
from housekeeping.core.redis import GIVEN, milliseconds, named, redis_client, shared_redis, text
from housekeeping.core.settings import (
    LARGEST_BATCH,
    MAIN,
    PREFIX,
    BreakerSettings,
    ObjectStoreSettings,
    ThrottleSettings,
    WorkerSettings,
)
from housekeeping.core.telemetry import (
    Counter,
    Exporter,
    Histogram,
    MessageContext,
    WaitTimes,
    current_message,
    wait_times,
    waiting_for,
)
from housekeeping.core.urls import is_sentinel_url, parse_sentinel_url
from housekeeping.middleware.observe import OPTION
