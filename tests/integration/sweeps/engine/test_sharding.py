"""A sweep in parts: several runs share the work of one message, each row is processed once."""

from __future__ import annotations

import dataclasses
import functools
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.common import dq_name
from peewee import ModelSelect

from housekeeping.brokers import message_broker
from housekeeping.core.errors import DeclarationError, SettingsError
from housekeeping.core.settings import Settings, WorkerSettings
from housekeeping.database.connection import Database
from housekeeping.installation import install
from housekeeping.sweeps.lease_config import LeaseConfig
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.sharding import shards_of
from housekeeping.workers.batched_git_ref_updates.worker import project_cleanup
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import eventually, queued

NAME = sweep.name
IN_FOUR = WorkerSettings(shards=4, batch_size=10)


@pytest.fixture
def broker(settings: Settings, postgres: Database) -> dramatiq.Broker:
    broker = message_broker(settings)
    install(broker, settings.model_copy(update={"workers": {NAME: IN_FOUR}, "built_in": ("user_status_cleanup",)}))
    return broker


def test_shards_process_each_row_once(broker: dramatiq.Broker, add_statuses: AddStatuses) -> None:
    add_statuses(3000, "now() - interval '1 hour' + interval '1 millisecond' * n")
    worker = Worker(broker, worker_timeout=100, worker_threads=4)

    broker.get_actor(NAME).send()
    worker.start()
    try:
        broker.join("cronjob", timeout=60_000)
        worker.join()
    finally:
        worker.stop()
        broker.close()

    runs = list(Run.select().order_by(Run.id))
    assert sorted(run.trigger for run in runs) == ["enqueue", "parent", "parent", "parent"]
    assert {(run.worker, run.outcome) for run in runs} == {(NAME, "done")}
    assert sum(run.counts["deleted_rows"] for run in runs) == 3000
    assert UserStatus.select().count() == 0


def _is(query: ModelSelect[Any], number: int) -> bool:
    return int(query.count()) == number


def test_failing_shards_have_one_waiting_retry_each(broker: Any) -> None:
    # There is no table of statuses.
    for ticks in (1, 2, 3):
        broker.get_actor(NAME).send_with_options(trigger="schedule")
        worker = Worker(broker, worker_timeout=100, worker_threads=4)
        worker.start()
        failed = Run.select().where(Run.outcome == "failed")
        eventually(functools.partial(_is, failed, 4 * ticks))
        worker.stop()  # waits for what follows a failed message

    waiting = queued(broker, dq_name("cronjob"))
    broker.close()
    assert len(waiting) == 4


def test_each_shard_has_its_own_lease() -> None:
    leased = dataclasses.replace(sweep, shards=3, lease=LeaseConfig("cleanup", timedelta(minutes=5)))

    further = [(name, part.lease.key) for name, part in shards_of(leased) if part.lease is not None]

    assert further == [(f"{NAME}.part-1", "cleanup:part-1"), (f"{NAME}.part-2", "cleanup:part-2")]


def test_sharding_of_an_indivisible_sweep_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="shards must be 1"):
        dataclasses.replace(project_cleanup, shards=2)
    with pytest.raises(SettingsError, match='"shards"'):
        project_cleanup.configured(WorkerSettings(shards=2))
