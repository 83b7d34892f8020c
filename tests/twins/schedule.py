"""Faults of the schedule (promises S1 to S5, F7)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import pytest

from tests.internals.brokers import StoreUnavailable
from tests.internals.core import cron_fields
from tests.internals.middleware import Schedule, TickState, TickStore
from tests.twins import Twin

_CRON: Final = "tests/unit/core/test_cron.py"


def _sends_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "claim", lambda *args: True)


def _runs_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "before_process_message", lambda *args: None)


def _remembers_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "state_of", lambda *args: TickState(recorded=False, being_sent=False, actor_known=True))
    _sends_without_a_claim(patch)
    _runs_without_a_claim(patch)


def _treats_sunday_as_saturday(patch: pytest.MonkeyPatch) -> None:
    entry = cron_fields._entry
    patch.setattr(
        cron_fields, "_entry", lambda field, text: "6" if field.high == 7 and text == "0" else entry(field, text)
    )


def _raises_what_it_caught(patch: pytest.MonkeyPatch) -> None:
    is_due = Schedule.is_due

    def raising(self: Schedule, actor: Any, now: datetime) -> bool:
        due = is_due(self, actor, now)
        if self._unavailable_at == now:
            raise StoreUnavailable("Redis did not answer")
        return due

    patch.setattr(Schedule, "is_due", raising)


def _always(catch_up: str) -> Any:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        made = Schedule.__init__

        def make(self: Schedule, client: Any, namespace: str, zone: Any, given: Any) -> None:
            made(self, client, namespace, zone, catch_up)  # type: ignore[arg-type]

        patch.setattr(Schedule, "__init__", make)

    return breaks


def _notes_nothing(patch: pytest.MonkeyPatch) -> None:
    record = TickStore.record

    def record_only(self: TickStore, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return record(self, *args, **{**kwargs, "noting": False})

    patch.setattr(TickStore, "record", record_only)


TWINS: Final[list[Twin]] = [
    Twin(
        "S1",
        "sends_a_tick_from_every_scheduler",
        "tests/integration/middleware/schedule/test_schedule.py::test_tick_seen_by_two_schedulers_fires_once",
        _sends_without_a_claim,
    ),
    Twin(
        "S2",
        "treats_sunday_as_saturday",
        f"{_CRON}::test_a_weekly_schedule_fires_on_sunday",
        _treats_sunday_as_saturday,
    ),
    Twin(
        "S3",
        "lets_the_scheduler_die_without_redis",
        "tests/integration/middleware/schedule/test_schedule.py::test_scheduler_outlives_a_redis_outage_and_fires_the_next_tick",
        _raises_what_it_caught,
    ),
    Twin(
        "S4",
        "catches_up_no_tick",
        "tests/integration/middleware/schedule/test_catch_up.py::test_latest_missed_tick_fires_and_the_others_are_recorded",
        _always("none"),
    ),
    Twin(
        "S5",
        "stores_no_outcome_with_the_tick",
        "tests/integration/middleware/schedule/test_killed.py"
        "::test_tick_dropped_as_duplicate_is_recorded_though_the_scheduler_dies",
        _notes_nothing,
    ),
    Twin(
        "F7",
        "remembers_no_tick",
        "tests/integration/middleware/schedule/test_clocks.py::test_schedulers_restarted_every_minute_fire_each_tick_once",
        _remembers_nothing,
    ),
]
