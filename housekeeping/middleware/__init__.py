"""Floor 1: what surrounds a run, one concern a file; `standard_middleware` holds their order."""

from __future__ import annotations

import redis
from dramatiq import Middleware
from dramatiq.middleware import AgeLimit, Callbacks, Pipelines, ShutdownNotifications, TimeLimit

from housekeeping.foundation.settings import Settings
from housekeeping.middleware.connections import Connections
from housekeeping.middleware.deduplication import Deduplication
from housekeeping.middleware.exclusive_lease import ExclusiveLeases
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.middleware.retries import Retries
from housekeeping.middleware.run_log import RunLog
from housekeeping.middleware.schedule import Schedule


def standard_middleware(client: redis.Redis, settings: Settings) -> list[Middleware]:
    """THE order. ``before_`` hooks run down the list, ``after_`` hooks up; each place has its reason."""
    namespace = settings.namespace
    return [
        # First, so that every line below, those of a skipped message too, says whose it is.
        RunLog(),
        # Drops what is too old before anything is taken for it.
        AgeLimit(),
        Schedule(client, namespace, settings.timezone, settings.catch_up),
        # Closes a broken connection last, after all that may still use it.
        Connections(),
        # Before deduplication: a redelivery of a completed message must not take its key again.
        Idempotency(client, namespace),
        Deduplication(client, namespace),
        # After both: a message that is dropped anyway must not make others meet a held lease.
        ExclusiveLeases(client, namespace),
        # All of the above stands before TimeLimit: their after hooks run when its timer is gone,
        # so it cannot interrupt a release half way (it did: the hook then ran twice).
        TimeLimit(),
        ShutdownNotifications(),
        Callbacks(),
        Pipelines(),
        # Last, so its after hook runs first: all others see whether the message failed for good.
        Retries(client, namespace),
    ]
