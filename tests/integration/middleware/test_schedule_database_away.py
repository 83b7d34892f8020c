"""Ticks whose outcome the database could not take when they had it (S5, F8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from peewee import OperationalError

from housekeeping.foundation.db import Database, connect_to, database
from housekeeping.foundation.leases import ExclusiveLease
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps import ledger
from housekeeping.sweeps.actor import register
from housekeeping.sweeps.declaration import LeaseTerms
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.middleware.applications import at, close_all, installed, rows, wake_up
from tests.integration.middleware.hands import Hands
from tests.integration.middleware.ticking import Account


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def test_an_outcome_the_database_could_not_take_is_written_by_the_next_scheduler(own: Settings) -> None:
    # The worker that ran it may be gone by then.
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "record", _database_away)
        account.work_off()

    wake_up(account.process(), at(10, 1))

    assert rows("swept") == [("done", None, at(10), {})]


def test_a_tick_whose_sweep_could_not_open_its_row_has_failed_when_the_database_is_back(own: Settings) -> None:
    broker = installed(own)
    register(broker, sweep)
    wake_up(broker, at(10))
    ours = database.obj

    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    Hands(broker, sweep.queue).run()
    database.initialize(ours)
    wake_up(broker, at(10, 1))

    [(outcome, reason, tick, _)] = rows(sweep.name)
    assert (outcome, tick) == ("failed", at(10))
    assert reason is not None and reason.startswith("database: ")


def test_a_tick_that_was_skipped_and_could_not_be_recorded_is_tried_again(own: Settings) -> None:
    broker = installed(own)
    register(broker, dataclasses.replace(sweep, lease=LeaseTerms("statuses", timedelta(minutes=10))))
    wake_up(broker, at(10))
    hands = Hands(broker, sweep.queue)
    assert ExclusiveLease("statuses", timedelta(minutes=10)).try_obtain() is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "record", _database_away)
        hands.run()

    hands.come_due()
    hands.run()

    assert rows(sweep.name) == [("skipped", "lease_held", at(10), {})]


def test_a_sweep_that_failed_and_said_so_has_one_row(own: Settings) -> None:
    # Its table is not there.
    broker = installed(own)
    register(broker, sweep)
    wake_up(broker, at(10))

    Hands(broker, sweep.queue).run()

    assert [(row[0], row[2]) for row in rows(sweep.name)] == [("failed", at(10))]


def _database_away(*args: Any, **kwargs: Any) -> None:
    raise OperationalError("the server closed the connection")
