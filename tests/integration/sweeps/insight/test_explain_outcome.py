from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from housekeeping import Delete, Rows, Sweep
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.internals.database import Database
from tests.internals.insight import Explanation, explain_run, why
from tests.internals.ledger import Heartbeat, Override, Process, Processes, Run, history, record_action, switch

NOW = datetime(2026, 11, 20, 12, 0, 30, tzinfo=UTC)
LAST = datetime(2026, 11, 20, 11, 45, tzinfo=UTC)

Recorded = Callable[..., None]


@pytest.fixture
def sweep() -> Sweep:
    return Sweep(
        "test.why",
        Rows(
            UserStatus,
            stale=lambda row, now: row.clear_status_at <= now,
            order=("clear_status_at", "user_id"),
            action=Delete(),
        ),
        schedule="45 * * * *",
    )


@pytest.fixture
def recorded(postgres: Database) -> Recorded:
    def record(tick: datetime | None, outcome: str | None, reason: str | None = None, **more: Any) -> None:
        ended = None if outcome is None else NOW
        given = {"started_at": NOW - timedelta(hours=2), "heartbeat_at": NOW, "finished_at": ended, **more}
        Run.create(worker="test.why", tick=tick, outcome=outcome, reason=reason, **{"trigger": "schedule", **given})

    return record


def asked(sweep: Sweep, tick: datetime | None = None, sent: bool | None = None) -> Explanation:
    return why(sweep, tick, NOW, UTC, lambda tick: sent)


def test_explanation_without_a_tick_is_of_the_latest_one(sweep: Sweep, recorded: Recorded) -> None:
    recorded(LAST - timedelta(hours=1), "failed")
    recorded(LAST, "done")

    answer = asked(sweep)

    assert (answer.tick, answer.outcome) == (LAST, "done")


def test_outcome_of_a_tick_is_that_of_its_last_attempt(sweep: Sweep, recorded: Recorded) -> None:
    recorded(LAST, "lost", "taken_over")
    recorded(LAST, "partial", "out_of_time")

    answer = asked(sweep)

    assert [attempt.outcome for attempt in answer.attempts] == ["lost", "partial"]
    assert answer.outcome == "partial" and "time limit" in answer.meaning


@pytest.mark.parametrize(
    ("outcome", "reason", "error", "said"),
    [
        ("skipped", "paused", None, "housekeeping resume test.why"),
        ("skipped", "lease_held", None, "another run held the lease"),
        ("failed", "database: x", "relation is missing", "it failed: relation is missing"),
        ("skipped", "some_new_reason", None, "some_new_reason"),
    ],
)
def test_each_reason_is_explained_with_what_to_do(
    sweep: Sweep, recorded: Recorded, outcome: str, reason: str, error: str | None, said: str
) -> None:
    recorded(LAST, outcome, reason, error=error)

    assert said in asked(sweep).meaning


def test_tick_skipped_by_the_pause_in_force_names_who_paused_and_why(sweep: Sweep, recorded: Recorded) -> None:
    switch(Override("test.why", "paused", "a migration", said_by="ann@db1"))
    earlier, later = LAST - timedelta(hours=1), LAST
    recorded(earlier, "skipped", "paused", started_at=datetime(2001, 1, 1, tzinfo=UTC))
    recorded(later, "skipped", "paused", started_at=datetime(2090, 1, 1, tzinfo=UTC))

    before_the_pause, during_it = asked(sweep, earlier).meaning, asked(sweep, later).meaning

    assert before_the_pause == "the worker is paused: housekeeping resume test.why"
    assert during_it.startswith("test.why is paused until it is resumed: a migration (set by ann@db1, ")
    assert during_it.endswith(" UTC): housekeeping resume test.why")


def test_run_skipped_by_a_pause_that_is_over_names_who_had_paused(sweep: Sweep, recorded: Recorded) -> None:
    with record_action("pause", "test.why", "ann@db1") as outcome:
        outcome.result = "test.why is paused until it is resumed: a migration"
    with record_action("resume", "test.why", "bob@db1"):
        pass
    recorded(LAST, "skipped", "paused", finished_at=datetime(2090, 1, 1, tzinfo=UTC))
    [run] = history.at_tick("test.why", LAST)

    page, terminal = explain_run(run, sweep, NOW, UTC).meaning, asked(sweep).meaning

    assert page == terminal and page.startswith("ann@db1 had paused it at ")
    assert page.endswith(" UTC (test.why is paused until it is resumed: a migration)")


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [("no_scheduler", "no scheduler ran"), ("servers_unavailable", "a server that it needs did not answer")],
)
def test_tick_within_a_recorded_gap_was_missed(sweep: Sweep, recorded: Recorded, reason: str, meaning: str) -> None:
    recorded(LAST - timedelta(hours=9), "done")
    recorded(LAST - timedelta(hours=1), "missed", reason, counts={"missed": 8})

    answer = asked(sweep, LAST - timedelta(hours=5))

    assert (answer.outcome, answer.attempts[0].counts) == ("missed", {"missed": 8})
    assert meaning in answer.meaning


