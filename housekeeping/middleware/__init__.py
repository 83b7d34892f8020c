"""Middleware around a run, one concern per file.

Start with `standard_middleware`, which defines the order and gives the reason for each place. `enqueue` is the path of
messages into the queues. `delivery` asks Redis once whether a message runs: whether it is done, and has its key and its
lease. At the end of the message it releases both. `deduplication` and `keys` are about the key. `retries` decides what
follows a run. `schedule` decides which ticks are sent, claims and records them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import dramatiq.middleware
import redis
from dramatiq import Message, Middleware
from dramatiq.middleware import AgeLimit, Callbacks, Pipelines, TimeLimit
from dramatiq.results import Results
from periodiq import PeriodiqMiddleware

from housekeeping.brokers.dramatiq_internals import Prefetch
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import MAIN, Settings
from housekeeping.middleware.consistency import Connections, DataConsistency, Replicas, WalPositionReader
from housekeeping.middleware.deduplication import Deduplication
from housekeeping.middleware.delivery import Admission
from housekeeping.middleware.interrupts import ShutdownNotifications, within_actors
from housekeeping.middleware.observe import CheckIns, Heartbeats, Metrics, RunLog, Traces
from housekeeping.middleware.retries import DeadLetters, Retries, reliable_groups, stand_in_results, waiting_for_broker
from housekeeping.middleware.schedule import Schedule

logger = named_logger(__name__)

M = TypeVar("M", bound=Middleware)

#: Dramatiq's middleware with a place of its own in the order, whether the library's or the application's.
_PLACED: Final = (
    AgeLimit,
    Callbacks,
    Pipelines,
    TimeLimit,
    dramatiq.middleware.GroupCallbacks,
    dramatiq.middleware.Retries,
    dramatiq.middleware.ShutdownNotifications,
)
#: Middleware that counts messages. It comes first, wherever it was added, to see messages that the others skip.
_FIRST: Final = ("Prometheus", "SentryMiddleware")


def standard_middleware(
    client: redis.Redis,
    settings: Settings,
    given: Sequence[Middleware] = (),
    watch: Callable[[], None] | None = None,
) -> list[Middleware]:
    """Return all middleware in its fixed order. ``before_`` hooks run in this order, ``after_`` hooks in reverse.

    Parameters:
      given: The application's middleware. Dramatiq's classes keep their parameters and get their place in the order.
        Other middleware stays before or after them.
      watch: Evaluates the alerts, in worker and scheduler processes.
    """
    namespace = settings.namespace
    retries = _own(given, dramatiq.middleware.Retries)
    if retries is not None and type(retries) is not dramatiq.middleware.Retries:
        logger.warning("Middleware replaced by the library's retries", replaced=repr(retries))
    shutdown = _own(given, dramatiq.middleware.ShutdownNotifications)
    groups = _own(given, dramatiq.middleware.GroupCallbacks)
    deduplication = Deduplication(client, namespace)
    deliveries = Admission(client, namespace, deduplication)
    before, after = _around(given, deliveries.has_completed)
    return [
        *before,
        # First, so that every log line of the others, also of a skipped message, names the message.
        RunLog(),
        # Early, because the hooks of the others belong to the message's span.
        Traces(),
        # Drops old messages before a key or lease is acquired for them.
        _own(given, AgeLimit) or AgeLimit(),
        Schedule(client, namespace, settings.timezone, settings.catch_up, watch),
        # Any place would do, because it sees no message.
        Prefetch(),
        # Before all middleware that may wait, because a thread that waits for a lease or Redis is busy as well.
        Heartbeats(client, namespace, watch),
        Metrics(),
        # After Schedule, so its after hook runs first: outcomes are written on a clean connection, not in a
        # transaction that an actor left open.
        Connections(),
        # Before deduplication: the claim of a key contains the message's position, and if the message is dropped, the
        # position is kept for the holder.
        DataConsistency(
            client,
            namespace,
            WalPositionReader(settings.database_url, prepared_statements=settings.prepared_statements),
            Replicas(settings.replicas.get(MAIN, ()), prepared_statements=settings.prepared_statements),
            _replicas_of_other_databases(settings),
        ),
        deduplication,
        # After DataConsistency, so that a message that waits for a replica has no key or lease meanwhile.
        deliveries,
        # Their after hooks run before those above: followers of a message are sent before its key and lease are free.
        waiting_for_broker(_own(given, Callbacks) or Callbacks()),
        waiting_for_broker(_own(given, Pipelines) or Pipelines()),
        *([] if groups is None else [reliable_groups(groups)]),
        DeadLetters(),
        # After all of the above, so its after hook runs first: the others see whether the message failed for good.
        Retries(client, namespace, retries),
        # After all that may skip a message or let it wait: Sentry learns of runs, and of how they ended.
        CheckIns(),
        # Where Dramatiq puts added middleware: nearest to the actor. Skipped messages do not reach it.
        *after,
        # Last, so their after hooks run first and no interrupt arrives inside another hook. It could make a hook run
        # twice, or lose a retry that waits for Redis.
        within_actors(_own(given, TimeLimit) or TimeLimit()),
        ShutdownNotifications(timedelta(seconds=settings.grace_s), shutdown is not None and shutdown.notify_shutdown),
    ]


def _replicas_of_other_databases(settings: Settings) -> dict[str, tuple[WalPositionReader, Replicas]]:
    how = settings.prepared_statements
    return {
        name: (
            WalPositionReader(settings.databases[name], prepared_statements=how),
            Replicas(urls, prepared_statements=how, primary=name),
        )
        for name, urls in settings.replicas.items()
        if name != MAIN
    }


def _own(given: Sequence[Middleware], kind: type[M]) -> M | None:
    return next((middleware for middleware in given if isinstance(middleware, kind)), None)


def _around(
    given: Sequence[Middleware], has_completed: Callable[[Message[Any]], bool]
) -> tuple[list[Middleware], list[Middleware]]:
    """Return the middleware that the application added before Dramatiq's, and the middleware it added after.

    periodiq's middleware is left out, because it drops retries and late messages of scheduled actors. Results are
    always stored after the actor and before its completion, so a completed message has its result.
    """
    before: list[Middleware] = []
    after: list[Middleware] = []
    anchored = any(isinstance(middleware, _PLACED) for middleware in given)
    for middleware in given:
        if isinstance(middleware, _PLACED):
            anchored = False
        elif isinstance(middleware, Results):
            after.append(stand_in_results(middleware, has_completed))
        elif type(middleware).__name__ in _FIRST or anchored:
            before.append(middleware)
        elif not isinstance(middleware, PeriodiqMiddleware):
            after.append(middleware)
    return before, after
