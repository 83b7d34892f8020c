"""Secrets in outputs of commands, processes and pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.acceptance.processes import eventually, started
from tests.command_processes import CommandProcesses
from tests.installation import Installation
from tests.integration.security.secrets_everywhere import (
    COMMANDS,
    COMMANDS_AWAY,
    IN_A_URL,
    WORD,
    command_lines,
    dashboard,
    of,
    of_nowhere,
    pages,
)
from tests.internals.core import PREFIX

pytestmark = pytest.mark.slow

WORKER = "user_status_cleanup.batch"
_HOUSEKEEPING = [sys.executable, "-m", "housekeeping"]
_AWAY = "127.0.0.1:1"


def _output(processes: CommandProcesses, arguments: str, environment: dict[str, str], folder: Path) -> str:
    """Return a command's complete output."""
    ended = processes.run(arguments.split(), environment, folder, timeout_s=120)
    return ended.stdout + ended.stderr


def _ledger(installation: Installation) -> str:
    with installation.admin.cursor() as cursor:
        cursor.execute(f"SELECT string_agg(r::text, '') FROM {installation.settings.schema_name}.runs AS r")
        return str(cursor.fetchone())


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_shows_a_secret(installation: Installation, line: str) -> None:
    said = _output(installation.processes, line, installation.environment | of(installation), installation.folder)

    assert said and WORD not in said
    assert WORD not in _ledger(installation)


@pytest.mark.parametrize("line", COMMANDS_AWAY)
def test_no_command_shows_a_secret_while_servers_are_unavailable(
    command_processes: CommandProcesses, environment: dict[str, str], tmp_path: Path, line: str
) -> None:
    said = _output(command_processes, line, environment | of_nowhere(), tmp_path)

    assert "Connection refused" in said
    assert WORD not in said


def test_dashboard_shows_no_secret_while_servers_are_unavailable(environment: dict[str, str], tmp_path: Path) -> None:
    with dashboard(environment | of_nowhere(), tmp_path / "web.log") as (address, web):
        seen = "".join(pages(address).values())

    assert "Connection refused" in seen
    assert WORD not in seen + web.text()


@pytest.mark.parametrize("url", [f"amqp://me:{IN_A_URL}@{_AWAY}/x", f"redis://me:{IN_A_URL}@{_AWAY}/0"])
@pytest.mark.parametrize("line", ["status", "--debug worker"])
def test_no_command_shows_a_secret_while_the_broker_is_unavailable(
    installation: Installation, url: str, line: str
) -> None:
    environment = installation.environment | of(installation) | {f"{PREFIX}BROKER_URL": url}

    said = _output(installation.processes, line, environment, installation.folder)

    assert "did not answer" in said
    assert WORD not in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", f"mysql://me:{IN_A_URL}@host/db"),
        ("DATABASE_URL", f"postgresql://me:{WORD}/x@host:port/db"),
        ("REDIS_URL", f"redis://me:{WORD}@host:port/0"),
        ("BROKER_URL", f"me:{WORD}@host"),
        ("SENTRY_DSN", f"ftp://me:{WORD}@host/1"),
        ("WEB_TOKEN", f"{WORD} with spaces"),
        ("OBJECT_STORES", json.dumps({"a": {"url": "s3://b", "options": {"aws_secret_access_key": [WORD]}}})),
        ("OBJECT_STORES", json.dumps({"a": {"url": "s3://b", "options": {"no_such_token": WORD}}})),
    ],
)
def test_invalid_setting_is_named_without_its_secret(
    command_processes: CommandProcesses, environment: dict[str, str], tmp_path: Path, name: str, value: str
) -> None:
    said = _output(command_processes, "--debug list", environment | {f"{PREFIX}{name}": value}, tmp_path)

    assert f"{PREFIX}{name}" in said
    assert WORD not in said


def test_error_that_quotes_a_password_is_masked_in_every_output(installation: Installation, tmp_path: Path) -> None:
    with installation.admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {installation.settings.namespace}")
        cursor.execute(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION "
            f"'cannot reach redis://me:{WORD}@cache/0' USING ERRCODE = '53100'; END $$"
        )
        cursor.execute("CREATE TRIGGER fail BEFORE DELETE ON user_statuses EXECUTE FUNCTION fail()")

    ran, shown = (installation.command(*line.split()) for line in (f"run {WORKER}", "status"))
    with dashboard(installation.environment, tmp_path / "web.log") as (address, _):
        seen = "".join(pages(address).values())

    places = (ran.stdout + ran.stderr, shown.stdout, seen, _ledger(installation))
    assert ["cannot reach redis://me:***@cache/0" in place for place in places] == [True] * 4
    assert WORD not in "".join(places)


def test_processes_and_pages_show_no_secret(installation: Installation, tmp_path: Path) -> None:
    environment = installation.environment | of(installation)
    commands = {name: [*_HOUSEKEEPING, name] for name in ("worker", "scheduler")}
    with (
        dashboard(environment, tmp_path / "web.log") as (address, web),
        started(commands["worker"], environment, tmp_path / "worker.log") as worker,
        started(commands["scheduler"], environment, tmp_path / "scheduler.log") as scheduler,
    ):
        eventually(lambda: worker.said("Run ended"), worker, scheduler)
        seen = pages(address, Authorization=f"Bearer token-of-the-{WORD}") | pages(f"{address}login")
        visible = [line for each in (web, worker, scheduler) for line in command_lines(each.running.pid)]
        ended = [each.terminate() for each in (worker, scheduler)]

    logs = "".join(each.text() for each in (web, worker, scheduler))
    # The dashboard, the scheduler, and the worker with its children.
    assert len(visible) > 3 and ended == [0, 0]
    assert any("/workers/" in page for page in seen) and any("/runs/" in page for page in seen)
    assert WORD not in "".join((*visible, *seen.values(), logs, _ledger(installation)))