@pytest.mark.parametrize(("hours", "outcome"), [(0, "missed"), (7, "missed"), (8, "unknown")])
def test_gap_covers_as_many_ticks_as_it_counts(sweep: Sweep, recorded: Recorded, hours: int, outcome: str) -> None:
    recorded(LAST - timedelta(hours=1), "missed", "no_scheduler", counts={"missed": 8})

    assert asked(sweep, LAST - timedelta(hours=1 + hours)).outcome == outcome


def test_sent_tick_before_a_gap_is_waiting(sweep: Sweep, recorded: Recorded) -> None:
    recorded(LAST - timedelta(hours=1), "missed", "no_scheduler", counts={"missed": 2})

    assert asked(sweep, LAST - timedelta(hours=3), sent=True).outcome == "waiting"


def test_tick_before_a_done_tick_is_not_in_a_later_gap(sweep: Sweep, recorded: Recorded) -> None:
    recorded(LAST - timedelta(hours=9), "done")
    recorded(LAST - timedelta(hours=1), "missed", "no_scheduler", counts={"missed": 8})

    assert asked(sweep, LAST - timedelta(hours=10)).outcome == "unknown"


def test_minute_outside_of_the_schedule_is_not_a_tick(sweep: Sweep, recorded: Recorded) -> None:
    answer = asked(sweep, datetime(2026, 11, 20, 11, 40, tzinfo=UTC))

    assert answer.outcome == "not_a_tick"
    assert "2026-11-20 10:45 UTC and 2026-11-20 11:45 UTC" in answer.meaning


@pytest.mark.parametrize(
    "minute", [datetime(2026, 11, 20, 10, 40, tzinfo=UTC), datetime(2026, 11, 20, 12, 40, tzinfo=UTC)]
)
def test_minute_without_a_tick_is_neither_missed_nor_due(sweep: Sweep, recorded: Recorded, minute: datetime) -> None:
    recorded(LAST, "missed", "no_scheduler", counts={"missed": 8})

    assert asked(sweep, minute).outcome == "not_a_tick"


def test_future_tick_is_not_yet(sweep: Sweep, recorded: Recorded) -> None:
    assert asked(sweep, datetime(2026, 11, 20, 12, 45, tzinfo=UTC)).outcome == "not_yet"


@pytest.mark.parametrize(("change", "said"), [({"schedule": None}, "no schedule"), ({"enabled": False}, "disabled")])
def test_worker_without_a_schedule_has_no_future_tick(
    sweep: Sweep, recorded: Recorded, change: dict[str, Any], said: str
) -> None:
    answer = asked(changed(sweep, **change), datetime(2026, 11, 20, 12, 45, tzinfo=UTC))

    assert answer.outcome == "unknown" and said in answer.meaning


def test_running_and_silent_runs_are_distinguished(sweep: Sweep, recorded: Recorded) -> None:
    recorded(LAST, None, heartbeat_at=datetime.now(UTC) - timedelta(seconds=61))
    silent = asked(sweep)
    recorded(LAST, None, heartbeat_at=datetime.now(UTC))

    assert (silent.outcome, asked(sweep).outcome) == ("silent", "running")
    assert str(silent) == "lost? no heartbeat for 1 min"
    assert silent.meaning == "its process was killed or hangs; the next attempt takes over"


@pytest.mark.parametrize(
    ("sent", "outcome", "said"),
    [
        (True, "waiting", "it was sent, and no run of it has begun"),
        (False, "not_sent", "no scheduler has sent it"),
        (None, "unknown", "whether it was sent is unknown"),
    ],
)
def test_explanation_of_an_unrecorded_tick_says_whether_it_was_sent(
    sweep: Sweep, recorded: Recorded, sent: bool | None, outcome: str, said: str
) -> None:
    recorded(LAST - timedelta(hours=1), "done")

    answer = asked(sweep, LAST, sent)

    assert answer.outcome == outcome and said in answer.meaning
    assert ("it was sent" in answer.meaning.replace("whether it was sent", "")) == (sent is True)


