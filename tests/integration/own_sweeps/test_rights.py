"""A role with the rights that the doctor prints runs one's own sweeps, and with one fewer does not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.doctor.rights import grants, missing_rights, needed_rights
from housekeeping.foundation.db import Database
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps import perform
from tests.integration.own_sweeps import shop
from tests.integration.own_sweeps.shop import Coupon, old_coupons, used_coupons


@pytest.fixture
def rights(settings: Settings) -> tuple[str, ...]:
    told = Settings.load(**settings.model_dump(exclude={"sweeps", "workers"}), sweeps=shop.__name__)
    return needed_rights(told)["coupon"]


@pytest.fixture
def role(postgres: Database, settings: Settings, admin: Connection, rights: tuple[str, ...]) -> Iterator[str]:
    """A role with exactly these rights; the connection's from now on."""
    postgres.create_tables([Coupon])
    Coupon.create(state="open", expires_at=datetime.now(UTC) - timedelta(hours=1))
    Coupon.create(state="used", expires_at=datetime.now(UTC))
    name = f"role_{uuid.uuid4().hex[:12]}"
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name} LOGIN")
        cursor.execute(f"GRANT USAGE ON SCHEMA {settings.schema_name}, {settings.namespace} TO {name}")
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {settings.schema_name} TO {name}")
        for statement in grants(name, {"coupon": rights}):
            cursor.execute(statement)
    postgres.execute_sql(f"SET SESSION AUTHORIZATION {name}")
    yield name
    postgres.execute_sql("RESET SESSION AUTHORIZATION")
    with admin.cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {name}")
        cursor.execute(f"DROP ROLE {name}")


def test_the_rights_of_a_table_are_those_of_all_its_sweeps(rights: tuple[str, ...]) -> None:
    assert rights == ("SELECT", "UPDATE (state, ended_at)", "DELETE", "UPDATE (id)")


def test_the_sweeps_do_their_work_with_exactly_these_rights(role: str) -> None:
    results = [perform(old_coupons), perform(used_coupons)]

    assert [(result.outcome, result.reason) for result in results] == [("done", None)] * 2
    assert [results[0].counts["expired"], results[1].counts["deleted_rows"]] == [1, 1]


def test_a_right_that_was_taken_away_is_missing_and_missed(
    role: str, rights: tuple[str, ...], admin: Connection
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"REVOKE UPDATE (ended_at) ON coupon FROM {role}")

    assert missing_rights("coupon", rights) == ["UPDATE (state, ended_at)"]
    assert perform(old_coupons).outcome == "failed"
