"""Lines and tables on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.text import Text

from tests.internals.cli import out, print_table, say, table

WORKER = "object_storage.delete_stale_direct_uploads"
UUID = "0b3a2a5e-8a55-4a0e-9d2c-3f9c0f6f1a77"
COMMAND = f"housekeeping run {WORKER} --confirm"
ALERT = f"2,000 rows of the table are stale, more than its limit; look: housekeeping plan {WORKER}; then: {COMMAND}"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[str]]:
    """Return the lines that a function prints on a terminal of 80 columns."""
    monkeypatch.setattr(out, "width", 80)

    def lines(show: Callable[[], None]) -> list[str]:
        with out.capture() as printed:
            show()
        return [line.rstrip() for line in printed.get().splitlines()]

    return lines


Lines = Callable[[Callable[[], None]], list[str]]


def test_line_is_wrapped_between_words_and_commands(terminal: Lines) -> None:
    shown = terminal(lambda: say(ALERT))

    assert max(map(len, shown)) <= 80 and len(shown) > 1
    assert any(COMMAND in line for line in shown), shown
    assert " ".join(line.strip() for line in shown) == ALERT


def test_quoted_command_stays_on_one_line(terminal: Lines) -> None:
    shown = terminal(
        lambda: say("ALERT no scheduler has sent a heartbeat yet, so start it now: `housekeeping scheduler`")
    )

    assert shown[1] == "  `housekeeping scheduler`"


def test_styled_line_with_an_indent_keeps_it(terminal: Lines) -> None:
    shown = terminal(lambda: say(Text.assemble("  ", ("error   ", "red"), "word " * 30)))

    assert shown[0].startswith("  error   word") and shown[1].startswith("    word")


def test_paragraphs_stay_apart(terminal: Lines) -> None:
    assert terminal(lambda: say("\nwarning: one\ntwo")) == ["", "warning: one", "two"]


def test_line_to_a_file_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "width", 1000)

    with out.capture() as printed:
        say(ALERT * 20)

    assert printed.get() == f"{ALERT * 20}\n"


def show(*columns: str, rows: int = 2) -> Callable[[], None]:
    def printing() -> None:
        shown = table("WORKER", *(f">COLUMN {number}" for number in range(len(columns))))
        for _ in range(rows):
            shown.add_row(WORKER, *columns)
        print_table(shown)

    return printing


def test_table_that_fits_has_a_line_per_row(terminal: Lines) -> None:
    assert len(terminal(show("1,234,567", "12 ms"))) == 3


def test_short_values_of_the_last_column_stay_in_one_line(terminal: Lines) -> None:
    shown = terminal(show("1,234,567", "1,234,567,890.00", "in 20.9 s"))

    assert any(line.endswith("  in 20.9 s") for line in shown)


def test_wide_table_has_its_values_aligned_below_the_name(terminal: Lines) -> None:
    shown = terminal(show("1,234,567", "12 ms", "on", "2026-11-20T03:00:00+00:00", "words that are wrapped " * 2))

    assert shown[0] == "WORKER" and shown[1].startswith("   COLUMN 0  COLUMN 1  COLUMN 2                   COLUMN 3  ")
    assert shown[2] == WORKER and shown[3].startswith("  1,234,567     12 ms        on  2026-11-20T03:00:00+00:00  ")


def test_very_wide_table_has_a_line_per_value(terminal: Lines) -> None:
    shown = terminal(show(UUID, UUID, "word " * 30))

    assert f"COLUMN 0  {UUID}" in shown and "" in shown
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("values", [(UUID,), (UUID, UUID), ("1,234,567,890 rows", UUID, "x" * 75)])
def test_identifiers_and_numbers_are_never_broken(terminal: Lines, values: tuple[str, ...]) -> None:
    words = {word for line in terminal(show(*values)) for word in line.split()}

    assert {word for value in values for word in value.split() if len(word) < 70} <= words


def test_title_stands_above_each_form(terminal: Lines) -> None:
    for values in (("1",), ("1", "12 ms", "x" * 40), (UUID, UUID)):

        def titled(values: tuple[str, ...] = values) -> None:
            shown = table("WORKER", *"ABCD"[: len(values)], title="what changed")
            shown.add_row(WORKER, *values)
            print_table(shown)

        assert terminal(titled)[0] == "what changed"
