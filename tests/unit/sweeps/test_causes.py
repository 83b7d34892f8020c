"""Causes: errors of different records with one reason are equal, errors with different reasons are not."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from tests.internals.database import cause_of, error_in


@pytest.mark.parametrize(
    ("text", "record", "cause"),
    [
        ("cannot lock ref 'refs/heads/a': File exists.", {}, "cannot lock ref ...: File exists."),
        ("cannot lock ref 'refs/heads/a", {}, "cannot lock ref ..."),
        (r"no location 'a\'b' here", {}, "no location ... here"),
        ('key "7f3a" is gone', {}, "key ... is gone"),
        ('relation "audit_log" does not exist', {}, 'relation "audit_log" does not exist'),
        ('relation "audit_2026" does not exist', {}, "relation ... does not exist"),
        ("order 17 is gone", {}, "order ... is gone"),
        ("Unable to delete file /srv/a/b: Is a directory", {}, "Unable to delete file ... Is a directory"),
        ("the invoice INVOICE-A is void", {"number": "INVOICE-A"}, "the invoice ... is void"),
        ("isn't allowed, it's closed", {}, "isn't allowed, it's closed"),
        ("", {}, "ValueError"),
    ],
)
def test_text_loses_the_parts_specific_to_a_record(text: str, record: dict[str, Any], cause: str) -> None:
    assert cause_of(ValueError(text), record) == f"ValueError: {cause}"


def test_type_tells_causes_apart() -> None:
    assert cause_of(ValueError("no"), {}) != cause_of(KeyError("no"), {})


@pytest.mark.parametrize("text", ["'" * 5000, "x" * 100_000, "a/" * 50_000, "'a " * 10_000, "\\" * 9999])
def test_hostile_text_is_cut(text: str) -> None:
    assert len(cause_of(ValueError(text), {"name": text})) <= 300


def raised(cause: BaseException | None, error: BaseException) -> BaseException:
    """Return the error after it was raised from the cause, or while the cause was handled."""
    try:
        if cause is None:
            raise error
        try:
            raise cause
        except type(cause):
            raise error from cause
    except type(error) as found:
        return found


def test_cause_is_that_of_the_innermost_error() -> None:
    innermost = raised(OSError("disk 7 is full"), RuntimeError("not written"))
    error = raised(innermost, ValueError("report 3 was not sent"))

    assert cause_of(error, {}) == "OSError: disk ... is full"
    assert error_in("".join(traceback.format_exception(error))) == "OSError: disk 7 is full"


def test_error_that_is_its_own_cause_has_a_cause() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first

    assert cause_of(first, {}) in ("ValueError: first", "ValueError: second")


def test_error_raised_while_another_was_handled_is_the_cause() -> None:
    try:
        try:
            raise KeyError("cache")
        except KeyError:
            raise ValueError("row 7\nof a table") from None
    except ValueError as found:
        found.__suppress_context__ = False
        text = "".join(traceback.format_exception(found))

    assert error_in(text) == "ValueError: row 7"
