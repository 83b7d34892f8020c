"""The condition of a purge or a restore is one expression."""

from __future__ import annotations

import pytest

from tests.internals.core import WrongArgument
from tests.internals.sweeps import as_condition, check_expression


@pytest.mark.parametrize(
    "where",
    [
        "true",
        "expires_at < now() - interval '90 days'",
        "note LIKE '%;--%' OR note = 'it''s (fine'",
        'NOT EXISTS (SELECT 1 FROM orders WHERE orders.session_id = sessions."id")',
        "note = E'it\\'s; fine'",
        "note = $tag$ ; -- ( $tag$",
        "tags[1] = 'a' AND (id = 1 OR id = 2)",
        "id = -1",
    ],
)
def test_one_expression_is_accepted(where: str) -> None:
    check_expression(where)


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        (" ", "empty"),
        ("id < 5; DROP TABLE sessions", "semicolon"),
        ("id < 5) OR (true", "without its ("),
        ("(id < 5", "without its end"),
        ("id = ANY(ARRAY[1, 2)", "without its ("),
        ("id = ANY(ARRAY[1, 2", "[ without its end"),
        ("note = 'open", "quote"),
        ('"note = 1', "quote"),
        ("id < 5 -- all", "comment"),
        ("id < 5 /* all */", "comment"),
        ("WHERE id < 5", "begins with WHERE"),
        ("delete from sessions", "begins with delete"),
    ],
)
def test_anything_else_is_rejected_in_one_line(where: str, problem: str) -> None:
    with pytest.raises(WrongArgument) as rejected:
        check_expression(where)

    assert problem in str(rejected.value)
    assert "\n" not in str(rejected.value)


def test_percent_signs_are_doubled_for_the_driver() -> None:
    assert as_condition(" note LIKE 'a%' ").sql == "(note LIKE 'a%%')"