@pytest.mark.parametrize(
    ("age_s", "up_s", "said"),
    [
        (5, 7200, "The scheduler a:7 was running then: since 2026-11-20 10:00:25 UTC, and is alive"),
        (
            300,
            3600,
            "The scheduler a:7 was running then: since 2026-11-20 10:55:30 UTC, its last heartbeat was",
        ),
        (3600, 60, "No scheduler is alive since 2026-11-20 11:00:30 UTC (last heartbeat of a:7, 1 h ago)"),
        (5, 60, "No scheduler is known from then: the one that is alive began at 2026-11-20 11:59:25 UTC"),
    ],
)
@pytest.mark.parametrize("sent", [False, None])
def test_unsent_tick_is_explained_by_the_schedulers_and_the_ledger(
    sweep: Sweep, recorded: Recorded, age_s: float, up_s: float, said: str, sent: bool | None
) -> None:
    recorded(LAST - timedelta(hours=1), "done")

    answer = why(sweep, LAST, NOW, UTC, lambda tick: sent, Processes((scheduler(age_s, up_s),)))

    assert said in answer.meaning
    assert "The ledger, which goes back to 2026-11-20 10:00:30 UTC, has no run of it" in answer.meaning


def test_current_tick_is_unknown_while_redis_does_not_answer(sweep: Sweep, recorded: Recorded) -> None:
    answer = asked(replace(sweep, schedule="59 11 * * *"), LAST.replace(minute=59))

    assert answer.outcome == "unknown" and "heartbeats could not be read" in answer.meaning
    assert "being sent" not in answer.meaning and "not stored" not in answer.meaning


def test_empty_ledger_is_not_called_too_short(sweep: Sweep, recorded: Recorded) -> None:
    answer = asked(sweep)

    assert answer.outcome == "unknown" and "30 days" not in answer.meaning


def test_tick_older_than_the_ledger_is_unknown(sweep: Sweep, recorded: Recorded) -> None:
    recorded(LAST, "done", started_at=LAST)

    answer = asked(sweep, LAST - timedelta(hours=1))

    assert answer.outcome == "unknown" and "first run of this worker is later, 20" in answer.meaning


def scheduler(age_s: float, up_s: float = 0.0) -> Process:
    said = Heartbeat(kind="scheduler", host="a", pid=7, version="1", up_s=up_s)
    return Process(said, NOW - timedelta(seconds=age_s), age_s)


@pytest.mark.parametrize(("sent", "outcome"), [(False, "not_sent"), (None, "unknown")])
def test_dead_scheduler_is_named_at_once_with_the_time_of_its_death(
    sweep: Sweep, recorded: Recorded, sent: bool | None, outcome: str
) -> None:
    soon = replace(sweep, schedule="59 11 * * *")

    answer = why(soon, None, NOW, UTC, lambda tick: sent, Processes((scheduler(50),)))

    assert answer.outcome == outcome and "look again" not in answer.meaning
    assert "No scheduler is alive since 2026-11-20 11:59:40 UTC (last heartbeat of a:7" in answer.meaning


def test_tick_that_the_full_ledger_cannot_store_says_how_it_ended(sweep: Sweep, recorded: Recorded) -> None:
    answer = why(sweep, LAST, NOW, UTC, lambda tick: True, unrecorded=lambda tick: ("failed", "disk full: no space"))

    assert (answer.outcome, answer.meaning.partition(". ")[0]) == ("failed", "disk full: no space")


@pytest.mark.parametrize("sent", [False, None])
def test_living_scheduler_is_given_time_to_send(sweep: Sweep, recorded: Recorded, sent: bool | None) -> None:
    soon = replace(sweep, schedule="59 11 * * *")

    answer = why(soon, None, NOW, UTC, lambda tick: sent, Processes((scheduler(5),)))

    assert answer.outcome == "waiting" and "look again in a minute" in answer.meaning


def test_message_without_a_worker_is_waiting_for_one(sweep: Sweep, recorded: Recorded) -> None:
    answer = why(sweep, None, NOW, UTC, lambda tick: True, Processes((scheduler(5),)))

    assert answer.outcome == "waiting" and "no worker serves the queue 'cronjob'" in answer.meaning
