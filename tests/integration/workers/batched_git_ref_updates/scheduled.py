"""The scheduler with other limits, and what it enqueued."""

from __future__ import annotations

from typing import Final

from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings, Sweep
from tests.declarations import changed
from tests.integration.middleware.applications import queued
from tests.internals.workers import GIT_BATCH_SIZE as BATCH_SIZE
from tests.internals.workers import cleanup_scheduler

#: The counts of a run that found nothing.
NONE: Final = {"total_projects": 0, "enqueued": 0, "deduplicated": 0}


def sized(max_projects: int, batch_size: int = BATCH_SIZE) -> Sweep:
    """The scheduler with other limits."""
    return changed(cleanup_scheduler, batch=batch_size, options={"max_projects": max_projects})


def enqueued(broker: RedisBroker) -> list[int]:
    """Return the projects with a queued cleanup."""
    return sorted(message.args[0] for message in queued(broker, "git_refs"))


def drain(broker: RedisBroker, settings: Settings) -> list[int]:
    """Return the projects with a queued cleanup, and empty the queue."""
    projects = enqueued(broker)
    broker.flush("git_refs")
    broker.client.delete(*broker.client.scan_iter(match=f"{settings.namespace}:dedup:*"))
    return projects
