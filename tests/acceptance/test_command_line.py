from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.foundation.db import Database
from housekeeping.foundation.settings import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus

WORKER = "user_status_cleanup.batch"
#: Runs the command line to its end.
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(environment: dict[str, str], tmp_path: Path) -> Command:
    """``housekeeping`` with these arguments, in an empty folder; settings by name come on top of this test's own."""

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        own = {f"HOUSEKEEPING_{name}": value for name, value in settings.items()}
        return subprocess.run(
            [sys.executable, "-m", "housekeeping", *arguments],
            env=environment | own,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def made(postgres: Database) -> None:
    """The library's own tables and the application's, as ``init --with-tables`` makes them, only faster."""
    postgres.create_tables([UserStatus])


@pytest.fixture
def add(made: None, admin: Connection, settings: Settings) -> Callable[[int], None]:
    """Adds this many due statuses."""

    def insert(count: int) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {settings.namespace}.user_statuses (user_id, clear_status_at) "
                f"SELECT n, now() - interval '1 second' * n FROM generate_series(1, {count}) AS n"
            )

    return insert


def _logged(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in finished.stderr.splitlines()]


# Errors: one line on stderr, nothing on stdout, the right status.


@pytest.mark.parametrize(
    ("arguments", "given", "status", "line"),
    [
        (["run", "nope"], {}, 2, "there is no worker 'nope'; the workers are user_status_cleanup.batch, "),
        (["run", WORKER, "7"], {}, 2, "takes no argument"),
        (["status"], {}, 2, "is not in this database; run: housekeeping init"),
        (["scheduler"], {}, 2, "is not in this database; run: housekeeping init"),
        (["plan", WORKER], {}, 2, 'relation "user_statuses" does not exist; name yours in HOUSEKEEPING_WORKERS'),
        (["status"], {"DATABASE_URL": ""}, 2, "HOUSEKEEPING_DATABASE_URL is not set; it should be a URL such as"),
        (["list"], {"REDIS_URL": "http://x"}, 2, "HOUSEKEEPING_REDIS_URL is 'http://x'; it should be"),
        (["list"], {"WORKERS": '{"nope": {}}'}, 2, 'HOUSEKEEPING_WORKERS["nope"] is not a worker; the workers are'),
        (["list"], {"WORKERS": f'{{"{WORKER}": {{"lease_ttl_s": 9}}}}'}, 2, "this worker has no use for it"),
        (["plan", WORKER], {"DATABASE_URL": "postgresql://me:hunter2@localhost:1/db"}, 1, "PostgreSQL did not answer"),
        (["status"], {"DATABASE_URL": "postgresql://me:hunter2@host.invalid/db"}, 1, "PostgreSQL did not answer: "),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    command: Command, arguments: list[str], given: dict[str, str], status: int, line: str
) -> None:
    finished = command(*arguments, **given)

    assert (finished.returncode, finished.stdout) == (status, "")
    assert finished.stderr.startswith("housekeeping: ") and finished.stderr.count("\n") == 1
    assert line in finished.stderr and "hunter2" not in finished.stderr


def test_a_wrong_database_name_is_said_in_one_line(command: Command, settings: Settings) -> None:
    assert settings.database_url is not None

    finished = command("status", DATABASE_URL=f"{settings.database_url}&dbname=no_such_database")

    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (1, "", 1)
    assert 'database "no_such_database" does not exist' in finished.stderr


def test_a_traceback_is_shown_only_when_asked_for(command: Command) -> None:
    finished = command("--debug", "run", "nope")

    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


def test_a_worker_process_without_redis_ends_with_one_line(command: Command, made: None) -> None:
    finished = command("worker", REDIS_URL="redis://:hunter2@localhost:1/0")

    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (1, "", 1)
    assert finished.stderr.startswith("housekeeping: Redis did not answer: ")


def test_a_mistyped_setting_in_the_file_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HOUSEKEEPING_LOG_LEVL=DEBUG\n")

    finished = command("list")

    assert finished.returncode == 2
    assert finished.stderr == (
        "housekeeping: HOUSEKEEPING_LOG_LEVL is not a setting (in .env); did you mean HOUSEKEEPING_LOG_LEVEL?\n"
    )


# run


def test_run_prints_the_result_object_alone_and_logs_on_stderr(command: Command, add: Callable[[int], None]) -> None:
    add(101)

    finished = command("run", WORKER, "--json")

    result = json.loads(finished.stdout)
    assert finished.returncode == 0
    assert list(result) == ["worker", "outcome", "reason", "run_id", "started_at", "duration_s", "counts", "dry_run"]
    assert (result["worker"], result["outcome"], result["reason"]) == (WORKER, "done", None)
    assert (type(result["run_id"]), result["duration_s"] > 0, result["dry_run"]) == (int, True, False)
    assert datetime.fromisoformat(result["started_at"]).utcoffset() is not None
    assert list(result["counts"].items()) == [("deleted_rows", 101), ("batches", 2), ("out_of_time", False)]
    started, *_, ended = _logged(finished)
    assert (started["event"], ended["event"]) == ("Run started", "Run ended")
    assert {started["run_id"], ended["run_id"]} == {result["run_id"]}
    assert ended.items() >= {"level": "info", "worker": WORKER, "deleted_rows": 101, "outcome": "done"}.items()


def test_a_dry_run_is_the_same_object_and_changes_nothing(command: Command, add: Callable[[int], None]) -> None:
    add(101)

    dry = json.loads(command("run", WORKER, "--json", "--dry-run").stdout)
    real = json.loads(command("run", WORKER, "--json").stdout)

    assert (dry["dry_run"], dry["run_id"], dry["counts"]) == (True, None, real["counts"])


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_run_without_a_server_is_a_failed_result(command: Command, options: list[str]) -> None:
    finished = command("run", WORKER, "--json", *options, DATABASE_URL="postgresql://me:hunter2@localhost:1/db")

    result = json.loads(finished.stdout)
    assert (finished.returncode, result["outcome"], result["run_id"]) == (1, "failed", None)
    assert "Connection refused" in result["reason"]
    assert finished.stderr.splitlines()[-1].startswith(f"housekeeping: {WORKER} failed: ")
    assert "hunter2" not in finished.stdout + finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize(("prepared", "way_out"), [(False, "run: housekeeping init"), (True, "init --with-tables")])
def test_a_run_without_its_tables_is_a_failed_result_that_names_the_way_out(
    command: Command, prepared: bool, way_out: str
) -> None:
    if prepared:
        command("init")

    finished = command("run", WORKER, "--json")

    assert (finished.returncode, json.loads(finished.stdout)["outcome"]) == (2, "failed")
    assert finished.stderr.splitlines()[-1].endswith(way_out)


def test_a_disabled_worker_is_skipped_unless_forced(command: Command, made: None) -> None:
    off = f'{{"{WORKER}": {{"enabled": false}}}}'

    skipped, forced = (command("run", WORKER, "--json", *force, WORKERS=off) for force in ([], ["--force"]))

    assert [json.loads(each.stdout)["outcome"] for each in (skipped, forced)] == ["skipped", "done"]
    assert (skipped.returncode, json.loads(skipped.stdout)["reason"]) == (0, "disabled")


@pytest.fixture
def slow_run(
    environment: dict[str, str], tmp_path: Path, add: Callable[[int], None], admin: Connection, settings: Settings
) -> Iterator[subprocess.Popen[str]]:
    """A run of many batches that has begun and waits in its first: another session keeps its commit waiting."""
    add(500)
    with admin.cursor() as cursor:
        cursor.execute(
            f"CREATE FUNCTION {settings.namespace}.wait() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN OLD; END $$"
        )
        cursor.execute(
            f"CREATE TRIGGER wait BEFORE DELETE ON {settings.namespace}.user_statuses "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {settings.namespace}.wait()"
        )
        cursor.execute("SELECT pg_advisory_lock(4711)")
    running = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "run", WORKER, "--json"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    assert "Run started" in running.stderr.readline()
    yield running
    running.kill()
    running.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_told_to_stop_ends_after_its_batch(
    slow_run: subprocess.Popen[str], admin: Connection, number: signal.Signals
) -> None:
    slow_run.send_signal(number)
    with admin.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock(4711)")
    said, _ = slow_run.communicate(timeout=30)

    result = json.loads(said)
    assert (slow_run.returncode, result["outcome"], result["reason"]) == (0, "partial", "shutdown")
    assert result["counts"] == {"deleted_rows": 100, "batches": 1, "out_of_time": False}


def test_progress_is_shown_on_a_terminal_and_the_result_stays_alone(
    environment: dict[str, str], tmp_path: Path, add: Callable[[int], None]
) -> None:
    add(5_000)
    ours, theirs = pty.openpty()

    running = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "run", WORKER, "--json"],
        env=environment | {"TERM": "xterm", "LC_ALL": "C", "HOUSEKEEPING_LOG_FORMAT": "console"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    said, _ = running.communicate(timeout=30)

    assert json.loads(said)["counts"]["deleted_rows"] == 5_000
    assert f"{WORKER}: deleted_rows " in shown
    assert "Run ended" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


# list, plan, status


def test_list_works_without_a_database(command: Command) -> None:
    finished = command("list", DATABASE_URL="", REDIS_URL="")

    assert (finished.returncode, finished.stderr) == (0, "")
    (shown,) = [line for line in finished.stdout.splitlines() if line.startswith(WORKER)]
    assert shown.split()[1:6] == ["*"] * 5
    assert shown.split()[-1] == "unknown"


def test_list_shows_what_the_settings_say(command: Command, made: None) -> None:
    set_to = json.dumps({WORKER: {"batch_size": 7, "max_runtime_s": 90, "schedule": "0 3 * * *", "enabled": True}})

    rows = json.loads(command("list", "--json", WORKERS=set_to, TIMEZONE="Asia/Tokyo").stdout)

    (shown,) = [row for row in rows if row["worker"] == WORKER]
    assert (shown["batch_size"], shown["max_runtime_s"], shown["state"]) == (7, 90, "on")
    assert datetime.fromisoformat(shown["next_tick"]).hour == 18


def test_on_a_narrow_terminal_nothing_is_cut_off(command: Command, environment: dict[str, str]) -> None:
    environment["COLUMNS"] = "20"

    shown = command("list").stdout

    assert [WORKER, "*", "*", "*", "*", "*"] in [line.split()[:6] for line in shown.splitlines()]


def test_what_goes_to_a_file_is_not_wrapped_and_has_no_colours(command: Command, add: Callable[[int], None]) -> None:
    add(20_000)
    command("run", WORKER)

    shown = command("status").stdout

    assert "deleted_rows 20,000, batches 200" in shown
    assert "\x1b" not in shown


def test_plan_shows_what_a_run_would_do(command: Command, add: Callable[[int], None]) -> None:
    add(201)

    shown = command("plan", WORKER)
    planned = json.loads(command("plan", WORKER, "--json").stdout)

    assert shown.returncode == 0
    assert " 201 " in shown.stdout
    assert (planned["worker"], planned["stale_rows"], planned["batches"]) == (WORKER, 201, 3)


def test_status_shows_last_run_backlog_queues_and_alarms(command: Command, add: Callable[[int], None]) -> None:
    command("run", WORKER)
    add(10_001)

    status = json.loads(command("status", "--json").stdout)
    shown = command("status").stdout

    (worker,) = [each for each in status["workers"] if each["worker"] == WORKER]
    assert (worker["last_run"]["outcome"], worker["backlog"], worker["backlog_exact"]) == ("done", 10_000, False)
    assert (status["queues"]["cronjob"], status["redis"]) == ({"waiting": 0, "delayed": 0, "dead": 0}, "ok")
    assert f"ALARM {WORKER}: more than 10,000 rows wait" in shown


def test_status_without_redis_shows_the_rest(command: Command, made: None) -> None:
    finished = command("status", REDIS_URL="redis://:hunter2@localhost:1/0")

    assert finished.returncode == 0
    assert WORKER in finished.stdout and "Redis did not answer" in finished.stdout
    assert "hunter2" not in finished.stdout + finished.stderr


# init and help


def test_init_says_what_it_did_and_may_be_repeated(command: Command, settings: Settings) -> None:
    first, second = (command("init", "--with-tables").stdout.splitlines() for _ in range(2))

    assert first[0] == f"schema {settings.schema_name}: made"
    assert second[0] == f"schema {settings.schema_name}: is up to date"
    assert ("table user_statuses: made" in first, "table user_statuses: is there" in second) == (True, True)


def test_the_help_has_each_command_on_a_line_that_fits(command: Command) -> None:
    lines = command("--help").stdout.split("Commands:\n")[1].split("\n\n")[0].splitlines()

    assert [line.split()[0] for line in lines] >= [
        "demo",
        "init",
        "list",
        "plan",
        "run",
        "scheduler",
        "status",
        "worker",
    ]
    assert [line for line in lines if len(line) > 80 or not line.endswith(".") or line.endswith("...")] == []


def test_the_processes_of_dramatiq_and_periodiq_say_in_one_line_what_is_wrong(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["HOUSEKEEPING_DATABASE_URL"] = "mysql://me:hunter2@host/db"

    finished = subprocess.run(
        [str(Path(sys.executable).with_name("periodiq")), "housekeeping.app"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert finished.returncode == 2
    assert "housekeeping: HOUSEKEEPING_DATABASE_URL is 'mysql://me:***@host/db'" in finished.stderr
    assert "Traceback" not in finished.stderr and "hunter2" not in finished.stderr
