"""Faults of the schedule (promises S1 to S5, F7)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import pytest

from housekeeping.core import cron_fields
from housekeeping.core.cron import Cron
from housekeeping.middleware.schedule import due_ticks, tick_recorder, tick_rows
from housekeeping.middleware.schedule.due_ticks import DueTicks
from housekeeping.middleware.schedule.middleware import Schedule
from housekeeping.middleware.schedule.tick_store import TickState, TickStore
from housekeeping.sweeps.engine import run_end
from tests.twins import Twin

_CRON: Final = "tests/unit/core/test_cron_under_periodiq.py"


def _sends_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "claim", lambda *args: True)


def _runs_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "before_process_message", lambda *args: None)


def _remembers_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "state_of", lambda *args: TickState(recorded=False, being_sent=False, actor_known=True))
    _sends_without_a_claim(patch)
    _runs_without_a_claim(patch)


def _forgets_ticks_during_a_redis_outage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(due_ticks, "_last_before", lambda cron, now: cron.latest(now))


def _counts_a_skip_as_recorded(patch: pytest.MonkeyPatch) -> None:
    record: Any = run_end._record_without_row

    def ignoring(request: Any, progress: Any, end: Any) -> Any:
        record(request, progress, end)
        return end

    patch.setattr(run_end, "_record_without_row", ignoring)


def _treats_sunday_as_saturday(patch: pytest.MonkeyPatch) -> None:
    entry = cron_fields._entry
    patch.setattr(
        cron_fields, "_entry", lambda field, text: "6" if field.high == 7 and text == "0" else entry(field, text)
    )


def _catches_no_redis_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DueTicks, "is_due", lambda self, actor, now: self._is_due(actor, self._schedules[actor.actor_name], now)
    )


def _always(catch_up: str) -> Any:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        made = Schedule.__init__

        def make(self: Schedule, client: Any, namespace: str, zone: Any, given: Any) -> None:
            made(self, client, namespace, zone, catch_up)  # type: ignore[arg-type]

        patch.setattr(Schedule, "__init__", make)

    return breaks


def _marks_as_sent_before_sending(patch: pytest.MonkeyPatch) -> None:
    claim = TickStore.claim

    def claim_and_record(self: TickStore, actor: str, tick: datetime, token: str, previous: datetime) -> bool:
        free = claim(self, actor, tick, token, previous)
        self.record(actor, tick, token, "sent", last_missed=previous, noting=False)
        return free

    patch.setattr(TickStore, "claim", claim_and_record)


def _notes_nothing(patch: pytest.MonkeyPatch) -> None:
    record = TickStore.record

    def record_only(self: TickStore, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return record(self, *args, **{**kwargs, "noting": False})

    patch.setattr(TickStore, "record", record_only)


def _ignores_the_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_rows, "last_tick", lambda worker, before: None)


def _never_corrects_missed_ticks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_rows, "no_longer_missed", lambda worker, tick: None)


def _runs_a_missed_tick(patch: pytest.MonkeyPatch) -> None:
    record = TickStore.record

    def record_and_run(self: TickStore, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return True, record(self, *args, **kwargs)[1]

    patch.setattr(TickStore, "record", record_and_run)


def _stores_no_outcome_in_redis(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TickStore, "note", lambda *args: None)


def _keeps_outcomes_in_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_recorder.TickRecorder, "note_unwritten", lambda *args: None)


def _records_no_failure_of_a_sweep(patch: pytest.MonkeyPatch) -> None:
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
        "counts_a_skip_as_recorded",
        "tests/integration/middleware/schedule/test_database_unavailable.py::"
        "test_skipped_tick_without_a_record_is_retried",
        _counts_a_skip_as_recorded,
    ),
    Twin(
        "S5",
        "forgets_ticks_during_a_redis_outage",
        "tests/integration/middleware/schedule/test_redis_unavailable.py::"
        "test_ticks_of_a_new_actor_are_recorded_though_redis_is_down_at_start",
        _forgets_ticks_during_a_redis_outage,
    ),
    Twin(
        "S1",
        "sends_a_tick_from_every_scheduler",
        "tests/integration/middleware/schedule/test_schedule.py::test_tick_seen_by_two_schedulers_fires_once",
        _sends_without_a_claim,
    ),
    Twin(
        "S1",
        "runs_every_message_of_a_tick",
        "tests/integration/middleware/schedule/test_redis_unavailable.py::test_tick_queued_twice_runs_once",
        _runs_without_a_claim,
    ),
    Twin(
        "S2",
        "treats_sunday_as_saturday",
        f"{_CRON}::test_periodiq_sends_each_tick_of_a_week_once_with_a_sunday_in_it",
        _treats_sunday_as_saturday,
    ),
    Twin(
        "S3",
        "lets_the_scheduler_die_without_redis",
        "tests/integration/middleware/schedule/test_schedule.py::test_scheduler_outlives_a_redis_outage_and_fires_the_next_tick",
        _catches_no_redis_error,
    ),
    Twin(
        "S4",
        "catches_up_no_tick",
        "tests/integration/middleware/schedule/test_catch_up.py::test_latest_missed_tick_fires_and_the_others_are_recorded",
        _always("none"),
    ),
    Twin(
        "S4",
        "catches_up_without_the_option",
        "tests/integration/middleware/schedule/test_catch_up.py::test_missed_ticks_are_recorded_once_without_catch_up",
        _always("latest"),
    ),
    Twin(
        "S5",
        "marks_a_tick_as_sent_before_it_is",
        "tests/integration/middleware/schedule/test_killed.py"
        "::test_scheduler_killed_at_its_first_tick_leaves_it_to_catch_up",
        _marks_as_sent_before_sending,
    ),
    Twin(
        "S5",
        "stores_no_outcome_with_the_tick",
        "tests/integration/middleware/schedule/test_killed.py"
        "::test_tick_dropped_as_duplicate_is_recorded_though_the_scheduler_dies",
        _notes_nothing,
    ),
    Twin(
        "S5",
        "counts_a_gap_once_per_scheduler",
        "tests/integration/middleware/schedule/test_killed.py::test_two_schedulers_record_one_outage_in_one_row",
        _ignores_the_ledger,
    ),
    Twin(
        "S5",
        "runs_a_tick_recorded_as_missed",
        "tests/integration/middleware/schedule/test_killed.py::test_message_of_a_tick_recorded_as_missed_does_not_run",
        _runs_a_missed_tick,
    ),
    Twin(
        "S5",
        "stores_no_unwritten_outcome_in_redis",
        "tests/integration/middleware/schedule/test_database_unavailable.py"
        "::test_unwritten_outcome_is_written_by_the_next_scheduler",
        _stores_no_outcome_in_redis,
    ),
    Twin(
        "S5",
        "keeps_unwritten_outcomes_in_memory",
        "tests/integration/middleware/schedule/test_database_unavailable.py"
        "::test_outcome_without_database_and_redis_is_written_at_the_next_message",
        _keeps_outcomes_in_memory,
    ),
    Twin(
        "S5",
        "records_no_failure_of_a_sweep_without_a_row",
        "tests/integration/middleware/schedule/test_database_unavailable.py"
        "::test_tick_of_a_sweep_without_a_row_failed_once_the_database_returns",
        _records_no_failure_of_a_sweep,
    ),
    Twin(
        "F7",
        "remembers_no_tick",
        "tests/integration/middleware/schedule/test_clocks.py::test_schedulers_restarted_every_minute_fire_each_tick_once",
        _remembers_nothing,
    ),
    Twin(
        "F7",
        "sends_a_tick_from_both_schedulers",
        "tests/integration/middleware/schedule/test_clocks.py::test_two_parallel_schedulers_fire_each_tick_of_an_hour_once",
        _remembers_nothing,
    ),
    Twin(
        "F7",
        "counts_a_sent_tick_as_missed",
        "tests/integration/middleware/schedule/test_clocks.py::test_clock_that_was_a_year_ahead_does_not_silence_the_year",
        _never_corrects_missed_ticks,
    ),
    Twin(
        "F7",
        "matches_the_clock_reading_instead_of_the_time",
        "tests/integration/middleware/schedule/test_clocks.py::test_daily_tick_fires_once_on_daylight_saving_days",
        _fires_each_reading_of_a_time_of_day,
    ),
    Twin(
        "F7",
        "records_no_gap",
        "tests/integration/middleware/schedule/test_clocks.py::test_consecutive_outages_have_a_row_each",
        _notes_nothing,
    ),
    Twin(
        "F7",
        "marks_a_tick_as_sent_before_a_process_sends_it",
        "tests/acceptance/test_scheduler_process.py::test_tick_of_a_scheduler_killed_before_sending_is_caught_up",
        _marks_as_sent_before_sending,
        in_processes=True,
        slow=True,
    ),
]
