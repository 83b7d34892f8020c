"""Floor 1: what surrounds a run, one concern a file; `standard_middleware` holds their order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, TypeVar

import dramatiq.middleware
import redis
from dramatiq import Middleware
from dramatiq.middleware import AgeLimit, Callbacks, Pipelines, TimeLimit
from periodiq import PeriodiqMiddleware

from housekeeping.core.settings import Settings
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.replicas import Replicas
from housekeeping.database.wal_position import WalPositionReader
from housekeeping.middleware.connections import Connections
from housekeeping.middleware.data_consistency import DataConsistency
from housekeeping.middleware.dead_letters import DeadLetters
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.exclusive_lease import ExclusiveLeases
from housekeeping.middleware.group_callbacks import reliable_groups
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.middleware.interrupts.shutdown import ShutdownNotifications
from housekeeping.middleware.interrupts.time_limit import within_actors
from housekeeping.middleware.prefetch import Prefetch
from housekeeping.middleware.reliable_enqueue import waiting_for_broker
from housekeeping.middleware.retries import Retries
from housekeeping.middleware.schedule.middleware import Schedule
from housekeeping.middleware.telemetry.heartbeats import Heartbeats
from housekeeping.middleware.telemetry.metrics import Metrics
from housekeeping.middleware.telemetry.run_log import RunLog
from housekeeping.middleware.telemetry.tracing import Traces

logger = named_logger(__name__)

M = TypeVar("M", bound=Middleware)

#: Dramatiq's own that have a place of their own in the order, ours or the application's.
_PLACED: Final = (
    AgeLimit,
    Callbacks,
    Pipelines,
    TimeLimit,
    dramatiq.middleware.GroupCallbacks,
    dramatiq.middleware.Retries,
    dramatiq.middleware.ShutdownNotifications,
)
#: They count what comes in and what goes out, so they must see what others skip, wherever they were added.
_FIRST: Final = ("Prometheus", "SentryMiddleware")


def standard_middleware(client: redis.Redis, settings: Settings, theirs: Sequence[Middleware] = ()) -> list[Middleware]:
    """THE order. ``before_`` hooks run down the list, ``after_`` hooks up; each place has its reason.

    Parameters:
      theirs: The application's own. Dramatiq's among them are kept with their parameters, in their place here;
        others stay before or after Dramatiq's as they were.
    """
    namespace = settings.namespace
    retries = _given(theirs, dramatiq.middleware.Retries)
    if retries is not None and type(retries) is not dramatiq.middleware.Retries:
        logger.warning("Middleware replaced by the library's retries", replaced=repr(retries))
    shutdown = _given(theirs, dramatiq.middleware.ShutdownNotifications)
    groups = _given(theirs, dramatiq.middleware.GroupCallbacks)
    before, after = _around(theirs)
    idempotency = Idempotency(client, namespace)
    return [
        *before,
        # First of ours, so that every line below, those of a skipped message too, says whose it is.
        RunLog(),
        # What a message leaves behind it, its hooks too, belongs to its span.
        Traces(),
        # Drops what is too old before anything is taken for it.
        _given(theirs, AgeLimit) or AgeLimit(),
        Schedule(client, namespace, settings.timezone, settings.catch_up),
        # Sees no message; anywhere would do.
        Prefetch(),
        # Before all that may take long: a thread that waits for a lease or Redis is busy, too.
        Heartbeats(client, namespace),
        Metrics(),
        # After Schedule, so its after hook runs first: outcomes are written on a sound connection, and in no
        # transaction that an actor left open.
        Connections(),
        # Before deduplication: a redelivery of a completed message must not take its key again.
        idempotency,
        # Before deduplication: the position that a message is given goes with its claim to a key, and is left to
        # the message that stands for it.
        DataConsistency(client, namespace, WalPositionReader(settings.database_url), Replicas(settings.replica_urls)),
        Deduplication(client, namespace, idempotency.mark, idempotency.completion_key),
        # After both: a message that is dropped anyway must not make others meet a held lease.
        ExclusiveLeases(client, namespace),
        # Their after hooks run before those above: what follows a message is sent before its key and lease are free.
        waiting_for_broker(_given(theirs, Callbacks) or Callbacks()),
        waiting_for_broker(_given(theirs, Pipelines) or Pipelines()),
        *([] if groups is None else [reliable_groups(groups)]),
        DeadLetters(),
        # After all of the above, so its after hook runs first: they see whether the message failed for good.
        Retries(client, namespace, retries),
        # Where Dramatiq puts what is added to it: nearest to the actor. What skips has done so by then.
        *after,
        # Last: their after hooks run first, so that nothing interrupts another one half way
        # (it did: a hook then ran twice, and a retry that waited for Redis was lost).
        within_actors(_given(theirs, TimeLimit) or TimeLimit()),
        ShutdownNotifications(timedelta(seconds=settings.grace_s), shutdown is not None and shutdown.notify_shutdown),
    ]


def _given(theirs: Sequence[Middleware], kind: type[M]) -> M | None:
    return next((middleware for middleware in theirs if isinstance(middleware, kind)), None)


def _around(theirs: Sequence[Middleware]) -> tuple[list[Middleware], list[Middleware]]:
    """What the application added before and after Dramatiq's own middleware.

    periodiq's is left out: it drops retries and late messages of scheduled actors.
    """
    before: list[Middleware] = []
    after: list[Middleware] = []
    anchored = any(isinstance(middleware, _PLACED) for middleware in theirs)
    for middleware in theirs:
        if isinstance(middleware, _PLACED):
            anchored = False
        elif type(middleware).__name__ in _FIRST or anchored:
            before.append(middleware)
        elif not isinstance(middleware, PeriodiqMiddleware):
            after.append(middleware)
    return before, after
