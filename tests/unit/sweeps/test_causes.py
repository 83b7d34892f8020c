"""Causes: errors of different records with one reason are equal, errors with different reasons are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.internals.database import cause_of


@pytest.mark.parametrize(
    ("text", "record", "cause"),
    [
        ("cannot lock ref 'refs/heads/a': File exists.", {}, "cannot lock ref …: File exists."),
        ("cannot lock ref 'refs/heads/a", {}, "cannot lock ref …"),
        (r"no location 'a\'b' here", {}, "no location … here"),
        ('key "7f3a" is gone', {}, "key … is gone"),
        ("order 17 is gone", {}, "order … is gone"),
        ("Unable to delete file /srv/a/b: Is a directory", {}, "Unable to delete file … Is a directory"),
        ("the invoice INVOICE-A is void", {"number": "INVOICE-A"}, "the invoice … is void"),
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
