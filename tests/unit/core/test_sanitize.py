from __future__ import annotations

import pytest

from housekeeping.core.sanitize import in_one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 日本", "plain, größer, 日本"),
        ("\x1b]0;owned\x07\x1b[2J", "\\x1b]0;owned\\x07\\x1b[2J"),
        ("a\rb\x08c\x7f\x9b", "a\\rb\\x08c\\x7f\\x9b"),
        ("exe\u202etxt.\u200b", "exe\\u202etxt.\\u200b"),
        ("\ud800", "\\ud800"),
        ("one\ntwo\tthree", "one\ntwo three"),
    ],
)
def test_invisible_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * 9, "x" * 9),
        ("x" * 10, "x" * 10),
        ("x" * 11, "x" * 9 + "…"),
        ("\x1b" * 9, "\\x1b\\x1b\\…"),
        ("a\nb", "a\\nb"),
    ],
)
def test_line_is_cut_at_its_width(text: str, shown: str) -> None:
    assert in_one_line(text, 10) == shown
