"""Check-ins of schedules with Sentry, made by its own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import sentry_sdk
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.middleware.applications import at, close_all, installed, wake_up
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.sweeps.engine.sizing import LONG_DUE, SMALL, past_runs
from tests.internals.core import HousekeepingError
from tests.internals.engine import guard, register


@pytest.fixture
def check_ins() -> Iterator[list[dict[str, Any]]]:
    """Set up Sentry in this process, and return the check-ins that it would send."""
    sent: list[dict[str, Any]] = []

    def keep(event: Any, hint: Any) -> None:
        sent.append(event)

    with sentry_sdk.isolation_scope() as scope:
        scope.set_client(
            sentry_sdk.Client(dsn="http://key@127.0.0.1:1/1", before_send=keep, default_integrations=False)
        )
        yield sent


@pytest.fixture
def broker(settings: Settings, redis_client: Any) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"database_url": None}))
    close_all()


def test_run_of_a_tick_checks_in_at_its_start_and_end(broker: RedisBroker, check_ins: list[dict[str, Any]]) -> None:
    @dramatiq.actor(broker=broker, actor_name="shop.clean_up", schedule="*/5 2 * * mon", time_limit=90_000)
    def clean_up() -> None: ...

    wake_up(broker, at(2))
    StepWorker(broker).run()

    begun, ended = check_ins
    assert (begun["status"], ended["status"]) == ("in_progress", "ok")
    assert begun["check_in_id"] == ended["check_in_id"] and ended["duration"] >= 0
    assert begun["monitor_slug"] == "shop-clean_up"
    assert begun["monitor_config"] == {
        "schedule": {"type": "crontab", "value": "*/5 2 * * mon"},
        "timezone": "UTC",
        "checkin_margin": 5,
        "max_runtime": 2,
    }


def test_failed_run_checks_in_as_an_error_and_its_retry_again(
    broker: RedisBroker, check_ins: list[dict[str, Any]]
) -> None:
    fails = [True, False]

    @dramatiq.actor(broker=broker, schedule="0 * * * *", max_retries=1)
    def work() -> None:
        if fails.pop(0):
            raise HousekeepingError("no")

    wake_up(broker, at(2))
    step_worker = StepWorker(broker)
    step_worker.run()
    step_worker.come_due()
    step_worker.run()

    assert [each["status"] for each in check_ins] == ["in_progress", "error", "in_progress", "ok"]
    ids = [each["check_in_id"] for each in check_ins]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_run_stopped_by_its_breaker_checks_in_as_an_error(
    broker: RedisBroker,
    check_ins: list[dict[str, Any]],
    add_statuses: AddStatuses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "FLOOR", 10)
    past_runs(10, 2)
    add_statuses(999, LONG_DUE)
    register(broker, changed(SMALL, guard_action="stop", schedule="0 * * * *"))

    wake_up(broker, at(2))
    StepWorker(broker, SMALL.queue).run()

    assert [each["status"] for each in check_ins] == ["in_progress", "error"]


def test_message_without_a_tick_does_not_check_in(broker: RedisBroker, check_ins: list[dict[str, Any]]) -> None:
    @dramatiq.actor(broker=broker, schedule="0 * * * *")
    def work() -> None: ...

    work.send()
    StepWorker(broker).run()

    assert check_ins == []


def test_long_names_have_short_and_different_monitors(broker: RedisBroker, check_ins: list[dict[str, Any]]) -> None:
    for number in (1, 2):
        dramatiq.actor(broker=broker, actor_name="shop." * 12 + str(number), schedule="0 * * * *")(lambda: None)

    wake_up(broker, at(2))
    step_worker = StepWorker(broker)
    step_worker.run(), step_worker.run()

    slugs = {each["monitor_slug"] for each in check_ins}
    assert len(slugs) == 2 and all(len(slug) <= 50 for slug in slugs)
