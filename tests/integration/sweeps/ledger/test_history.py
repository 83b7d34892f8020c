"""Past runs from the ledger: explanations, takeovers, dead runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, timedelta
from typing import Any, Final

import pytest

from tests.integration.many_runs import RUNS, many_runs
from tests.integration.statements import read_rows, watch_statements
from tests.internals.database import Database
from tests.internals.insight import explain_run
from tests.internals.ledger import NOW, Run, history, runs

WORKER: Final = "test.history"
RESTORED: Final = {"restore": {"run_id": 7, "where": "id = 1"}}
MINUTE: Final = timedelta(minutes=1)

Plans = Callable[[], list[str]]


@pytest.fixture
def plans(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> Plans:
    """Return PostgreSQL's plans of the SELECTs of this test."""
    sent: list[str] = []
    watch_statements(monkeypatch, lambda sql: sent.append(sql), with_values=True)

    def explain() -> list[str]:
        selects = [sql for sql in sent if sql.startswith("SELECT")]
        assert selects
        return ["\n".join(line for (line,) in postgres.execute_sql(f"EXPLAIN {sql}")) for sql in selects]

    return explain


@pytest.mark.slow
def test_explanation_of_a_run_uses_indexes(postgres: Database, plans: Plans) -> None:
    end = many_runs(postgres)
    record = history.find(RUNS - 1_000)
    assert record is not None

    explain_run(record, None, end, UTC)

    assert [plan for plan in plans() if "Seq Scan on runs" in plan] == []


def test_status_and_begin_of_a_run_look_past_skipped_runs_by_an_index(
    postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.execute_sql(
        f"INSERT INTO {Run._meta.schema}.runs (worker, trigger, started_at, finished_at, outcome, reason) "
        "SELECT CASE WHEN n %% 5 = 0 THEN 'test.other' ELSE %s END, 'schedule', now(), now(), "
        "CASE WHEN n %% 5 = 0 THEN 'done' ELSE 'skipped' END, 'paused' FROM generate_series(1, 5000) AS n",
        [WORKER],
    )
    postgres.execute_sql(f"ANALYZE {Run._meta.schema}.runs")
    sent: list[str] = []
    watch_statements(monkeypatch, sent.append, with_values=True)

    history.runs_of_workers({WORKER: 20}, unconfirmed="unconfirmed", held_back=["paused"])
    history.last_ended(WORKER, 20)
    runs.past_runs(WORKER)

    plans = [
        postgres.execute_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}").fetchone()[0][0]["Plan"] for sql in list(sent)
    ]
    assert len(plans) == 4
    assert max(number for plan in plans for _, number in read_rows(plan)) < 10


def test_open_run_without_heartbeats_is_lost(postgres: Database) -> None:
    alive = _begun()
    silent = _begun(heartbeat_at=NOW - runs.SILENCE - MINUTE)

    found = {each.run_id: each for each in history.recent(WORKER, 20)}

    assert (found[alive].lost, found[silent].lost) == (False, True)
    assert found[silent].silent_s == pytest.approx(120, abs=30)


def test_takeover_is_known_from_both_sides(postgres: Database) -> None:
    dead = _begun(heartbeat_at=NOW - 2 * runs.SILENCE)
    _record("skipped")
    taker = runs.begin(WORKER, message_id="m", tick=None, trigger="enqueue", lease=None)
    assert taker is not None
    _record("skipped")
    later = runs.begin(WORKER, message_id="n", tick=None, trigger="enqueue", lease=None)
    assert later is not None

    lost, took, other = (history.find(run_id) for run_id in (dead, taker.run_id, later.run_id))

    assert lost is not None and took is not None and other is not None
    assert history.taken_over_by(lost) == taker.run_id
    assert (history.took_over_from(took), history.took_over_from(other)) == ([dead], [])
    assert "took over from lost run" in str(explain_run(took, None, took.started_at, UTC).origin)
    assert explain_run(lost, None, took.started_at, UTC).next_step == (f"run {taker.run_id} took over")


