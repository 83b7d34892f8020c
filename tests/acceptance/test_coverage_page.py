"""Page no-table-is-forgotten.md of docs/howto, followed step by step, and the command `housekeeping coverage`."""

from __future__ import annotations

import json

import pytest

from tests.acceptance.conftest import Command
from tests.acceptance.pages import in_a_shell
from tests.acceptance.test_own_sweep_pages import Reader
from tests.acceptance.test_own_sweep_pages import reader as own_sweep_reader
from tests.acceptance.test_own_sweep_pages import warehouse as warehouse
from tests.internals.database import Database

pytestmark = pytest.mark.slow

reader = own_sweep_reader


def test_page_of_coverage_works_as_written(reader: Reader) -> None:
    reader.read("no-table-is-forgotten")

    found = json.loads(in_a_shell("housekeeping coverage --json", reader.environment, reader.folder))
    states = {each["table"]: each["state"] for each in found["tables"]}
    assert (states["audit_event"], found["counts"]["undecided"]) == ("kept", 0)


def test_json_has_each_table_with_its_state(command: Command, postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE forgotten (id integer)")

    shown = command("coverage", "--json", "--fail-on-undecided")

    found = json.loads(shown.stdout)
    [table] = [each for each in found["tables"] if each["table"] == "forgotten"]
    assert shown.returncode == 1
    assert {each: table[each] for each in ("database", "state", "by", "reason", "rows", "bytes")} == {
        "database": "main",
        "state": "undecided",
        "by": [],
        "reason": None,
        "rows": 0,
        "bytes": 0,
    }
    assert (table["growth_bytes_per_day"], table["oldest_at"]) == (None, None)
    assert found["counts"]["undecided"] >= 1 and found["counts"]["own"] > 10


def test_unreadable_database_exits_with_2_and_shows_the_others(command: Command, postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE forgotten (id integer)")
    away = {"DATABASES": '{"ci": "postgresql://127.0.0.1:1/ci?connect_timeout=1"}'}

    shown = command("coverage", "--fail-on-undecided", **away)

    assert shown.returncode == 2
    assert "forgotten" in shown.stdout and "UNAVAILABLE database ci: " in shown.stdout


def test_undecided_table_alone_changes_no_exit_status(command: Command, postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE forgotten (id integer)")

    assert command("coverage").returncode == 0
