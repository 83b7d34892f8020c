"""Rights that `doctor` prints: sufficient for an application's sweeps, and all of them needed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from peewee import SQL, BigAutoField, ForeignKeyField, fn
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Delete, Rows, Settings, Sweep
from tests.integration.own_sweeps import shop
from tests.integration.own_sweeps.shop import Coupon, old_coupons, used_coupons
from tests.integration.roles import connected_as_a_role
from tests.internals.cli import doctor
from tests.internals.database import Database
from tests.internals.doctor import missing_rights, name_in_sql, needed_rights, tables_of
from tests.internals.engine import declared_by, run_sweep
from tests.internals.sweeps import TableStage, Write


@pytest.fixture
def rights(settings: Settings) -> tuple[str, ...]:
    told = Settings.load(**settings.model_dump(exclude={"sweeps", "workers"}), sweeps=shop.__name__)
    return needed_rights(told)["coupon"]


@pytest.fixture
def role(postgres: Database, settings: Settings, admin: Connection, rights: tuple[str, ...]) -> Iterator[str]:
    """Connect with a role that has exactly these rights."""
    postgres.create_tables([Coupon])
    Coupon.create(state="open", expires_at=datetime.now(UTC) - timedelta(hours=1))
    Coupon.create(state="used", expires_at=datetime.now(UTC))
    with connected_as_a_role(postgres, settings, admin, {"coupon": rights}) as name:
        yield name


def test_rights_of_a_table_are_those_of_all_its_sweeps(rights: tuple[str, ...]) -> None:
    assert rights == ("SELECT", "UPDATE (state, ended_at)", "DELETE", "UPDATE (id)")


def test_sweeps_run_with_exactly_these_rights(role: str) -> None:
    results = [run_sweep(old_coupons), run_sweep(used_coupons)]

    assert [(result.outcome, result.reason) for result in results] == [("done", None)] * 2
    assert [results[0].counts["expired"], results[1].counts["deleted_rows"]] == [1, 1]


def test_revoked_right_is_reported_and_makes_the_run_fail(
    role: str, rights: tuple[str, ...], admin: Connection
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"REVOKE UPDATE (ended_at) ON coupon FROM {role}")

    assert missing_rights("coupon", rights) == ["UPDATE (state, ended_at)"]
    assert run_sweep(old_coupons).outcome == "failed"


class Redemption(BaseModel):
    coupon = ForeignKeyField(Coupon)


class Note(BaseModel):
    id = BigAutoField()
    coupon = ForeignKeyField(Coupon)


class DeleteWithNotes(Delete):
    def write(self, table: TableStage, step: Any, chosen: Any) -> Write:
        coupons: Any = Coupon.delete().where(chosen).returning(Coupon.id)
        deleted = coupons.cte("coupons")
        notes: Any = Note.delete().where(Note.coupon.in_(deleted.select(deleted.c.id)))
        return Write([deleted, notes.returning(Note.id).cte("notes")], self.counted_as)

    @property
    def counted_as(self) -> tuple[str, ...]:
        return ("deleted_coupons", "deleted_notes")


def test_rights_include_tables_of_the_predicate_and_of_the_action() -> None:
    unused = Sweep(
        "shop.unused_coupons",
        Rows(
            Coupon,
            stale=lambda row, now: (
                (row.expires_at < now) & ~fn.EXISTS(Redemption.select(SQL("1")).where(Redemption.coupon == row.id))
            ),
            order="expires_at",
            action=DeleteWithNotes(),
        ),
    )

    rights = {table: needed for table, (_, needed) in tables_of(declared_by("shop", [unused])).items()}

    assert rights == {
        "coupon": ("SELECT", "DELETE", "UPDATE (expires_at)"),
        "redemption": ("SELECT",),
        "note": ("SELECT", "DELETE"),
    }


@pytest.mark.parametrize(("name", "quoted"), [("coupon", "coupon"), ("order", '"order"'), ("Orders", '"Orders"')])
def test_table_names_are_quoted_where_sql_needs_it(name: str, quoted: str) -> None:
    class Named(BaseModel):
        class Meta:
            table_name = name

    assert name_in_sql(Named) == quoted


def test_grants_command_lists_rights_the_current_role_lacks(
    role: str, settings: Settings, postgres: Database, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"REVOKE DELETE ON coupon FROM {role}")
    monkeypatch.setattr(doctor, "use_database_if_set", lambda settings: None)
    monkeypatch.setattr(
        doctor,
        "load_settings",
        lambda: Settings.load(
            **settings.model_dump(exclude={"sweeps", "workers", "built_in"}), sweeps=shop.__name__, built_in="none"
        ),
    )

    said = CliRunner().invoke(doctor.doctor, ["--grants", "cleaner"]).output.splitlines()

    assert "GRANT SELECT, UPDATE (state, ended_at), DELETE, UPDATE (id) ON coupon TO cleaner;" in said
    assert f"GRANT USAGE ON SCHEMA {settings.schema_name} TO cleaner;" in said
    assert f"-- {role}, the current role, lacks: GRANT DELETE ON coupon TO {role};" in said
