"""The command ``housekeeping purge``."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from tests.acceptance.conftest import Command
from tests.acceptance.processes import eventually
from tests.acceptance.session_sweeps import NAME, sessions_module
from tests.internals.database import Database
from tests.internals.ledger import Run

EXPIRED = "expires_at < now()"
#: Hold of three sessions.
WEEK_OLD = """lambda row: row.expires_at < SQL("now() - interval '7 days'")"""


@pytest.fixture(autouse=True)
def sessions(postgres: Database) -> None:
    """Twelve sessions, of which ten have expired."""
    postgres.execute_sql(
        "CREATE TABLE sessions (id integer PRIMARY KEY, expires_at timestamptz NOT NULL);"
        "INSERT INTO sessions SELECT n, now() + (n - 10.5) * interval '1 day' FROM generate_series(1, 12) AS n"
    )


def left(postgres: Database) -> int:
    number: int = postgres.execute_sql("SELECT count(*) FROM sessions").fetchone()[0]
    return number


def test_dry_run_shows_the_plan_and_deletes_nothing(command: Command, postgres: Database) -> None:
    shown = command("purge", "sessions", "--where", EXPIRED, "--dry-run")
    dry = json.loads(command("purge", "sessions", "--where", EXPIRED, "--dry-run", "--json").stdout)

    assert shown.returncode == 0
    assert "purge:sessions" in shown.stdout
    assert "index: sessions_pkey" in shown.stdout
    assert "statement: WITH" in shown.stdout
    assert (dry["dry_run"], dry["counts"]["deleted_rows"], dry["plan"]["where"]) == (True, 10, EXPIRED)
    assert left(postgres) == 12


def test_purge_with_yes_deletes_and_prints_the_result(command: Command, postgres: Database) -> None:
    finished = command("purge", "sessions", "--where", EXPIRED, "--yes", "--batch-size", "4", "--json")

    result = json.loads(finished.stdout)
    assert (finished.returncode, result["worker"], result["outcome"]) == (0, "purge:sessions", "done")
    assert (result["counts"]["deleted_rows"], left(postgres)) == (10, 2)
    assert "purge:sessions" in command("runs", "purge:sessions").stdout


def test_rows_on_hold_by_a_declared_sweep_stay(command: Command, tmp_path: Path, postgres: Database) -> None:
    (tmp_path / "holding_shop.py").write_text(sessions_module(table="sessions", hold=WEEK_OLD))

    finished = command("purge", "sessions", "--where", EXPIRED, "--yes", SWEEPS="holding_shop")

    assert (finished.returncode, left(postgres)) == (0, 5)
    assert f"rows on hold by {NAME} stay; --ignore-holds deletes them, too" in finished.stdout
    again = command("purge", "sessions", "--where", EXPIRED, "--ignore-holds", "--yes", SWEEPS="holding_shop")
    assert (again.returncode, left(postgres), "on hold" in again.stdout) == (0, 2, False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "name the table"),
        (["sessions"], "--where is missing"),
        (["sessions", "--where", "true; select 1", "--yes"], "semicolon"),
        (["sessions", "--where", "nothing = 1", "--yes"], "no condition on sessions"),
        (["sessions", "--where", "true"], "add --yes"),
        (["sessions", "--where", "true", "--json"], "add --yes"),
        (["--resume", "abc"], "ID of a run"),
        (["--resume", "77"], "no run 77"),
        (["--resume", "77", "--where", "true"], "leave it out"),
        (["sessions", "--resume", "77"], "leave it out"),
        (["--resume", "77", "--ignore-holds"], "leave it out"),
        (["sessions", "--where", "true", "--database", "x"], "no database 'x'"),
    ],
)
def test_wrong_usage_is_one_line(command: Command, postgres: Database, arguments: list[str], problem: str) -> None:
    finished = command("purge", *arguments)

    lines = finished.stderr.splitlines()
    assert (finished.returncode, problem in lines[-1], len(lines) <= 2) == (2, True, True)
    assert left(postgres) == 12


def test_installation_that_only_purges_misses_no_process(command: Command, postgres: Database) -> None:
    command("purge", "sessions", "--where", EXPIRED, "--yes")

    status = command("status", "--json", "--fail-on-alert")

    assert (status.returncode, json.loads(status.stdout)["alerts"]) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "exit_code", "rows"), [("y\n", 0, 2), ("n\n", 1, 12)])
def test_terminal_is_asked_for_a_confirmation(
    environment: dict[str, str], tmp_path: Path, postgres: Database, answer: str, exit_code: int, rows: int
) -> None:
    terminal, inside = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "housekeeping", "purge", "sessions", "--where", EXPIRED],
            env=environment,
            cwd=tmp_path,
            stdin=inside,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(terminal, answer.encode())
        _, asked = process.communicate(timeout=30)
    finally:
        os.close(terminal)
        os.close(inside)

    assert "Delete 10 rows of sessions?" in asked
    assert (process.returncode, left(postgres)) == (exit_code, rows)


@pytest.fixture
def purging(
    environment: dict[str, str], tmp_path: Path, postgres: Database, admin: Connection
) -> Iterator[subprocess.Popen[bytes]]:
    """Purge that has committed a batch and hangs in the second one."""
    postgres.execute_sql(
        "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF OLD.id = 5 THEN PERFORM pg_sleep(25); END IF; RETURN OLD; END';"
        "CREATE TRIGGER hang BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION hang()"
    )
    arguments = ["purge", "sessions", "--where", EXPIRED, "--yes", "--batch-size", "4", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", *arguments],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: left(postgres) == 8)
        yield process
    finally:
        process.kill()
        process.wait()
        end_hanging_statement(admin, postgres)


def end_hanging_statement(admin: Connection, postgres: Database) -> None:
    with admin.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ 'sessions'"
        )
    free = "SELECT count(*) FROM (SELECT FROM sessions FOR UPDATE SKIP LOCKED) AS free"
    eventually(lambda: postgres.execute_sql(free).fetchone()[0] == left(postgres))
    postgres.execute_sql("DROP TRIGGER IF EXISTS hang ON sessions")


@pytest.mark.slow
@pytest.mark.parametrize("suspended", [False, True])
def test_purge_is_not_resumed_beside_its_living_process(
    command: Command, purging: subprocess.Popen[bytes], suspended: bool
) -> None:
    if suspended:
        os.kill(purging.pid, signal.SIGSTOP)
    [begun] = Run.select()

    refused = command("purge", "--resume", str(begun.id))

    assert (refused.returncode, f"may still be at work ({begun.host}:{purging.pid})" in refused.stderr) == (2, True)
    assert [run.outcome for run in Run.select()] == [None]


@pytest.mark.slow
def test_killed_purge_is_resumed_after_a_minute_of_silence(
    command: Command, postgres: Database, admin: Connection, purging: subprocess.Popen[bytes]
) -> None:
    purging.kill()
    purging.wait()
    end_hanging_statement(admin, postgres)
    [begun] = Run.select()

    at_once = command("purge", "--resume", str(begun.id))
    Run.update(heartbeat_at=begun.heartbeat_at.replace(year=2020)).execute()
    resumed = command("purge", "--resume", str(begun.id), "--json")

    assert (at_once.returncode, "once it has been silent for 60 s" in at_once.stderr) == (2, True)
    assert (resumed.returncode, json.loads(resumed.stdout)["outcome"], left(postgres)) == (0, "done", 2)
    first, second = Run.select().order_by(Run.id)
    assert (first.outcome, first.counts["deleted_rows"], second.counts["deleted_rows"]) == ("lost", 4, 6)
    assert second.counts["purge"]["resumes"] == begun.id
