"""The commands ``housekeeping runs`` and ``housekeeping why``."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest

from tests.acceptance.conftest import Command
from tests.internals.ledger import NOW, SILENCE, Run

pytestmark = pytest.mark.slow

WORKER: Final = "user_status_cleanup.batch"
UPLOADS: Final = "object_storage.delete_stale_direct_uploads"
MINUTE: Final = timedelta(minutes=1)

Record = Callable[..., int]


@pytest.fixture
def record(made: None) -> Record:
    """Writes a row of the ledger; returns its id."""

    def write(worker: str = WORKER, **columns: Any) -> int:
        ended = {} if columns.get("outcome") is None else {"finished_at": NOW}
        given = {"trigger": "schedule", "started_at": NOW - MINUTE, "heartbeat_at": NOW, **ended, **columns}
        run_id: int = Run.insert(worker=worker, **given).execute()
        return run_id

    return write


def test_runs_are_listed_newest_first_and_fit_eighty_columns(
    environment: dict[str, str], command: Command, record: Record
) -> None:
    counts = {"total_pending_entries": 2_903, "total_deleted_stale_entries": 2_000, "execution_timeout": False}
    record(UPLOADS, outcome="partial", reason="out_of_time", counts=counts)
    record(outcome="skipped", reason="deduplicated")
    record(outcome="failed", reason="database: relation is missing", error="relation is missing")
    record("batched_git_ref_updates.project_cleanup", heartbeat_at=NOW - SILENCE - MINUTE)

    environment["COLUMNS"] = "80"
    shown = command("runs").stdout

    lines = shown.splitlines()
    assert lines[0].split() == ["ID", "WORKER", "AGE", "DURATION", "OUTCOME", "AND", "COUNTS"]
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:] if line[:4].strip().isdigit()] == ["4", "3", "2", "1"]
    joined = " ".join(shown.split())
    assert "lost? no heartbeat for" in joined and "skipped: deduplicated" in joined
    assert "total_deleted_stale_entries 2,000" in joined and "\x1b" not in shown


def test_next_page_is_named_and_follows(command: Command, record: Record) -> None:
    for _ in range(3):
        record(outcome="done")

    first = command("runs", WORKER, "--limit", "2").stdout
    second = json.loads(command("runs", WORKER, "--limit", "2", "--before", "2", "--json").stdout)

    assert first.splitlines()[-1] == "older ones: --before 2"
    assert ([each["run_id"] for each in second["runs"]], second["older"]) == ([1], None)


def test_runs_are_filtered_by_outcome_and_time(command: Command, record: Record) -> None:
    record(outcome="failed", started_at=NOW - timedelta(hours=3), finished_at=NOW - timedelta(hours=3))
    failed = record(outcome="failed")
    record(outcome="done")

    found = json.loads(command("runs", "--outcome", "failed", "--since", "2h", "--json").stdout)["runs"]

    assert [each["run_id"] for each in found] == [failed]
    assert command("runs", "--outcome", "lost").stdout == "no runs match\n"


def test_details_of_a_failed_run_end_with_rejected_records_and_traceback(command: Command, record: Record) -> None:
    group = {"cause": "odd", "rows": 12, "error": "odd row", "records": [{"id": 7}]}
    failed = record(
        outcome="failed", error="boom", host="app-1", pid=4711, rejected=[group], traceback="Traceback\n  File x\n"
    )

    shown = command("runs", str(failed)).stdout
    answer = json.loads(command("runs", str(failed), "--json").stdout)

    assert shown.endswith('\nrejected: 12 records: odd row\n  {"id": 7}\n\nTraceback\n  File x\n')
    assert "app-1:4711" in shown
    assert (answer["host"], answer["pid"], answer["traceback"]) == ("app-1", 4711, "Traceback\n  File x\n")
    assert answer["rejected"] == [group]


def test_run_details_show_all_ledger_columns(command: Command, record: Record) -> None:
    first = record(message_id="m-1", outcome="lost", reason="taken_over", epoch=6, counts={"deleted_rows": 100})
    second = record(
        started_at=NOW,
        message_id="m-1",
        outcome="failed",
        reason="boom",
        error="boom",
        epoch=7,
        counts={"deleted_rows": 5, "batches": 1},
        cursor={"pass": "user_statuses", "after": ["2026-01-01", "9"]},
        backlog=12,
        backlog_exact=False,
    )

    shown = command("runs", str(second)).stdout
    answer = json.loads(command("runs", str(second), "--json").stdout)

    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert shown.startswith(f"run {second} of {WORKER}: failed: boom\n")
    assert f"the schedule sent it; it took over from lost run {first}" in shown
    assert "result: it failed: boom" in shown and "next: its message is retried" in shown
    assert {"trigger schedule", "message id m-1", "lease epoch 7", "counts deleted_rows 5, batches 1"} <= set(lines)
    assert {"cursor in user_statuses, after 2026-01-01, 9", "backlog at the end at least 12", "error boom"} <= set(
        lines
    )
    assert any(line.startswith("heartbeat ") and line.endswith(" ago") for line in lines)
    assert [each["run_id"] for each in answer["attempts"]] == [first, second]
    assert answer["cursor"]["after"] == ["2026-01-01", "9"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs", "4711"], "there is no run 4711"),
        (["runs", "4711", "--since", "2h"], "run 4711 is a single run"),
        (["runs", "user_status_cleanup.bach"], f"did you mean {WORKER}?"),
        (["runs", "--since", "soon"], "'soon' is not a time; it should be such as 2h, 3d"),
        (["runs", "--outcome", "good"], "'good' is not one of"),
        (["runs", "--database", "ci"], "there is no database 'ci'; the databases are main"),
        (["runs", "4711", "--trigger", "cli"], "run 4711 is a single run"),
    ],
)
def test_wrong_runs_option_is_one_error_line(command: Command, record: Record, arguments: list[str], said: str) -> None:
    record(outcome="done")

    refused = command(*arguments)

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert said in refused.stderr


def test_why_names_a_manual_run_after_the_last_tick(command: Command, add: Callable[[int], None]) -> None:
    yearly = f'{{"{WORKER}": {{"schedule": "0 0 1 1 *"}}}}'
    add(3)
    run_id = json.loads(command("run", WORKER, "--json").stdout)["run_id"]

    shown = command("why", WORKER, WORKERS=yearly).stdout
    explained = command("runs", str(run_id), WORKERS=yearly).stdout

    (since,) = (line for line in shown.splitlines() if line.startswith("since then: "))
    assert f"run {run_id}, " in since and "trigger cli: done; it completed" in since
    assert explained.startswith(f"run {run_id} of {WORKER}: done\nstarted: it was started by hand: housekeeping run\n")
    assert "next: the next tick is " in explained


def test_completed_run_with_failed_rows_names_the_place_of_their_reasons(command: Command, record: Record) -> None:
    run_id = record(outcome="done", counts={"failed": 2})

    shown = command("runs", str(run_id)).stdout

    assert "it completed; 2 rows failed, housekeeping status shows why (REJECTED)" in shown


def test_errors_name_the_last_run_of_each_cause(command: Command, record: Record) -> None:
    for _ in range(2):
        last = record(outcome="failed", reason="database: gone", error="relation 4711 is gone")

    [line] = [each for each in command("errors").stdout.splitlines() if "is gone" in each]

    assert line.split()[:2] == ["-", "2"] and str(last) in line.split()


def test_errors_say_in_one_line_each_what_is_missing(command: Command, record: Record) -> None:
    record(outcome="failed", reason="database: gone", error="relation 4711 is gone")

    shown = command("errors", REDIS_URL="unix:///nowhere/redis.sock")

    assert (shown.returncode, "is gone" in shown.stdout) == (0, True)
    [line] = shown.stderr.splitlines()
    assert line.startswith("housekeeping: warning: dead letters are missing: Redis did not answer: ")
    assert line.endswith("No such file or directory")
