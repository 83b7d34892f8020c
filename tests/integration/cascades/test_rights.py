"""Rights on dependents and their archives that `doctor` prints: sufficient, and all of them needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Reference, Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.declarations import only
from tests.integration.archives.tickets import create_archives
from tests.integration.cascades.shop import NOW, execute, ids, sweep
from tests.integration.roles import connected_as_a_role
from tests.integration.several_databases import CI
from tests.internals.cli import doctor
from tests.internals.database import Database, database
from tests.internals.doctor import examine, needed_rights, rights_of_dependents
from tests.internals.engine import run_sweep

CLOCK = ManualClock(NOW)
MODULE = "sweeps_of_accounts"
Rights = dict[str, tuple[str, ...]]


def _cleaning(**action: Any) -> Sweep:
    declared = sweep()
    return replace(declared, stages=replace(only(declared), action=Delete(**action)))


def _told(settings: Settings, monkeypatch: pytest.MonkeyPatch, declared: Sweep) -> Settings:
    module: Any = ModuleType(MODULE)
    module.SWEEPS = [declared]
    monkeypatch.setitem(sys.modules, MODULE, module)
    given = settings.model_dump(exclude={"sweeps", "workers", "built_in"})
    return Settings.load(**given, sweeps=MODULE, built_in="none")


def _all_rights(settings: Settings) -> Rights:
    of_dependents, unknown = rights_of_dependents(settings)
    assert unknown == []
    found = needed_rights(settings)
    return found | {name: (*found.get(name, ()), *rights) for name, rights in of_dependents.items()}


def test_run_works_with_exactly_the_printed_rights(
    accounts: None, settings: Settings, monkeypatch: pytest.MonkeyPatch, postgres: Database, admin: Connection
) -> None:
    cleaning = _cleaning(dependents=True)
    needed = _all_rights(_told(settings, monkeypatch, cleaning))

    with connected_as_a_role(postgres, settings, admin, needed):
        result = run_sweep(cleaning, clock=CLOCK)

    assert needed == {
        "account": ("SELECT", "DELETE", "UPDATE (closed_at)"),
        "comment": ("SELECT", "UPDATE (author_id)"),
        "orders": ("SELECT", "DELETE", "UPDATE (account_id)"),
        "item": ("SELECT", "DELETE", "UPDATE (order_id)"),
    }
    assert (result.outcome, ids("account", "item")) == ("done", {"account": [4], "item": [13, 14, 15, 16]})


@pytest.mark.parametrize(
    ("table", "right"),
    [("orders", "DELETE"), ("item", "SELECT"), ("item", "UPDATE (order_id)"), ("comment", "UPDATE (author_id)")],
)
def test_missing_right_is_named_by_doctor_and_fails_the_run(
    accounts: None,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    postgres: Database,
    admin: Connection,
    table: str,
    right: str,
) -> None:
    cleaning = _cleaning(dependents=True)
    given = _told(settings, monkeypatch, cleaning)
    needed = _all_rights(given)
    fewer = {**needed, table: tuple(each for each in needed[table] if each != right)}
    monkeypatch.setattr(doctor, "use_database_if_set", lambda settings: None)
    monkeypatch.setattr(doctor, "load_settings", lambda: given)

    with connected_as_a_role(postgres, settings, admin, fewer) as role:
        found = list(examine(given, {cleaning.name: cleaning}, only_databases=True))
        printed = CliRunner().invoke(doctor.doctor, ["--grants", "cleaner"]).output.splitlines()
        result = run_sweep(cleaning, clock=CLOCK)

    statement = f"GRANT {right} ON {table} TO {role}"
    errors = [(each.subject, each.way_out) for each in found if each.level == "error"]
    assert errors == [("dependents", statement)]
    assert f"GRANT {', '.join(needed[table])} ON {table} TO cleaner;" in printed
    assert [each for each in printed if each.startswith("--")] == [f"-- {role}, the current role, lacks: {statement};"]
    assert (result.outcome, ids("account")) == ("failed", {"account": [1, 2, 3, 4]})


def test_rights_on_archives_are_included(
    archive: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, postgres: Database, admin: Connection
) -> None:
    archiving = _cleaning(dependents=True, archive_to=archive)
    create_archives(archiving)
    needed = _all_rights(_told(settings, monkeypatch, archiving))

    with connected_as_a_role(postgres, settings, admin, needed) as role:
        with admin.cursor() as cursor:
            cursor.execute(f"GRANT USAGE ON SCHEMA {archive} TO {role}")
        result = run_sweep(archiving, clock=CLOCK)

    of_archives = {name: rights for name, rights in needed.items() if name.startswith(archive)}
    assert of_archives == {f"{archive}.{name}": ("INSERT",) for name in ("account", "orders", "item", "comment")}
    assert (result.outcome, ids("account")) == ("done", {"account": [4]})


def test_rights_in_another_database_are_printed_for_that_database(
    two: Settings, accounts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.using(CI):
        execute("CREATE TABLE build (id int PRIMARY KEY, account bigint); CREATE INDEX ON build (account)")
    references = [Reference("build.account", "account.id", database=CI)]
    given = _told(two, monkeypatch, _cleaning(dependents={"build": "delete"}, references=references))

    here = rights_of_dependents(given)
    with database.using(CI):
        there = rights_of_dependents(given)

    assert {*here[0]} == {"comment", "orders", "item"}
    assert there == ({"build": ("SELECT", "DELETE", "UPDATE (account)")}, [])


def test_undecided_dependents_are_unknown(accounts: None, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    execute("CREATE TABLE invoice (id int PRIMARY KEY, account_id bigint REFERENCES account)")
    given = _told(settings, monkeypatch, _cleaning(dependents=True))

    found, [unknown] = rights_of_dependents(given)

    assert found == {}
    assert unknown.startswith("shop.closed_accounts: 1 link has no decision: invoice.account_id")
