"""Report of the results: one table on the terminal, and the same table with all costs in the documentation."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Outcome
from benchmarks.servers import Servers

PAGE: Final = Path(__file__).parents[1] / "docs/explanation/benchmarks.md"
_LIBRARIES: Final = ("psycopg2-binary", "peewee", "redis", "dramatiq", "structlog", "transitions")
_WIDTH: Final = 120  # characters, if the output is not a terminal
_RATIOS: Final = ("comparison", "contestant", "a second", "ratio", "target", "")
_COSTS: Final = (
    *("comparison", "contestant", "CPU s", "of it own", "commits", "statements", "WAL MB"),
    *("Redis commands", "trips", "MB", "longest ms"),
)
_console: Final = Console(width=None if sys.stdout.isatty() else _WIDTH)

#: Median latencies of the foreground by application.
Latencies = dict[str, dict[str, float]]


def machine(servers: Servers) -> dict[str, str]:
    """Return the conditions of the measurement."""
    names = ("fsync", "synchronous_commit", "shared_buffers")
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "load": ", ".join(f"{each:.2f}" for each in os.getloadavg()),
        "system": f"{platform.platform()}, Python {sys.version.split()[0]}",
        "servers": ", ".join(f"{name} {each}" for name, each in servers.versions.items()),
        "postgres": ", ".join(f"{name} {servers.settings[name]}" for name in names),
        "libraries": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
    }


def show(conditions: dict[str, str], outcomes: Sequence[Outcome], latencies: Latencies, *, costs: bool = False) -> None:
    """Print the conditions and one table of all comparisons, and their costs on demand or if transactions are timed."""
    show_table(conditions, *_ratio_table(outcomes))
    detailed = [outcome for outcome in outcomes if costs or outcome.comparison.times_transactions]
    if detailed:
        _print(_COSTS, (row for outcome in detailed for row in _costs(outcome)))
    if latencies:
        _print(("application", "p50 ms", "p99 ms"), _latencies(latencies))


def show_table(conditions: dict[str, str], heads: Sequence[str], rows: Iterable[list[str]]) -> None:
    """Print the conditions and a table."""
    for name, value in conditions.items():
        _console.print(f"{name}: {value}", highlight=False)
    _print(heads, rows)


def write_page(
    conditions: dict[str, str], outcomes: Sequence[Outcome], latencies: Latencies, part: str = "figures"
) -> None:
    """Replace the figures in one part of the page in the documentation."""
    counted = [outcome for outcome in outcomes if _has_costs(outcome)]
    tables: list[tuple[Sequence[str], Iterable[list[str]]]] = [
        _ratio_table(outcomes),
        (_COSTS, (row for outcome in counted for row in _costs(outcome))),
    ]
    if latencies:
        tables.append((("application", "p50 ms", "p99 ms"), _latencies(latencies)))
    write_part(part, conditions, tables)


def write_part(
    part: str, conditions: dict[str, str], tables: Iterable[tuple[Sequence[str], Iterable[list[str]]]]
) -> None:
    """Replace one part of the page in the documentation by the conditions and these tables."""
    begin, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    described = (("condition", ""), ([name, value] for name, value in conditions.items()))
    written = [_markdown(*each) for each in (described, *tables)]
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text("\n".join([before + begin, *written, end + after]), encoding="utf-8")


def _ratio_table(outcomes: Sequence[Outcome]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the heads and rows of the ratios, without the columns of targets if there are none."""
    rows = [row for outcome in outcomes for row in _ratios(outcome)]
    width = len(_RATIOS) if any(outcome.comparison.targets for outcome in outcomes) else _RATIOS.index("target")
    return _RATIOS[:width], [row[:width] for row in rows]


def _ratios(outcome: Outcome) -> Iterator[list[str]]:
    """Return a row for each contestant: its speed, also as a ratio to the one it is compared with, and its target."""
    for name in outcome.turns:
        ratio, target = outcome.ratio(name, outcome.base), outcome.comparison.targets.get(name)
        verdict = "" if target is None else "met" if ratio >= target else f"missed by {target - ratio:.2f}"
        rate = f"{outcome.middle(name, lambda turn: turn.rate):,.0f}"
        yield [outcome.comparison.name, name, rate, f"{ratio:.2f}", "" if target is None else str(target), verdict]


def _has_costs(outcome: Outcome) -> bool:
    """Return whether the costs were measured, as they are on PostgreSQL."""
    return any(turn.resident_bytes for turns in outcome.turns.values() for turn in turns)


def _costs(outcome: Outcome) -> Iterator[list[str]]:
    for name in outcome.turns:
        statements = outcome.middle(name, lambda turn: turn.cost.statements or 0)
        yield [
            outcome.comparison.name,
            name,
            f"{outcome.middle(name, lambda turn: turn.worked):.2f}",
            f"{outcome.middle(name, lambda turn: turn.own_seconds):.2f}",
            f"{outcome.middle(name, lambda turn: turn.cost.commits):,.0f}",
            f"{statements:,.0f}",
            f"{outcome.middle(name, lambda turn: turn.cost.wal_bytes) / 1e6:,.1f}",
            f"{outcome.middle(name, lambda turn: turn.cost.redis_commands):,.0f}",
            f"{outcome.middle(name, lambda turn: turn.cost.redis_trips):,.0f}",
            f"{outcome.middle(name, lambda turn: turn.resident_bytes) / 1e6:,.0f}",
            _longest(outcome, name),
        ]


def _longest(outcome: Outcome, name: str) -> str:
    """Return the longest transaction of all turns in milliseconds; empty if not measured."""
    found = [each.longest_seconds for each in outcome.turns[name] if each.longest_seconds is not None]
    return f"{max(found) * 1000:,.0f}" if found else ""


def _latencies(latencies: Latencies) -> Iterator[list[str]]:
    for name, each in latencies.items():
        yield [name, f"{each['p50_ms']:.2f}", f"{each['p99_ms']:.2f}"]


def _print(heads: Sequence[str], rows: Iterable[list[str]]) -> None:
    table = Table(box=None)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*row)
    _console.print(table)


def _markdown(heads: Sequence[str], rows: Iterable[list[str]]) -> str:
    lines: list[Any] = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()
