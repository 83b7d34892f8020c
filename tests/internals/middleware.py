"""Parts of `housekeeping.middleware` that tests use."""

from __future__ import annotations

from housekeeping.middleware import deduplication as middleware
from housekeeping.middleware import deduplication as steps
from housekeeping.middleware import delivery as admission
from housekeeping.middleware import delivery as exclusive_lease
from housekeeping.middleware import delivery as idempotency
from housekeeping.middleware import enqueue as enqueue_scripts
from housekeeping.middleware import enqueue as path
from housekeeping.middleware import interrupts as statements
from housekeeping.middleware import keys, retries
from housekeeping.middleware import keys as call_keys
from housekeeping.middleware import keys as deduplication_scripts
from housekeeping.middleware import observe as heartbeats
from housekeeping.middleware import retries as dead_letters
from housekeeping.middleware import retries as group_callbacks
from housekeeping.middleware import retries as reliable_enqueue
from housekeeping.middleware import schedule as tick_store
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
