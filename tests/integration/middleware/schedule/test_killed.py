"""Schedulers killed between any two steps of a tick: it fires once or is recorded as missed (S1, S5, F7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import pytest
import redis

from housekeeping import Settings
from tests.faults import at_step, elsewhere, once, redis_fault
from tests.integration.middleware.applications import at, close_all, queued, rows, wake_up
from tests.integration.middleware.schedule.ticking import Account, Killed, expire_claims
from tests.internals.database import Database
from tests.internals.ledger import runs
from tests.internals.middleware import Schedule, TickStore

#: A point at which a scheduler dies.
Dies = Callable[[], AbstractContextManager[object]]


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def _die() -> None:
    raise Killed


POINTS: Final[dict[str, Dies]] = {
    "before_the_claim": lambda: at_step(TickStore, "claim", "before", _die),
    "between_claim_and_enqueue": lambda: at_step(TickStore, "claim", "after", _die),
    "within_the_enqueue": lambda: redis_fault("enqueue", "before", _die),
    "between_enqueue_and_confirm": lambda: at_step(Schedule, "sent", "before", _die),
    "between_confirm_and_ledger": lambda: at_step(TickStore, "record", "after", _die),
    "before_the_note_is_written": lambda: at_step(runs, "record", "before", _die),
    "between_ledger_and_note": lambda: at_step(TickStore, "remove", "before", _die),
}


def _killed(account: Account, dies: Dies, now: Any) -> None:
    broker = account.process()
    with dies(), pytest.raises(Killed):
        wake_up(broker, now)
    expire_claims(account.settings.namespace)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("quick", [True, False], ids=["worker_at_once", "worker_later"])
def test_scheduler_killed_anywhere_leaves_each_tick_one_outcome(own: Settings, point: str, quick: bool) -> None:
    # The outage before it makes a gap, whose row must survive the kill as well.
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(6))

    _killed(account, POINTS[point], at(10))
    if quick:
        account.drain()
    wake_up(account.process(), at(10, 1))
    wake_up(account.process(), at(11))
    account.drain()

    assert account.ran == account.recorded == {at(6), at(10), at(11)}
    assert account.missed == 3


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "quick", [pytest.param(True, id="worker_at_once", marks=pytest.mark.slow), pytest.param(False, id="worker_later")]
)
def test_scheduler_killed_anywhere_for_good_leaves_each_tick_one_outcome(
    own: Settings, point: str, quick: bool
) -> None:
    # No scheduler catches up before the next tick is due.
    account = Account(own, "* * * * *")
    wake_up(account.process(), at(10))

    _killed(account, POINTS[point], at(10, 5))
    if quick:
        account.drain()
    wake_up(account.process(), at(10, 9))
    account.drain()
    wake_up(account.process(), at(10, 10))
    account.drain()

    assert account.ran == account.recorded
    assert len(account.ran) + account.missed == len(account.nominal(at(9, 59), at(10, 10)))


@pytest.mark.parametrize("point", ["between_claim_and_enqueue", "between_enqueue_and_confirm"])
def test_scheduler_killed_without_catch_up_leaves_each_tick_one_outcome(own: Settings, point: str) -> None:
    account = Account(own.model_copy(update={"catch_up": "none"}), "0 * * * *")
    wake_up(account.process(), at(9))

    _killed(account, POINTS[point], at(10))
    wake_up(account.process(), at(10, 1))
    account.drain()

    assert account.ran == account.recorded == {at(9)}
    assert rows("swept")[0] == ("missed", "no_scheduler", at(10), {"missed": 1})


def test_message_of_a_tick_recorded_as_missed_does_not_run(own: Settings) -> None:
    account = Account(own, "* * * * *")
    wake_up(account.process(), at(10))
    account.drain()

    _killed(account, POINTS["between_enqueue_and_confirm"], at(10, 1))
    wake_up(account.process(), at(10, 2))
    account.drain()

    assert account.ran == account.recorded == {at(10), at(10, 2)}
    assert account.missed == 1


def test_scheduler_killed_at_its_first_tick_leaves_it_to_catch_up(own: Settings) -> None:
    account = Account(own, "0 * * * *")

    _killed(account, POINTS["between_claim_and_enqueue"], at(10))
    wake_up(account.process(), at(10, 7))
    account.drain()

    assert (account.ran, account.missed) == ({at(10)}, 0)


def test_tick_in_flight_is_left_to_its_sender(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    one, other = account.process(), account.process()
    with POINTS["between_claim_and_enqueue"](), pytest.raises(Killed):
        wake_up(one, at(10))

    wake_up(other, at(10, 0, 1))

    assert queued(other) == []


def test_tick_dropped_as_duplicate_is_recorded_though_the_scheduler_dies(own: Settings) -> None:
    # D2, S5
    account = Account(own, "* * * * *", idempotent=True)
    wake_up(account.process(), at(10))

    _killed(account, POINTS["before_the_note_is_written"], at(10, 1))
    wake_up(account.process(), at(10, 1, 30))

    assert rows("swept") == [("skipped", "deduplicated", at(10, 1), {})]


def test_two_schedulers_record_one_outage_in_one_row(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(6))
    one, other = account.process(), account.process()

    with at_step(TickStore, "remove", "before", once(elsewhere(lambda: wake_up(other, at(10))))):
        wake_up(one, at(10))
    wake_up(account.process(), at(10, 1))

    assert rows("swept") == [("missed", "no_scheduler", at(9), {"missed": 3})]
