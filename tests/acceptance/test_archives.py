"""Commands about archives: create them, check them, and restore what a run has moved there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.acceptance.processes import eventually, wait_for_line
from tests.acceptance.session_sweeps import NAME as SWEEP
from tests.acceptance.session_sweeps import sessions_module
from tests.internals.database import Database
from tests.internals.ledger import Run

MODULE: Final = sessions_module('Delete(archive_to="old_sessions", archive_keep=timedelta(days=90))')


class Housekeeping(Protocol):
    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def housekeeping(command: Command, postgres: Database, tmp_path: Path) -> Housekeeping:
    """Commands of an application with eight expired sessions and two others."""
    (tmp_path / "archived_shop.py").write_text(MODULE)
    postgres.execute_sql(
        "CREATE TABLE user_session (token text PRIMARY KEY, expires_at timestamptz NOT NULL, note text); "
        "INSERT INTO user_session SELECT 'token ' || n, now() + (n - 8) * interval '1 hour' - interval '1 minute', "
        "'note ' || n FROM generate_series(1, 10) AS n"
    )
    return lambda *arguments: command(*arguments, SWEEPS="archived_shop")


@pytest.fixture
def archived(housekeeping: Housekeeping) -> str:
    """The id of a run that has archived eight sessions."""
    assert housekeeping("init", "--with-archives").returncode == 0
    result = json.loads(housekeeping("run", SWEEP, "--json").stdout)
    assert result["counts"]["archived_rows"] == 8
    return str(result["run_id"])


def count(postgres: Database, table: str) -> Any:
    return postgres.execute_sql(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_init_prints_the_statements_of_a_missing_archive(housekeeping: Housekeeping, postgres: Database) -> None:
    finished = housekeeping("init")

    assert 'archive "old_sessions" is missing; to correct that, add --with-archives or execute:' in finished.stdout
    assert (
        'CREATE TABLE "old_sessions" ("token" text, "expires_at" timestamp with time zone, "note" text, '
        '"archived_at" timestamp with time zone NOT NULL, "archived_by_run" bigint NOT NULL, '
        'PRIMARY KEY ("archived_by_run", "archived_at", "token"));\n'
        'CREATE INDEX ON "old_sessions" ("archived_at", "token", "archived_by_run");\n'
    ) in finished.stdout
    assert not postgres.table_exists("old_sessions")


@pytest.mark.slow
def test_init_prints_the_sql_of_an_archive_that_it_would_create(housekeeping: Housekeeping, postgres: Database) -> None:
    without, printed = housekeeping("init", "--sql"), housekeeping("init", "--sql", "--with-archives").stdout

    assert "CREATE" not in without.stdout and 'archive "old_sessions" is missing' in without.stderr
    comment, statements = printed.rsplit('-- archive "old_sessions"\n', 1)
    assert comment.endswith(": up to date\n") and not postgres.table_exists("old_sessions")
    postgres.execute_sql(statements)
    assert "archive" not in housekeeping("init", "--with-archives").stdout


@pytest.mark.slow
def test_init_adds_a_missing_column(housekeeping: Housekeeping, postgres: Database, archived: str) -> None:
    postgres.execute_sql("ALTER TABLE user_session ADD COLUMN ip inet")

    assert 'ALTER TABLE "old_sessions" ADD COLUMN "ip" inet;\n' in housekeeping("init").stdout
    assert 'archive "old_sessions": missing columns added\n' in housekeeping("init", "--with-archives").stdout
    assert housekeeping("run", SWEEP).returncode == 0


@pytest.mark.slow
def test_plan_warns_of_a_missing_archive(housekeeping: Housekeeping) -> None:
    housekeeping("init")

    planned = json.loads(housekeeping("plan", SWEEP, "--json").stdout)

    assert planned["backlog"] == 8
    text = 'archive "old_sessions" is missing; create it: housekeeping init --with-archives'
    assert (planned["outcome"], planned["reason"]) == ("failed", "archive")
    assert {"check": "archive", "effect": "fails", "text": text} in planned["checks"]


@pytest.mark.slow
def test_restore_prints_its_result_and_pauses_the_sweep(
    housekeeping: Housekeeping, postgres: Database, archived: str
) -> None:
    finished = housekeeping("restore", archived)

    assert finished.returncode == 0 and "restored 8" in finished.stdout
    assert f"{SWEEP} is paused, because it would delete the rows again; housekeeping resume {SWEEP}" in finished.stderr
    assert (count(postgres, "user_session"), count(postgres, "old_sessions")) == (10, 0)
    assert json.loads(housekeeping("run", SWEEP, "--json").stdout)["reason"] == "paused"


def test_result_of_a_restore_as_json(housekeeping: Housekeeping, archived: str) -> None:
    finished = housekeeping("restore", archived, "--where", "token <> 'token 3'", "--no-pause", "--json")

    result = json.loads(finished.stdout)
    assert (result["worker"], result["outcome"], result["dry_run"]) == (f"restore:{SWEEP}", "done", False)
    assert (result["counts"]["restored"], result["counts"]["conflicts"]) == (7, 0)
    assert Run.get_by_id(result["run_id"]).worker == f"restore:{SWEEP}"


@pytest.mark.slow
def test_run_that_left_the_ledger_is_restored(housekeeping: Housekeeping, postgres: Database, archived: str) -> None:
    Run.delete().execute()

    assert housekeeping("restore", archived).returncode == 0
    assert count(postgres, "user_session") == 10


@pytest.mark.slow
def test_restore_of_another_run_ends_with_one_line(housekeeping: Housekeeping, archived: str) -> None:
    restored = json.loads(housekeeping("restore", archived, "--json").stdout)["run_id"]
    now = Run.get().started_at
    other = Run.create(worker="user_status_cleanup.batch", trigger="cli", started_at=now, heartbeat_at=now)

    for run_id, line in {
        "x": "'x' is no ID of a run",
        "999": "there is no run 999",
        str(restored): f"run {restored} has restored rows; give the run that archived them",
        str(other.id): "user_status_cleanup.batch has no archive, so its rows cannot be restored",
    }.items():
        finished = housekeeping("restore", run_id)
        assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (2, "", 1)
        assert finished.stderr.startswith(f"housekeeping: {line}")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_restore_is_continued_by_the_same_command(
    archived: str,
    housekeeping: Housekeeping,
    postgres: Database,
    admin: Connection,
    settings: Settings,
    environment: dict[str, str],
    tmp_path: Path,
    sent: signal.Signals,
) -> None:
    limits = {SWEEP: {"batch_size": 2, "target_batch_s": None}}
    variables = {"HOUSEKEEPING_SWEEPS": "archived_shop", "HOUSEKEEPING_WORKERS": json.dumps(limits)}
    command = [sys.executable, "-m", "housekeeping", "restore", archived, "--json"]
    admin.autocommit = False
    with admin, admin.cursor() as cursor:
        # The third batch waits for this key until the transaction ends.
        cursor.execute(f"INSERT INTO {settings.namespace}.user_session VALUES ('token 4', now(), 'new')")
        process = subprocess.Popen(
            command,
            env={**environment, **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        eventually(lambda: count(postgres, "user_session") == 6)
        process.send_signal(sent)
        wait_for_line(process, "the run ends after its batch")
        cursor.execute("ROLLBACK")
        said, logged = process.communicate(timeout=30)
    admin.autocommit = True

    result = json.loads(said)
    assert (process.returncode, result["outcome"], result["reason"]) == (0, "partial", "shutdown")
    assert result["counts"]["restored"] == 6 and "the same command continues" in logged
    again = json.loads(housekeeping("restore", archived, "--json").stdout)
    assert (again["outcome"], again["counts"]["restored"], again["counts"]["conflicts"]) == ("done", 2, 0)
    assert (count(postgres, "user_session"), count(postgres, "old_sessions")) == (10, 0)


@pytest.mark.slow
def test_run_shows_its_archived_rows_page_by_page_until_they_are_restored(
    housekeeping: Housekeeping, archived: str
) -> None:
    first, second = (housekeeping("runs", archived, "--limit", "5", *more) for more in ((), ("--skip", "5")))
    undo = json.loads(housekeeping("runs", archived, "--json").stdout)["undo"]
    housekeeping("restore", archived, "--no-pause")
    after = housekeeping("runs", archived)

    line = f"undo: these archived rows can be restored: 8 of user_session: housekeeping restore {archived}\n"
    assert line in first.stdout and "further ones: add --skip 5\n" in first.stdout
    assert (first.stdout.count('  {"token": '), second.stdout.count('  {"token": ')) == (5, 3)
    assert "further ones" not in second.stdout
    assert undo["command"] == f"housekeeping restore {archived}" and len(undo["archived"][0]["keys"]) == 8
    assert "undo: its changes cannot be undone: its rows are no longer in the archive" in after.stdout


@pytest.mark.slow
def test_resume_after_a_restore_warns_of_the_restored_rows(housekeeping: Housekeeping, archived: str) -> None:
    housekeeping("restore", archived)

    resumed = housekeeping("resume", SWEEP)

    assert resumed.stdout == f"{SWEEP} resumes at its next tick\n"
    assert (
        f"warning: {SWEEP}: the next run processes 8 restored rows again if still stale, of run {archived}\n"
        in resumed.stderr
    )
