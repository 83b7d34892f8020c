"""Pages erase-a-person.md, offboard-a-tenant.md and right-of-access.md of docs/howto, followed step by step."""

from __future__ import annotations

import pytest

from tests.acceptance.test_own_sweep_pages import Reader
from tests.acceptance.test_own_sweep_pages import reader as own_sweep_reader
from tests.acceptance.test_own_sweep_pages import warehouse as warehouse
from tests.internals.ledger import Erasure, logged_actions

pytestmark = pytest.mark.slow

reader = own_sweep_reader


def test_page_of_the_erasure_of_a_person_works_as_written(reader: Reader) -> None:
    reader.read("erase-a-person")

    assert reader.rows("SELECT id FROM account") == [(4712,)]
    assert reader.rows("SELECT author_id, content FROM comment") == [(None, "[erased]")]
    assert reader.rows("SELECT account_id, name FROM purchase") == [(None, "erased")]
    assert [(each.state, each.reason) for each in Erasure.select()] == [("done", "ticket 12")]


def test_page_of_the_end_of_a_tenant_works_as_written(reader: Reader) -> None:
    reader.read("offboard-a-tenant")

    assert reader.rows("SELECT (SELECT count(*) FROM tenant), (SELECT count(*) FROM task)") == [(1, 1000)]
    assert len((reader.folder / "acme.jsonl").read_text().splitlines()) == 1 + 10 + 1000 + 1


def test_page_of_the_right_of_access_works_as_written(reader: Reader) -> None:
    reader.read("right-of-access")

    assert [(each.action, each.result) for each in logged_actions(10)] == [("export", "3 rows")]
