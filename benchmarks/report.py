"""Report of the results as tables and JSON."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Outcome
from benchmarks.servers import Servers

_LIBRARIES: Final = ("psycopg2-binary", "peewee", "redis", "dramatiq", "structlog", "transitions")
_WIDTH: Final = 150  # characters, if the output is not a terminal
_console: Final = Console(width=None if sys.stdout.isatty() else _WIDTH)


def machine(servers: Servers) -> dict[str, Any]:
    """Return the conditions of the measurement."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "servers": servers.versions,
        "postgres": {name: servers.settings[name] for name in ("fsync", "synchronous_commit", "shared_buffers")},
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


def show_machine(head: dict[str, Any]) -> None:
    """Print the conditions, one per line."""
    for name, value in head.items():
        words = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        _console.print(f"{name}: {words}", highlight=False)


def show(outcome: Outcome, rows: int, among: int) -> None:
    """Print the table of a comparison and its targets."""
    comparison = outcome.comparison
    rounds = len(next(iter(outcome.turns.values())))
    table = Table(title=f"{comparison.name}: {rows:,} stale among {among:,}; median of {rounds} rounds", box=None)
    base = next(iter(outcome.turns))
    heads = [f"{comparison.unit}/s", f"of {base}", "by CPU", "CPU s", "of it own", "commits", "statements", "WAL MB"]
    heads += ["Redis commands", "trips", "MB"]
    table.add_column("contestant")
    for head in heads:
        table.add_column(head, justify="right")
    for name, turns in outcome.turns.items():
        scale = rows / max(1, turns[0].done)  # scales a contestant up that did only a part
        statements = [turn.cost.statements for turn in turns if turn.cost.statements is not None]
        table.add_row(
            name,
            f"{outcome.middle(name, lambda turn: turn.rate):,.0f}",
            f"{outcome.ratio(name, base):.3f}",
            f"{outcome.ratio_of_work(name, base):.3f}",
            f"{scale * outcome.middle(name, lambda turn: turn.worked):.2f}",
            f"{scale * outcome.middle(name, lambda turn: turn.own_seconds):.2f}",
            f"{scale * outcome.middle(name, lambda turn: turn.cost.commits):,.0f}",
            f"{scale * sorted(statements)[len(statements) // 2]:,.0f}" if statements else "",
            f"{scale * outcome.middle(name, lambda turn: turn.cost.wal_bytes) / 1e6:,.1f}",
            f"{scale * outcome.middle(name, lambda turn: turn.cost.redis_commands):,.0f}",
            f"{scale * outcome.middle(name, lambda turn: turn.cost.redis_trips):,.0f}",
            f"{outcome.middle(name, lambda turn: turn.resident_bytes) / 1e6:,.0f}",
        )
    _console.print(table)
    for target in comparison.targets:
        if target.of in outcome.turns and target.to in outcome.turns:
            reached = outcome.ratio(target.of, target.to)
            verdict = "met" if reached >= target.at_least else f"MISSED by {target.at_least - reached:.3f}"
            _console.print(f"  {target.of} / {target.to}: {reached:.3f}, target {target.at_least}: {verdict}")
    _console.print()


def show_foreground(latencies: dict[str, dict[str, float]]) -> None:
    """Print the latencies of the foreground."""
    if not latencies:
        _console.print("foreground: not measured, there is no pgbench beside this PostgreSQL")
        return
    table = Table(title="foreground: pgbench at a steady rate; median over the rounds", box=None)
    for head in ("application", "p50 ms", "p99 ms"):
        table.add_column(head, justify="left" if head == "application" else "right")
    for name, each in latencies.items():
        table.add_row(name, f"{each['p50_ms']:.2f}", f"{each['p99_ms']:.2f}")
    _console.print(table)
    _console.print()


def say(lines: list[str]) -> None:
    """Print lines unchanged."""
    for line in lines:
        _console.print(line, highlight=False)


def as_json(outcome: Outcome, rows: int, among: int) -> dict[str, Any]:
    """Return every turn and the ratios of the targets."""
    comparison = outcome.comparison
    return {
        "name": comparison.name,
        "rows": rows,
        "among": among,
        "turns": {
            name: [asdict(turn) | {"rate": turn.rate} for turn in turns] for name, turns in outcome.turns.items()
        },
        "targets": [
            asdict(target) | {"reached": outcome.ratio(target.of, target.to)}
            for target in comparison.targets
            if target.of in outcome.turns and target.to in outcome.turns
        ],
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()
