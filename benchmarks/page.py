"""Command that writes figures into the documentation: ``python -m benchmarks.page figures.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

PAGE: Final = Path(__file__).parents[1] / "docs/explanation/benchmarks.md"
_BEGIN: Final = "<!-- figures -->\n"
_END: Final = "<!-- end of figures -->"


@click.command()
@click.argument("figures", type=click.Path(exists=True, path_type=Path))
def main(figures: Path) -> None:
    """Replace the figures of the page with those of a run with ``--json``."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    lines = "\n".join(_lines(json.loads(figures.read_text())))
    PAGE.write_text(f"{before}{_BEGIN}\n{lines}\n\n{_END}{after}", encoding="utf-8")


def _lines(told: dict[str, Any]) -> Iterator[str]:
    yield "| condition | |"
    yield "|---|---|"
    for name, value in told["machine"].items():
        words = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        yield f"| {name} | {words} |"
    yield ""
    yield "| comparison | who | to whom | times as fast | target | |"
    yield "|---|---|---|---|---|---|"
    for each in told["comparisons"]:
        for target in each.get("targets", ()):
            missing = target["at_least"] - target["reached"]
            verdict = "met" if missing <= 0 else f"missed by {missing:.2f}"
            reached = f"{target['reached']:.2f} | at least {target['at_least']} | {verdict}"
            yield f"| {each['name']} | {target['of']} | {target['to']} | {reached} |"
    for each in told["comparisons"]:
        yield ""
        yield from _foreground(each) if "latencies" in each else _comparison(each)
    for line in told.get("verdicts", ()):
        yield ""
        yield f"{line}."


def _comparison(each: dict[str, Any]) -> Iterator[str]:
    turns: dict[str, list[dict[str, Any]]] = each["turns"]
    rounds = len(next(iter(turns.values())))
    yield f"**{each['name']}**: {each['rows']:,} stale among {each['among']:,}, {rounds} rounds"
    yield ""
    yield "| contestant | a second | CPU s | of it own | commits | statements | WAL MB | Redis commands | trips | MB |"
    yield "|---|" + "---:|" * 9
    for name, own in turns.items():
        scale = each["rows"] / max(1, own[0]["done"])
        cost = {key: scale * median(turn["cost"][key] or 0 for turn in own) for key in own[0]["cost"]}
        cpu = scale * median(turn["own_seconds"] for turn in own)
        yield (
            f"| {name} | {median(turn['rate'] for turn in own):,.0f} | {cpu + cost['server_seconds']:.2f} | {cpu:.2f} "
            f"| {cost['commits']:,.0f} | {cost['statements']:,.0f} | {cost['wal_bytes'] / 1e6:,.1f} "
            f"| {cost['redis_commands']:,.0f} | {cost['redis_trips']:,.0f} "
            f"| {median(turn['resident_bytes'] for turn in own) / 1e6:,.0f} |"
        )


def _foreground(each: dict[str, Any]) -> Iterator[str]:
    yield "**foreground**: pgbench at 200 transactions a second, from when each was due"
    yield ""
    yield "| application | p50 ms | p99 ms |"
    yield "|---|---:|---:|"
    for name, latency in each["latencies"].items():
        yield f"| {name} | {latency['p50_ms']:.2f} | {latency['p99_ms']:.2f} |"


if __name__ == "__main__":
    main()
