"""Checks of the persons and tenants that can be erased."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from peewee import BigIntegerField
from psycopg2.extensions import connection as Connection
from pydantic import SecretStr

from housekeeping import BaseModel, DeclarationError, Delete, Objects, Rows, Settings, Subject, Sweep
from tests.integration.erasure import shop
from tests.integration.erasure.shop import PERSON, ask, deciding, erase, row, with_key
from tests.integration.roles import connected_as_a_role
from tests.internals.cli import doctor
from tests.internals.database import Database
from tests.internals.doctor import examine, rights_of_subjects
from tests.internals.engine import Finding
from tests.internals.erasures import Erasure, execute, export, work


class Missing(BaseModel):
    """A table that no migration has created."""

    number = BigIntegerField(primary_key=True)

    class Meta:
        table_name = "missing_accounts"


@pytest.fixture(autouse=True)
def customers(postgres: Database, redis_client: redis.Redis) -> None:
    shop.create()


def _found(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    *subjects: Subject,
    sweeps: Sequence[Sweep] = (),
    **changes: Any,
) -> list[Finding]:
    module: Any = ModuleType("doctors_subjects")
    module.SUBJECTS = subjects
    monkeypatch.setitem(sys.modules, "doctors_subjects", module)
    given = with_key(settings, sweeps=("doctors_subjects",), **changes)
    return [each for each in examine(given, {each.name: each for each in sweeps}) if each.area == "subjects"]


def test_subject_that_can_be_erased_is_fine(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(each.level, each.subject, each.text) for each in _found(settings, monkeypatch, PERSON)] == [
        ("fine", "HOUSEKEEPING_ERASURE_KEY", "is set, and has the secret of every erasure"),
        ("fine", "person", "8 tables, each with a decision"),
    ]


def test_installation_without_subjects_needs_no_secret(settings: Settings) -> None:
    assert [each for each in examine(settings, {}) if each.area == "subjects"] == []


def test_unset_or_lost_secret_is_an_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    unset = _found(settings, monkeypatch, PERSON, erasure_key=None)
    erase(settings)
    lost = _found(settings, monkeypatch, PERSON, erasure_key=SecretStr("z" * 40))

    assert [each[0].level for each in (unset, lost)] == ["error", "error"]
    assert unset[0].way_out == "set HOUSEKEEPING_ERASURE_KEY to the output of: openssl rand -base64 32"
    assert lost[0].text == "HOUSEKEEPING_ERASURE_KEY lacks the secret of 1 earlier erasure"
    assert "housekeeping erase --rekey" in str(lost[0].way_out)


def test_sweep_that_hides_rows_from_an_erasure_is_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Sweep(
        "shop.old", Rows("account", stale=lambda row: row.id < 0, action=Delete(dependents={"orders": "clear"}))
    )

    found = [each for each in _found(settings, monkeypatch, PERSON, sweeps=[old]) if each.level != "fine"]

    assert {each.level for each in found} == {"warning"}
    assert [each.text.partition(";")[0] for each in found if "changes" in each.text] == [
        "shop.old changes comment.author_id",
        "shop.old changes orders.account_id",
    ]
    assert found[-1].way_out == "change email, name in shop.old as well; see docs/howto/erase-a-person.md"


def test_materialized_view_that_stores_rows_of_a_subject_is_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, postgres: Database
) -> None:
    postgres.execute_sql("CREATE MATERIALIZED VIEW mails AS SELECT email FROM account")

    (found,) = [each for each in _found(settings, monkeypatch, PERSON) if each.level != "fine"]

    assert (found.level, found.text) == (
        "warning",
        "the materialized view mails keeps erased rows until it is refreshed",
    )
    assert found.way_out == "REFRESH MATERIALIZED VIEW mails; see docs/howto/erase-a-person.md"


@pytest.mark.parametrize(
    ("subject", "text", "way_out"),
    [
        (deciding(session=None), "1 link without a decision: session.account_id", '"session": Delete()'),
        (Subject("person", "accounts"), "there is no table 'accounts'", "correct the Subject"),
        (replace(PERSON, by="emial"), "\"account\" has no column 'emial', which by of", "it has email, id"),
        (replace(PERSON, objects=[Objects("p", "{idd}/")]), "no column 'idd', which Objects('p') of", "it has email"),
        (Subject("person", Missing), '"missing_accounts" is not in ', "correct the table"),
        (deciding(nothing=Delete()), "its erasure is refused: ", ""),
        (replace(PERSON, objects=[Objects("pictures", "{id}/")]), "has no location 'pictures'", "add it"),
    ],
)
def test_declaration_that_would_be_refused_is_an_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, subject: Subject, text: str, way_out: str
) -> None:
    tenant = Subject("member", "newsletter")

    found = _found(settings, monkeypatch, subject, tenant)

    [wrong] = [each for each in found if each.level != "fine"]
    assert (wrong.level, wrong.subject) == ("error", "person")
    assert text in wrong.text and way_out in str(wrong.way_out)
    assert found[-1].subject == "member"  # one subject does not hide another


@pytest.mark.parametrize(
    ("index", "levels"),
    [
        ("SELECT", ["warning"]),
        ("CREATE INDEX ON account (full_name)", ["warning"]),
        ("CREATE UNIQUE INDEX ON account (full_name) WHERE id > 5", ["warning"]),
        ("CREATE UNIQUE INDEX ON account (full_name, id)", ["warning"]),
        ("CREATE UNIQUE INDEX ON account (lower(full_name || email))", ["warning"]),
        ("CREATE UNIQUE INDEX ON account (lower(full_name))", []),
        ("CREATE UNIQUE INDEX ON account (full_name) INCLUDE (email)", []),
        ("ALTER TABLE account ADD UNIQUE (full_name)", []),
    ],
)
def test_column_of_the_key_that_is_not_unique_is_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, postgres: Database, index: str, levels: list[str]
) -> None:
    postgres.execute_sql("ALTER TABLE account ADD full_name text")
    postgres.execute_sql(index)

    found = [each for each in _found(settings, monkeypatch, replace(PERSON, by="full_name")) if each.level != "fine"]

    assert [each.level for each in found] == levels
    assert all("has no unique index on full_name" in each.text for each in found)


@pytest.fixture
def needed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Rights that ``housekeeping doctor --grants`` prints for the subject."""
    _found(settings, monkeypatch, PERSON)
    found, unknown = rights_of_subjects(with_key(settings, sweeps=("doctors_subjects",)))
    assert unknown == []
    return found


