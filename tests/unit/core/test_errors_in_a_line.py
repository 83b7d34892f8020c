from __future__ import annotations

import pytest

from housekeeping.core.sanitize import error_line, typed_error_line


@pytest.mark.parametrize(
    ("error", "line", "typed"),
    [
        (ValueError("first\nsecond"), "first", "ValueError: first"),
        (ValueError(), "ValueError", "ValueError"),
        (KeyError("sku"), "KeyError: 'sku'", "KeyError: 'sku'"),
        (
            ValueError("postgresql://me:hunter2@host"),
            "postgresql://me:***@host",
            "ValueError: postgresql://me:***@host",
        ),
        # PostgreSQL takes neither; the latter stands for a byte of a file's name that is no UTF-8.
        (ValueError("a\0b"), r"a\x00b", r"ValueError: a\x00b"),
        (ValueError("caf\udce9"), r"caf\udce9", r"ValueError: caf\udce9"),
    ],
)
def test_error_line_shows_the_type_if_there_is_no_text(error: Exception, line: str, typed: str) -> None:
    assert (error_line(error), typed_error_line(error)) == (line, typed)