@pytest.mark.parametrize(
    ("trigger", "origin"),
    [
        ("schedule", "the schedule sent it"),
        ("enqueue", "it was enqueued"),
        ("cli", "it was started by hand"),
        ("parent", "another worker's run enqueued it"),
    ],
)
def test_run_of_each_trigger_is_explained(postgres: Database, trigger: str, origin: str) -> None:
    record = history.find(_begun(trigger=trigger, outcome="done", finished_at=NOW))
    assert record is not None

    answer = explain_run(record, None, record.started_at, UTC)

    assert str(answer.origin).startswith(origin)
    assert answer.meaning == "it completed"


@pytest.mark.parametrize(
    ("row", "next_step"),
    [
        ({"trigger": "cli", "outcome": "partial", "reason": "shutdown"}, "the next run does the rest"),
        ({"message_id": "m", "outcome": "failed", "reason": "x", "error": "x"}, "its message is retried"),
        ({"message_id": "m", "heartbeat_at": NOW - 2 * runs.SILENCE}, "its message is delivered again"),
        ({"outcome": "done"}, "None"),
        (
            {"counts": {"purge": {}}, "outcome": "partial", "reason": "shutdown"},
            "to continue: housekeeping purge --resume ",
        ),
        (
            {"counts": {"purge": {}}, "heartbeat_at": NOW - 2 * runs.SILENCE},
            "to continue: housekeeping purge --resume ",
        ),
        ({"counts": {"purge": {}}, "outcome": "partial", "reason": "limit"}, "nothing: it has deleted as many rows"),
        (
            {"counts": RESTORED, "outcome": "failed", "reason": "x"},
            "to continue: housekeeping restore 7, with the same",
        ),
    ],
)
def test_next_step_follows_from_the_outcome(postgres: Database, row: dict[str, Any], next_step: str) -> None:
    record = history.find(_begun(**row, **({"finished_at": NOW} if "outcome" in row else {})))
    assert record is not None

    assert str(explain_run(record, None, record.started_at, UTC).next_step).startswith(next_step)


@pytest.mark.parametrize("reason", ["out_of_time", "limit", "shutdown", "gate", None])
def test_purge_is_never_said_to_continue_by_itself(postgres: Database, reason: str | None) -> None:
    ended = {"outcome": "partial", "reason": reason, "finished_at": NOW}
    row = ended if reason else {"heartbeat_at": NOW - 2 * runs.SILENCE}
    record = history.find(_begun(trigger="cli", counts={"purge": {}}, **row))
    assert record is not None

    answer = explain_run(record, None, record.started_at, UTC)

    assert answer.meaning and "next" not in answer.meaning
    assert answer.origin == "it was started by hand: housekeeping purge"


def test_purge_that_was_resumed_names_the_run_that_did(postgres: Database) -> None:
    first = history.find(_begun(counts={"purge": {}}, outcome="partial", reason="shutdown", finished_at=NOW))
    assert first is not None
    second = _begun(counts={"purge": {"resumes": first.run_id}}, outcome="done", finished_at=NOW)

    assert explain_run(first, None, first.started_at, UTC).next_step == f"run {second} resumed it"


def test_next_attempt_at_the_same_message_is_named(postgres: Database) -> None:
    first = history.find(_begun(message_id="m", outcome="failed", reason="x", finished_at=NOW))
    second = _begun(message_id="m", outcome="done", finished_at=NOW)
    assert first is not None

    answer = explain_run(first, None, first.started_at, UTC)

    assert answer.next_step == f"the next attempt at its message is run {second}"
    assert [each.run_id for each in answer.attempts] == [first.run_id, second]


def _begun(**columns: Any) -> int:
    given = {"worker": WORKER, "trigger": "enqueue", "started_at": NOW, "heartbeat_at": NOW, **columns}
    run_id: int = Run.insert(**given).execute()
    return run_id


def _record(outcome: runs.Outcome) -> None:
    runs.record(WORKER, outcome, "paused", message_id=None, tick=None, trigger="enqueue")
