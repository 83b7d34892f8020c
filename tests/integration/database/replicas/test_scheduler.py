from __future__ import annotations

from typing import Any

import pytest

from housekeeping.workers.batched_git_ref_updates.models import Deletion
from tests.integration.database.replicas.conftest import Application, MakeApplication
from tests.integration.database.replicas.standby import Standby
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.database import Database
from tests.internals.engine import register, send
from tests.internals.workers import cleanup_scheduler, project_cleanup


@pytest.fixture
def application(make_application: MakeApplication, standby: Standby, postgres: Database) -> Any:
    """The ref cleanup of two projects, on an application with a replica."""
    application = make_application(standby.url)
    postgres.create_tables([Deletion])
    for project in (1, 2):
        Deletion.create(project_id=project, ref="refs/heads/gone")
    register(application.broker, project_cleanup)
    yield application
    send.forget_all()


def ended(application: Application) -> tuple[Any, ...]:
    """The end of the scheduler's run, once the next message is processed: where it read, and what it enqueued."""
    StepWorker(application.broker, cleanup_scheduler.queue).run()
    [end] = application.lines("Run ended")
    return end["outcome"], end["data_consistency_used"], end["enqueued"]


def test_the_scheduler_reads_project_ids_from_a_replica(application: Application, standby: Standby) -> None:
    register(application.broker, cleanup_scheduler).send()
    standby.catch_up(application.primary)

    assert ended(application) == ("done", "replica", 2)


def test_scheduler_misses_no_project_that_its_replica_does_not_know_yet(
    application: Application, standby: Standby
) -> None:
    standby.catch_up(application.primary)
    standby.hold_up()
    Deletion.create(project_id=3, ref="refs/heads/gone")
    register(application.broker, cleanup_scheduler).send()

    assert ended(application) == ("done", "primary", 3)
