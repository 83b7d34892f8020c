"""Sweeps after which an erasure no longer finds rows of its subject."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from housekeeping import Delete, Guard, Reference, Rows, Settings, Sweep
from tests.declarations import changed
from tests.integration.erasure.shop import MARKER, PERSON, deciding, erase, rows
from tests.integration.several_databases import CI
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.erasures import cut_links, read_reach
from tests.internals.sweeps import Write

pytestmark = pytest.mark.usefixtures("customers")


@dataclass(frozen=True)
class Overwrite:
    """Action of an application: it writes these values."""

    values: dict[str, Any]
    counted_as = ("changed_rows",)

    def write(self, table: Any, batch: Any, chosen: Any) -> Write:
        columns = table.model._meta.columns
        update = table.model.update({columns[name]: value for name, value in self.values.items()})
        return Write([update.where(chosen).returning(*table.key).cte("changed")], self.counted_as)


def _rows(table: str, action: Any = None) -> Rows:
    return Rows(table, stale=lambda row: row.id > 0, action=action or Delete())


def _sweep(*parts: Rows) -> Sweep:
    return Sweep("shop.old", parts, guard=Guard(first_run=False))


def _overwriting(table: str, **values: Any) -> Rows:
    return _rows(table, Overwrite(values))


REFERENCES = [
    Reference("attachment.owner_id", "account.id", where="owner_type = 'Account'"),
    Reference("newsletter.email", "account.email"),
]
CASCADE = _rows("account", Delete(dependents={"orders": "delete", "newsletter": "clear"}, references=REFERENCES[1:]))
ORPHANED = "shop.old deletes rows of account, but not those that refer to them by {}"


@pytest.mark.parametrize(
    ("parts", "cuts"),
    [
        ([_overwriting("comment", author_id=None)], {"shop.old changes comment.author_id": "change text in shop.old"}),
        ([_overwriting("session", account_id=1)], {"shop.old changes session.account_id": "delete these rows in"}),
        (
            [_rows("account")],  # PostgreSQL itself clears the column
            {
                ORPHANED.format("attachment.owner_id"): "delete these rows in shop.old, or anonymise",
                ORPHANED.format("newsletter.email"): "delete these rows in shop.old, or anonymise",
                "shop.old changes comment.author_id": "change text in shop.old",
            },
        ),
        (
            [CASCADE],
            {
                ORPHANED.format("attachment.owner_id"): "delete these rows",
                "shop.old changes newsletter.email": "delete these rows",
                "shop.old changes comment.author_id": "change text in shop.old",
            },
        ),
        ([_overwriting("comment", author_id=None, text="")], {}),
        ([_overwriting("comment", text=""), _overwriting("comment", author_id=None)], {}),
        (
            [
                _overwriting("comment", text=""),
                _rows("account", Delete(dependents={"orders": "delete"}, references=REFERENCES)),
                _rows("newsletter"),
                _rows("attachment"),
            ],
            {},
        ),
        ([_rows("orders"), _rows("comment"), _overwriting("item", note=None)], {}),
        (
            [_overwriting("orders", account_id=None, name="", email="")],  # their items stay
            {"shop.old changes orders.account_id": "change what depends on these rows in shop.old"},
        ),
        ([_overwriting("orders", account_id=None, name="", email=""), _rows("item")], {}),
        ([_overwriting("audit_entry", account_id=None)], {}),  # an erasure would keep it as it is
        ([_overwriting("comment", parent_id=None)], {}),  # replies of others
    ],
)
def test_sweep_that_cuts_links_is_named(settings: Settings, parts: list[Rows], cuts: dict[str, str]) -> None:
    found = {each.text: each.way_out for each in cut_links(read_reach(PERSON), [_sweep(*parts)])}

    expected = {f"{text}; erasures no longer find these rows": way_out for text, way_out in cuts.items()}
    assert found.keys() == expected.keys()
    assert [(each, way_out) for each, way_out in expected.items() if not found[each].startswith(way_out)] == []


def test_disabled_sweep_is_not_named(settings: Settings) -> None:
    sweep = changed(_sweep(_overwriting("comment", author_id=None)), enabled=False)

    assert cut_links(read_reach(PERSON), [sweep]) == []


def test_rows_of_another_database_that_refer_to_deleted_ones_are_named(two: Settings) -> None:
    with database.using(CI):
        database.execute_sql("CREATE TABLE build (id bigint PRIMARY KEY, account bigint)")
    references = [*PERSON.references, Reference("build.account", "account.id", database=CI)]
    subject = replace(deciding(build=Delete()), references=references)

    found = cut_links(read_reach(subject), [_sweep(_rows("account"))])

    assert ORPHANED.format("build.account") in " ".join(each.text for each in found)


def test_receipt_names_the_sweep_whose_rows_it_did_not_find(settings: Settings) -> None:
    sweep = _sweep(_overwriting("comment", author_id=None))
    assert run_sweep(sweep).outcome == "done"

    done = erase(settings, sweeps=[sweep])

    assert done.state == "done"
    assert (1, None, MARKER, None) in rows("comment")["comment"]
    assert "shop.old changes comment.author_id; erasures no longer find these rows" in done.outside