def test_erasure_and_export_work_with_exactly_the_printed_rights(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    postgres: Database,
    admin: Connection,
    needed: dict[str, tuple[str, ...]],
) -> None:
    assert needed["orders"] == ("SELECT", "UPDATE (account_id, email, name)")
    assert needed["audit_entry"] == ("SELECT",)

    with connected_as_a_role(postgres, settings, admin, needed):
        levels = {each.level for each in _found(settings, monkeypatch, PERSON)}
        erasing = work.Erasing(PERSON, [str(shop.MARKER_ID)], [], ())
        exported = list(export(PERSON, erasing.reach, erasing.found, settings))
        done = erase(settings)

    assert (levels, len(exported), done.state, done.error) == ({"fine"}, 23, "done", None)
    assert shop.rows() == shop.ERASED


def test_export_needs_no_right_but_to_read(
    settings: Settings, postgres: Database, admin: Connection, needed: dict[str, tuple[str, ...]]
) -> None:
    with connected_as_a_role(postgres, settings, admin, dict.fromkeys(needed, ("SELECT",))):
        erasing = work.Erasing(PERSON, [str(shop.MARKER_ID)], [], needs="export")
        exported = list(export(PERSON, erasing.reach, erasing.found, settings))
    unread = {name: ("SELECT",) for name in needed if name != "item"}
    with (
        connected_as_a_role(postgres, settings, admin, unread),
        pytest.raises(DeclarationError, match="SELECT ON item"),
    ):
        work.Erasing(PERSON, [str(shop.MARKER_ID)], [], needs="export")

    assert len(exported) == 23


def test_grants_command_prints_the_rights_of_subjects(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    postgres: Database,
    admin: Connection,
    needed: dict[str, tuple[str, ...]],
) -> None:
    given = with_key(settings, sweeps=("doctors_subjects",), built_in=(), databases={})
    monkeypatch.setattr(doctor, "use_database_if_set", lambda settings: None)
    monkeypatch.setattr(doctor, "load_settings", lambda: given)

    with connected_as_a_role(postgres, settings, admin, {**needed, "item": ("SELECT",)}) as role:
        said = CliRunner().invoke(doctor.doctor, ["--grants", "eraser"]).output.splitlines()
    postgres.execute_sql("CREATE TABLE added (id int PRIMARY KEY, account_id bigint REFERENCES account)")
    undecided = CliRunner().invoke(doctor.doctor, ["--grants", "eraser"]).output

    assert "GRANT SELECT, UPDATE (account_id, email, name) ON orders TO eraser;" in said
    assert "GRANT SELECT, DELETE, UPDATE (id) ON account TO eraser;" in said
    assert [each.partition(" ON DATABASE ")[0] for each in said if "DATABASE" in each] == ["GRANT TEMPORARY"]
    lacks = f"-- {role}, the current role, lacks: GRANT DELETE, UPDATE (order_id) ON item TO {role};"
    assert [each for each in said if each.startswith("--")] == [lacks]
    assert "-- unknown: subject person: 1 link without a decision: added.account_id" in undecided


def test_each_right_is_needed(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    postgres: Database,
    admin: Connection,
    needed: dict[str, tuple[str, ...]],
) -> None:
    before, accepted, number = shop.rows(), [], ask(settings)
    for table, right in [(table, right) for table, rights in needed.items() for right in rights]:
        fewer = tuple(each for each in needed[table] if each != right)
        rights = {**needed, table: fewer} if fewer else {name: needed[name] for name in needed if name != table}
        with connected_as_a_role(postgres, settings, admin, rights) as role:
            errors = [each for each in _found(settings, monkeypatch, PERSON) if each.level == "error"]
            Erasure.update(state="requested", ended_at=None, key=[str(shop.MARKER_ID)], error=None).execute()
            execute(number, with_key(settings), {"person": PERSON})
        statement = f"GRANT {right} ON {table} TO {role}"
        if [each.way_out for each in errors] != [statement] or not str(row(number).error).endswith(statement):
            accepted.append((table, right, errors, row(number).error))

    assert (accepted, shop.rows()) == ([], before)


def test_missing_right_to_create_temporary_tables_is_an_error(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    postgres: Database,
    admin: Connection,
    needed: dict[str, tuple[str, ...]],
) -> None:
    name = postgres.execute_sql("SELECT quote_ident(current_database())").fetchone()[0]
    with admin.cursor() as cursor:
        cursor.execute(f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC")
    try:
        with connected_as_a_role(postgres, settings, admin, needed) as role:
            [error] = [each for each in _found(settings, monkeypatch, PERSON) if each.level == "error"]
    finally:
        with admin.cursor() as cursor:
            cursor.execute(f"GRANT TEMPORARY ON DATABASE {name} TO PUBLIC")

    assert error.way_out == f"GRANT TEMPORARY ON DATABASE {name} TO {role}"
