"""Pages erase-a-person.md, offboard-a-tenant.md and right-of-access.md of docs/howto, followed step by step."""

from __future__ import annotations

import re
from functools import reduce
from typing import Final

import pytest

from tests.acceptance.pages import in_a_shell
from tests.acceptance.test_own_sweep_pages import HOWTO, Reader
from tests.acceptance.test_own_sweep_pages import reader as own_sweep_reader
from tests.acceptance.test_own_sweep_pages import warehouse as warehouse
from tests.internals.database import database
from tests.internals.ledger import Erasure, logged_actions

pytestmark = pytest.mark.slow

reader = own_sweep_reader


def test_page_of_the_erasure_of_a_person_works_as_written(reader: Reader) -> None:
    reader.read("erase-a-person")

    assert reader.rows("SELECT id FROM account") == [(4712,)]
    assert reader.rows("SELECT author_id, content FROM comment") == [(None, "[erased]")]
    assert reader.rows("SELECT account_id, name FROM purchase") == [(None, "erased")]
    assert [(each.state, each.reason) for each in Erasure.select()] == [("done", "ticket 12")]


#: Answer of each command that the page gives to the questions of a data protection officer.
ANSWERS: Final = {
    "housekeeping export person 4711": '"table": "user_session", "decision": "delete"',
    "housekeeping erasures": r"done *person .* ticket 12",
    "housekeeping receipt ID": r"(?s)by privacy form.*nothing is left in 5 tables.*backups, WAL.*tax law: 10 years",
    "erase --dry-run": r"purchase +anonymise +0 .* tax law: 10 years",
    "housekeeping erase --replay-since TIME": "again after a restore|erasure 2 is done",
    "housekeeping doctor": "ok +person: 5 tables, each with a decision",
    "housekeeping coverage": "purchase +swept .* person",
}


def test_each_question_of_a_data_protection_officer_has_an_answer(reader: Reader) -> None:
    """After the page, a restore brings the person back."""
    reader.read("erase-a-person")
    table = (HOWTO / "erase-a-person.md").read_text().partition("## Answers for a data protection officer")[2]
    commands = re.findall(r"`((?:housekeeping|erase) [^`]+)`", table.partition("\n## ")[0])
    database.execute_sql(
        "INSERT INTO account VALUES (4711, 'eve@example.com'); INSERT INTO user_session VALUES (1, 4711)"
    )

    given = {" ID": " 1", "TIME": "1h --yes", "erase --dry": "housekeeping erase person 4711 --dry"}
    answers = {}
    for command in commands:
        text = reduce(lambda text, pair: text.replace(*pair), given.items(), command)
        answers[command] = in_a_shell(text, reader.environment, reader.folder)

    assert commands == list(ANSWERS)
    assert [command for command, pattern in ANSWERS.items() if not re.search(pattern, answers[command])] == []


def test_page_of_the_end_of_a_tenant_works_as_written(reader: Reader) -> None:
    reader.read("offboard-a-tenant")

    assert reader.rows("SELECT (SELECT count(*) FROM tenant), (SELECT count(*) FROM task)") == [(1, 1000)]
    assert len((reader.folder / "acme.jsonl").read_text().splitlines()) == 1 + 10 + 1000 + 1


def test_page_of_the_right_of_access_works_as_written(reader: Reader) -> None:
    reader.read("right-of-access")

    assert [(each.action, each.result) for each in logged_actions(10)] == [("export", "3 rows")]
