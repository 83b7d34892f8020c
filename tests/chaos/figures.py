"""Figures of a run of the suite: faults, results and takeover times."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

_HEAD: Final = """# Figures of the chaos suite

Written by `pytest tests/chaos --chaos-figures FILE`; see [what the suite does](chaos.md).
"""


@dataclass
class Figures:
    """Figures over all tests of a run.

    Attributes:
      faults: By kind.
      takeovers: Seconds from SIGKILL to the first commit of the successor, by settings.
      processed: Records that were to be processed.
      lost, doubled: Of these, those that were not, and those that were more than once or counted wrongly.
      commits: Transactions that changed anything.
      seeds: Of the random tests.
    """

    faults: Counter[str] = field(default_factory=Counter)
    takeovers: dict[str, list[float]] = field(default_factory=dict)
    processed: int = 0
    lost: int = 0
    doubled: int = 0
    commits: int = 0
    seeds: list[int] = field(default_factory=list)

    def add(self, others: Figures) -> None:
        """Add the figures of another process."""
        self.faults.update(others.faults)
        for settings, seconds in others.takeovers.items():
            self.takeovers.setdefault(settings, []).extend(seconds)
        self.processed += others.processed
        self.lost += others.lost
        self.doubled += others.doubled
        self.commits += others.commits
        self.seeds += others.seeds

    def taken_over(self, settings: str, seconds: float) -> None:
        """Record the time of a takeover."""
        self.takeovers.setdefault(settings, []).append(seconds)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of each figure."""
        yield "faults injected", str(sum(self.faults.values()))
        for kind, number in sorted(self.faults.items()):
            yield f"- {kind}", str(number)
        for settings, seconds in sorted(self.takeovers.items()):
            middle, late = percentile(seconds, 50), percentile(seconds, 99)
            yield f"takeovers, {settings}", f"{len(seconds)}; p50 {middle:.1f} s, p99 {late:.1f} s"
        yield "records to process", f"{self.processed:,}"
        yield "transactions looked at", f"{self.commits:,}"
        yield "lost", str(self.lost)
        yield "doubled", str(self.doubled)
        yield "seeds", ", ".join(map(str, self.seeds)) or "none"

    def as_text(self) -> str:
        """Return the figures for the terminal."""
        return "\n".join(f"{name + ':':<44}{value}" for name, value in self.lines())

    def as_page(self) -> str:
        """Return the figures as a page of the documentation."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in self.lines())
        machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
        return f"{_HEAD}\nMachine: {machine}.\n\n| figure | value |\n|---|---|\n{rows}\n"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that `percent` percent of all values do not exceed."""
    place = -(-len(values) * percent // 100)
    return sorted(values)[max(place, 1) - 1]
