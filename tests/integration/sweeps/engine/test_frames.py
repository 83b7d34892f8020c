from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import dramatiq
import pytest
import redis
from psycopg2.extensions import cursor as Cursor

import housekeeping
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.sweeps.registration import register
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import close_all, installed
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.sweeps.engine.sizing import DUE

_PACKAGE = str(Path(housekeeping.__file__).parent)


def frames_above(frame: FrameType | None) -> list[str]:
    """Return the library's functions on the stack, from the actor's function down."""
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            found.append(frame.f_code.co_name)
            if frame.f_code.co_name == "without_argument":
                return found[::-1]
        frame = frame.f_back
    return []


@pytest.fixture
def working_on_statuses(settings: Settings, statuses: object, redis_client: redis.Redis) -> Iterator[Any]:
    yield installed(settings)
    close_all()


def test_batch_statement_is_at_most_12_frames_below_its_actor(
    working_on_statuses: dramatiq.Broker, add_statuses: AddStatuses
) -> None:
    add_statuses(5, DUE)
    stacks: list[list[str]] = []

    class Watched(Cursor):
        """The driver's cursor, so that every frame of the library is above its caller."""

        def execute(self, query: Any, vars: Any = None) -> None:
            if b"DELETE" in (query if isinstance(query, bytes) else query.encode()):
                stacks.append(frames_above(sys._getframe(1)))
            super().execute(query, vars)

    database.connection().cursor_factory = Watched

    register(working_on_statuses, dataclasses.replace(sweep, schedule=None)).send()
    step_worker = StepWorker(working_on_statuses, sweep.queue)
    step_worker.run(step_worker.fetch())
    database.close()

    assert stacks and stacks[0][0] == "without_argument"
    assert len(stacks[0]) <= 12, stacks[0]
