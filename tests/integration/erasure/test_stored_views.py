"""Materialized views that still contain rows of a subject after its erasure."""

from __future__ import annotations

import pytest

from housekeeping import Delete, Settings
from tests.integration.erasure.shop import MARKER, MARKER_ID, PERSON, deciding, erase, rows
from tests.internals.database import database
from tests.internals.erasures import Erasing, plan_erasure

pytestmark = pytest.mark.usefixtures("customers")


def _named(outside: list[str]) -> list[str]:
    return [each.rpartition(": REFRESH MATERIALIZED VIEW ")[2] for each in outside if "materialized view" in each]


@pytest.mark.parametrize(
    ("statements", "views"),
    [
        ("CREATE MATERIALIZED VIEW stored AS SELECT email FROM account", ["stored"]),
        (
            "CREATE VIEW seen AS SELECT email FROM orders; CREATE VIEW again AS SELECT * FROM seen; "
            'CREATE MATERIALIZED VIEW "The Stored" AS SELECT * FROM again',
            ['"The Stored"'],
        ),
        (  # the order to refresh them
            "CREATE MATERIALIZED VIEW z AS SELECT email FROM account; "
            "CREATE MATERIALIZED VIEW a AS SELECT z.email FROM z JOIN account ON account.email = z.email",
            ["z", "a"],
        ),
        ("CREATE MATERIALIZED VIEW stored AS SELECT email FROM account WITH NO DATA", []),
        ("CREATE MATERIALIZED VIEW stored AS SELECT id FROM audit_entry", []),  # whose rows are kept
        ("CREATE TABLE other (id int); CREATE MATERIALIZED VIEW stored AS SELECT id FROM other", []),
        ("CREATE VIEW seen AS SELECT email FROM account", []),
    ],
)
def test_dry_run_and_receipt_name_the_views_to_refresh(settings: Settings, statements: str, views: list[str]) -> None:
    database.execute_sql(statements)

    planned = plan_erasure(Erasing(PERSON, [str(MARKER_ID)], [], []), "digest")
    done = erase(settings)

    assert (_named(list(planned.outside)), _named(done.outside)) == (views, views)
    for view in views:
        database.execute_sql(f"REFRESH MATERIALIZED VIEW {view}")
        assert MARKER not in str(rows(view))


def test_view_of_a_partition_is_named(settings: Settings) -> None:
    database.execute_sql(
        "CREATE TABLE visit (id int, account_id bigint REFERENCES account, PRIMARY KEY (id)) PARTITION BY RANGE (id); "
        "CREATE TABLE visit_1 PARTITION OF visit FOR VALUES FROM (0) TO (9); "
        "CREATE MATERIALIZED VIEW visits AS SELECT account_id FROM visit_1"
    )

    assert _named(erase(settings, deciding(visit=Delete())).outside) == ["visits"]
