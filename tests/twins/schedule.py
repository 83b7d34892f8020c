"""Faults of the schedule (promises S1 to S5, F7)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import pytest

from housekeeping.core import cron_fields
from housekeeping.core.cron import Cron
from housekeeping.middleware.schedule import middleware, tick_recorder
from housekeeping.middleware.schedule.middleware import Schedule
from housekeeping.middleware.schedule.tick_store import TickState, TickStore
from housekeeping.sweeps.engine import run_end
from tests.twins import Twin

_CRON: Final = "tests/unit/core/test_cron_under_periodiq.py"


def _lets_everybody_send(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "claim", lambda *args: True)


def _lets_every_message_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "before_process_message", lambda *args: None)


def _remembers_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "state_of", lambda *args: TickState(settled=False, being_sent=False, actor_known=True))
    _lets_everybody_send(patch)
    _lets_every_message_run(patch)


def _forgets_what_it_could_not_ask_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(middleware, "_last_before", lambda cron, now: cron.latest(now))


def _takes_a_skip_for_recorded(patch: pytest.MonkeyPatch) -> None:
    record: Any = run_end._record_without_row

    def ignoring(request: Any, progress: Any, end: Any) -> Any:
        record(request, progress, end)
        return end

    patch.setattr(run_end, "_record_without_row", ignoring)


def _takes_sunday_for_saturday(patch: pytest.MonkeyPatch) -> None:
    entry = cron_fields._entry
    patch.setattr(
        cron_fields, "_entry", lambda field, text: "6" if field.high == 7 and text == "0" else entry(field, text)
    )


def _asks_without_a_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "is_due", Schedule._is_due)


def _always(catch_up: str) -> Any:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        made = Schedule.__init__

        def make(self: Schedule, client: Any, namespace: str, zone: Any, given: Any) -> None:
            made(self, client, namespace, zone, catch_up)  # type: ignore[arg-type]

        patch.setattr(Schedule, "__init__", make)

    return breaks


def _settles_before_it_sends(patch: pytest.MonkeyPatch) -> None:
    claim = TickStore.claim

    def claim_and_settle(self: TickStore, actor: str, tick: datetime, token: str, previous: datetime) -> bool:
        free = claim(self, actor, tick, token, previous)
        self.settle(actor, tick, token, "sent", last_missed=previous, noting=False)
        return free

    patch.setattr(TickStore, "claim", claim_and_settle)


def _notes_nothing(patch: pytest.MonkeyPatch) -> None:
    settle = TickStore.settle

    def settle_only(self: TickStore, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return settle(self, *args, **{**kwargs, "noting": False})

    patch.setattr(TickStore, "settle", settle_only)


def _takes_no_look_at_the_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_recorder, "_last_recorded", lambda worker, before: None)


def _takes_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_recorder, "_no_longer_missed", lambda worker, tick: None)


def _runs_what_was_counted_as_missed(patch: pytest.MonkeyPatch) -> None:
    settle = TickStore.settle

    def settle_and_run(self: TickStore, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return True, settle(self, *args, **kwargs)[1]

    patch.setattr(TickStore, "settle", settle_and_run)


def _keeps_outcomes_to_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "note", lambda *args: None)


def _keeps_what_neither_took_until_it_is_a_scheduler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_recorder.TickRecorder, "note_unwritten", lambda *args: None)


def _leaves_all_to_the_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_recorder.TickRecorder, "record_failure_once", lambda *args: None)


def _fires_each_reading_of_a_time_of_day(patch: pytest.MonkeyPatch) -> None:
    made = Cron.__post_init__

    def make(self: Cron) -> None:
        made(self)
        self._names_readings = True

    patch.setattr(Cron, "__post_init__", make)


TWINS: Final[list[Twin]] = [
    Twin(
        "S5",
        "takes_a_skip_for_recorded",
        "tests/integration/middleware/schedule/test_database_unavailable.py::"
        "test_skipped_tick_without_a_record_is_retried",
        _takes_a_skip_for_recorded,
    ),
    Twin(
        "S5",
        "forgets_what_it_could_not_ask_for",
        "tests/integration/middleware/schedule/test_redis_unavailable.py::"
        "test_ticks_of_a_new_actor_are_recorded_though_redis_is_down_at_start",
        _forgets_what_it_could_not_ask_for,
    ),
    Twin(
        "S1",
        "lets_every_scheduler_send_a_tick",
        "tests/integration/middleware/schedule/test_schedule.py::test_tick_seen_by_two_schedulers_fires_once",
        _lets_everybody_send,
    ),
    Twin(
        "S1",
        "runs_every_message_of_a_tick",
        "tests/integration/middleware/schedule/test_redis_unavailable.py::test_tick_queued_twice_runs_once",
        _lets_every_message_run,
    ),
    Twin(
        "S2",
        "takes_sunday_for_saturday",
        f"{_CRON}::test_periodiq_sends_each_tick_of_a_week_once_with_a_sunday_in_it",
        _takes_sunday_for_saturday,
    ),
    Twin(
        "S3",
        "lets_the_scheduler_die_without_redis",
        "tests/integration/middleware/schedule/test_schedule.py::test_scheduler_outlives_a_redis_outage_and_fires_the_next_tick",
        _asks_without_a_guard,
    ),
    Twin(
        "S4",
        "makes_nothing_up",
        "tests/integration/middleware/schedule/test_catch_up.py::test_latest_missed_tick_fires_and_the_others_are_recorded",
        _always("none"),
    ),
    Twin(
        "S4",
        "makes_up_what_it_is_told_not_to",
        "tests/integration/middleware/schedule/test_catch_up.py::test_missed_ticks_are_recorded_once_without_catch_up",
        _always("latest"),
    ),
    Twin(
        "S5",
        "settles_a_tick_before_it_is_sent",
        "tests/integration/middleware/schedule/test_killed.py"
        "::test_scheduler_killed_at_its_first_tick_leaves_it_to_catch_up",
        _settles_before_it_sends,
    ),
    Twin(
        "S5",
        "notes_no_outcome_with_the_tick",
        "tests/integration/middleware/schedule/test_killed.py"
        "::test_tick_dropped_as_duplicate_is_recorded_though_the_scheduler_dies",
        _notes_nothing,
    ),
    Twin(
        "S5",
        "counts_a_gap_once_for_each_who_writes_of_it",
        "tests/integration/middleware/schedule/test_killed.py::test_two_schedulers_record_one_outage_in_one_row",
        _takes_no_look_at_the_ledger,
    ),
    Twin(
        "S5",
        "runs_a_tick_that_was_counted_as_missed",
        "tests/integration/middleware/schedule/test_killed.py::test_message_of_a_tick_recorded_as_missed_does_not_run",
        _runs_what_was_counted_as_missed,
    ),
    Twin(
        "S5",
        "keeps_an_outcome_the_database_could_not_take_to_itself",
        "tests/integration/middleware/schedule/test_database_unavailable.py"
        "::test_unwritten_outcome_is_written_by_the_next_scheduler",
        _keeps_outcomes_to_itself,
    ),
    Twin(
        "S5",
        "keeps_what_neither_database_nor_redis_could_take",
        "tests/integration/middleware/schedule/test_database_unavailable.py"
        "::test_outcome_without_database_and_redis_is_written_with_the_next_message",
        _keeps_what_neither_took_until_it_is_a_scheduler,
    ),
    Twin(
        "S5",
        "leaves_it_to_a_sweep_to_say_that_it_failed",
        "tests/integration/middleware/schedule/test_database_unavailable.py"
        "::test_tick_of_a_sweep_without_a_row_failed_once_the_database_returns",
        _leaves_all_to_the_sweep,
    ),
    Twin(
        "F7",
        "remembers_no_tick",
        "tests/integration/middleware/schedule/test_clocks.py::test_schedulers_restarted_every_minute_fire_each_tick_once",
        _remembers_nothing,
    ),
    Twin(
        "F7",
        "lets_both_of_two_schedulers_fire",
        "tests/integration/middleware/schedule/test_clocks.py::test_two_parallel_schedulers_fire_each_tick_of_an_hour_once",
        _remembers_nothing,
    ),
    Twin(
        "F7",
        "counts_a_tick_as_missed_that_fires_after_all",
        "tests/integration/middleware/schedule/test_clocks.py::test_clock_that_was_a_year_ahead_does_not_silence_the_year",
        _takes_nothing_back,
    ),
    Twin(
        "F7",
        "takes_a_time_of_day_for_a_reading",
        "tests/integration/middleware/schedule/test_clocks.py::test_daily_tick_fires_once_on_daylight_saving_days",
        _fires_each_reading_of_a_time_of_day,
    ),
    Twin(
        "F7",
        "accounts_for_no_gap",
        "tests/integration/middleware/schedule/test_clocks.py::test_consecutive_outages_have_a_row_each",
        _notes_nothing,
    ),
    Twin(
        "F7",
        "settles_a_tick_before_it_is_sent_by_a_process",
        "tests/acceptance/test_scheduler_process.py::test_tick_of_a_scheduler_killed_before_sending_is_caught_up",
        _settles_before_it_sends,
        in_processes=True,
        slow=True,
    ),
]
