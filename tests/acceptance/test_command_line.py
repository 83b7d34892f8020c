"""Errors, help and output formats of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.acceptance.conftest import Command

WORKER = "user_status_cleanup.batch"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "given", "status", "line"),
    [
        (["run", "nope"], {}, 2, "there is no worker 'nope'; the workers are user_status_cleanup.batch, "),
        (["run", WORKER, "7"], {}, 2, "takes no argument"),
        (["lst"], {}, 2, "No such command 'lst'"),
        (["--nope"], {}, 2, "No such option"),
        (["plan"], {}, 2, "Missing argument 'NAME' (python -m housekeeping plan --help)"),
        (["leases", "lst"], {}, 2, "No such command 'lst'"),
        (["worker", "-t", "many"], {}, 2, "'many' is not a valid integer range (python -m housekeeping worker --help)"),
        (["list", "x"], {}, 2, "Got unexpected extra argument (x) (python -m housekeeping list --help)"),
        (["status"], {}, 2, "is not in this database; run: housekeeping init"),
        (["scheduler"], {}, 2, "is not in this database; run: housekeeping init"),
        (["plan", WORKER], {}, 2, "not set up: table user_statuses is not in this database; name your table in "),
        (["status"], {"DATABASE_URL": ""}, 2, "HOUSEKEEPING_DATABASE_URL is not set; it should be a URL such as"),
        (["list"], {"REDIS_URL": "http://x"}, 2, "HOUSEKEEPING_REDIS_URL is 'http://x'; it should be"),
        (["list"], {"WORKERS": '{"nope": {}}'}, 2, 'HOUSEKEEPING_WORKERS["nope"] is not a worker; the workers are'),
        (["list"], {"WORKERS": f'{{"{WORKER}": {{"lease_ttl_s": 9}}}}'}, 2, "this worker has no use for it"),
        (["plan", WORKER], {"DATABASE_URL": "postgresql://me:hunter2@localhost:1/db"}, 1, "PostgreSQL did not answer"),
        (["status"], {"DATABASE_URL": "postgresql://me:hunter2@host.invalid/db"}, 1, "PostgreSQL did not answer: "),
    ],
)
def test_command_error_is_one_line(
    command: Command, arguments: list[str], given: dict[str, str], status: int, line: str
) -> None:
    finished = command(*arguments, **given)

    assert (finished.returncode, finished.stdout) == (status, "")
    assert finished.stderr.startswith("housekeeping: ") and finished.stderr.count("\n") == 1
    assert line in finished.stderr and "hunter2" not in finished.stderr


def test_traceback_is_shown_only_with_debug(command: Command) -> None:
    finished = command("--debug", "run", "nope")

    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


def test_worker_process_rejects_an_unknown_queue(command: Command, made: None) -> None:
    ended = command("worker", "--queues", "cronjobs")

    assert ended.returncode == 2
    assert "there is no queue 'cronjobs'; the queues are cronjob, git_refs" in ended.stderr


def test_worker_process_without_redis_exits_with_one_line(command: Command, made: None) -> None:
    finished = command("worker", REDIS_URL="redis://:hunter2@localhost:1/0")

    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (1, "", 1)
    assert finished.stderr.startswith("housekeeping: Redis did not answer: ")


def test_mistyped_setting_in_env_file_is_rejected(command: Command, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HOUSEKEEPING_LOG_LEVL=DEBUG\n")

    finished = command("list")

    assert finished.returncode == 2
    assert finished.stderr == (
        "housekeeping: HOUSEKEEPING_LOG_LEVL is not a setting (in .env); did you mean HOUSEKEEPING_LOG_LEVEL?\n"
    )


def test_list_works_without_a_database(command: Command) -> None:
    finished = command("list", DATABASE_URL="", REDIS_URL="")

    assert (finished.returncode, finished.stderr) == (0, "")
    (shown,) = [line for line in finished.stdout.splitlines() if line.startswith(WORKER)]
    assert shown.split()[1:3] == ["every", "minute"]
    assert shown.split()[-1] == "unknown"


def test_list_says_why_the_state_is_unknown(command: Command) -> None:
    finished = command("list")

    assert (finished.returncode, finished.stderr) == (0, "")
    assert "is not in this database; run: housekeeping init" in " ".join(finished.stdout.splitlines()[-1].split())


def test_list_is_complete_while_a_table_is_locked(command: Command, made: None, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute("BEGIN; LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE")
        rows = json.loads(command("list", "--json").stdout)["workers"]
        cursor.execute("ROLLBACK")

    assert {each["worker"]: each["state"] for each in rows}[WORKER] == "on"


@pytest.mark.slow
def test_command_runs_with_closed_output(environment: dict[str, str], tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$0" -m housekeeping list >&-', sys.executable]

    ended = subprocess.run(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_list_shows_configured_limits(command: Command, made: None) -> None:
    set_to = json.dumps({WORKER: {"batch_size": 7, "max_runtime_s": 90, "schedule": "0 3 * * *", "enabled": True}})

    rows = json.loads(command("list", "--json", WORKERS=set_to, TIMEZONE="Asia/Tokyo").stdout)["workers"]

    (shown,) = [row for row in rows if row["worker"] == WORKER]
    assert (shown["batch_size"], shown["max_runtime_s"], shown["state"]) == (7, 90, "on")
    assert shown["schedule_in_words"] == "every day at 03:00"
    ticks = [datetime.fromisoformat(tick) for tick in shown["next_ticks"]]
    assert ticks[0].isoformat() == shown["next_tick"] and [tick.hour for tick in ticks] == [18, 18, 18]


@pytest.mark.slow
def test_list_shows_the_pace_of_a_worker(command: Command, made: None) -> None:
    set_to = json.dumps({WORKER: {"max_rows_per_s": 500, "rest": 0.5}})

    shown, without = command("list", WORKERS=set_to).stdout, command("list").stdout
    rows = json.loads(command("list", "--json", WORKERS=set_to).stdout)["workers"]
    (row,) = [each for each in rows if each["worker"] == WORKER]

    assert "PACE" in shown and "500 rows/s, rest 0.5" in shown and "PACE" not in without
    assert (row["max_rows_per_s"], row["rest"]) == (500, 0.5)


@pytest.mark.slow
def test_status_shows_last_run_backlog_queues_and_alerts(command: Command, add: Callable[[int], None]) -> None:
    command("run", WORKER)
    add(10_001)

    status = json.loads(command("status", "--json").stdout)
    shown = command("status").stdout

    (worker,) = [each for each in status["workers"] if each["worker"] == WORKER]
    assert (worker["last_run"]["outcome"], worker["backlog"], worker["backlog_exact"]) == ("done", 10_000, False)
    empty = {"waiting": 0, "delayed": 0, "dead": 0, "oldest_at": None, "died_at": None}
    assert (status["queues"]["cronjob"], status["redis"]) == (empty, "ok")
    alerts = {(each["worker"], each["name"]): each for each in status["alerts"]}
    assert alerts[WORKER, "backlog"]["text"] == "more than 10,000 rows wait"
    # No process runs here, which explains the backlog.
    assert (
        shown.startswith("No worker process has been seen yet. Start housekeeping worker ")
        and "more than 10,000 rows wait" not in shown
    )


def test_status_without_redis_shows_the_rest(command: Command, made: None) -> None:
    finished = command("status", REDIS_URL="redis://:hunter2@localhost:1/0")

    assert finished.returncode == 0
    assert WORKER in finished.stdout and "Redis did not answer" in finished.stdout
    assert "hunter2" not in finished.stdout + finished.stderr


def test_init_prints_what_it_made_as_json(command: Command, settings: Settings) -> None:
    made = json.loads(command("init", "--with-tables", "--json").stdout)["results"]

    assert made[0] == {"kind": "schema", "name": settings.schema_name, "result": "created", "statements": []}
    assert {"kind": "table", "name": "user_statuses", "result": "created", "statements": []} in made


def test_help_lists_each_command_in_one_line(command: Command) -> None:
    lines = command("--help").stdout.split("Commands:\n")[1].split("\n\n")[0].splitlines()

    assert {line.split()[0] for line in lines} >= {
        "demo",
        "init",
        "list",
        "plan",
        "run",
        "scheduler",
        "status",
        "worker",
    }
    assert [line for line in lines if len(line) > 80 or not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.slow
@pytest.mark.parametrize("shown_by", ["list", "status", "doctor"])
def test_families_without_tables_are_shown_in_a_line_each(command: Command, shown_by: str) -> None:
    command("init")

    shown = command(shown_by)

    lines = [line for line in shown.stdout.splitlines() if "not set up" in line]
    assert len(lines) == 5
    assert WORKER in lines[0] and "table user_statuses is not in this database" in lines[0]
    assert "ALERT user_status" not in shown.stdout


@pytest.mark.parametrize(
    ("settings", "areas"),
    [
        ({"DATABASE_URL": "", "REDIS_URL": ""}, ["postgres", "redis"]),
        ({"DATABASE_URL": ""}, ["postgres"]),
        ({"REDIS_URL": ""}, []),  # an installation on PostgreSQL only
    ],
)
def test_doctor_names_each_missing_url_and_examines_the_rest(
    command: Command, settings: dict[str, str], areas: list[str]
) -> None:
    command("init")

    findings = json.loads(command("doctor", "--json", **settings).stdout)["findings"]

    unset = [each for each in findings if each["text"].endswith("_URL is not set")]
    assert [(each["area"], each["level"]) for each in unset] == [(area, "error") for area in areas]
    examined = {each["area"] for each in findings if each["level"] == "fine"}
    assert examined.isdisjoint(areas) and (not examined) == (len(areas) == 2)


@pytest.mark.slow
def test_why_explains_a_worker_that_is_not_set_up(command: Command) -> None:
    command("init")

    assert "table user_statuses is not in this database" in command("why", WORKER).stdout


@pytest.mark.slow
def test_sample_data_is_added_only_to_empty_tables(command: Command) -> None:
    first, second = (command("init", "--with-tables", "--with-sample-data") for _ in range(2))

    assert first.returncode == 0
    assert "table user_statuses: 300 sample rows" in first.stdout.splitlines()
    assert second.returncode == 2
    assert "table user_statuses already has rows" in second.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--with-sample-data"], "give --with-tables as well"),
        (["--sql", "--with-tables"], "--sql does not include the trial tables of --with-tables"),
    ],
)
def test_wrong_combination_of_options_of_init_is_rejected(command: Command, options: list[str], text: str) -> None:
    refused = command("init", *options)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert text in refused.stderr
