"""Parts of `housekeeping.middleware` that tests use."""

from __future__ import annotations

from housekeeping.middleware import deduplication, delivery, enqueue, interrupts, keys, observe, retries, schedule
from housekeeping.middleware.consistency import Connections, DataConsistency
from housekeeping.middleware.deduplication import Deduplication
from housekeeping.middleware.delivery import Admission
from housekeeping.middleware.enqueue import BATCH_SIZE, EnqueuePath, share_redis
from housekeeping.middleware.interrupts import (
    ShutdownNotifications,
    StatementInProgress,
    statement_of_this_thread,
    within_actors,
)
from housekeeping.middleware.keys import (
    DEDUP_STATE,
    KEY,
    DeduplicationConfig,
    DeduplicationKeys,
    UnusableArguments,
    bind_call,
    check_key,
    config_of,
    digest,
    held_keys,
    key_prefix,
    key_step,
    key_value,
    position_prefix,
    release_key,
)
from housekeeping.middleware.observe import OPTIONS, Readiness, RunLog, SchedulerHeartbeats
from housekeeping.middleware.retries import MAX_RETRIES, delay_before
from housekeeping.middleware.schedule import Schedule, TickRecorder, TickState, TickStore
