"""Rounds, in which every contestant gets a turn, in a process of its own and on a fresh copy of the same data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.comparison import Comparison, Place
from benchmarks.meters import LongestTransaction, Meters, Reading
from benchmarks.servers import Stage
from housekeeping.core.settings import PREFIX


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one contestant in one round.

    Attributes:
      done: Records settled, as the database tells it.
      own_seconds: Processor time of its own process.
      longest_seconds: Of its transactions; None if not measured.
    """

    done: int
    seconds: float
    own_seconds: float
    resident_bytes: int
    cost: Reading
    longest_seconds: float | None = None

    @property
    def rate(self) -> float:
        """Return the records per second."""
        return self.done / self.seconds

    @property
    def worked(self) -> float:
        """Return the CPU seconds of the contestant and the servers, independent of other programs."""
        return self.own_seconds + self.cost.server_seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """All turns of a comparison by contestant, in order of the rounds."""

    comparison: Comparison
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def ratio(self, of: str, to: str) -> float:
        """Return the median ratio of the speeds of `of` and `to` over the rounds."""
        pairs = zip(self.turns[of], self.turns[to], strict=True)
        return median(mine.rate / theirs.rate for mine, theirs in pairs)

    @property
    def base(self) -> str:
        """Return the contestant that the others are compared with."""
        candidates = list(self.turns)[: self.comparison.floors]
        return max(candidates, key=lambda name: self.middle(name, lambda turn: turn.rate))

    def middle(self, contestant: str, of: Callable[[Turn], float]) -> float:
        """Return the median of a value over the turns of a contestant."""
        return median(of(turn) for turn in self.turns[contestant])


def compare(stage: Stage, comparison: Comparison, rows: int | None, rounds: int, only: list[str]) -> Outcome:
    """Run the turns of every contestant.

    Parameters:
      rows: Stale records; by default the comparison's own number. All others grow in proportion.
      only: The contestants that are wanted; none: all.
    """
    rows = rows or comparison.rows
    among = rows * comparison.among // comparison.rows
    template = stage.template(
        f"{comparison.template}_{rows}_{among}",
        list(comparison.models),
        lambda connection: comparison.fill(connection, rows, among),
    )
    outcome = Outcome(comparison)
    names = [name for name in comparison.contestants if not only or name in only]
    for number in range(min(rounds, comparison.rounds_at_most)):
        # Rotate, so that no contestant always follows the same one.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            outcome.turns.setdefault(name, []).append(_turn(stage, comparison, name, template, rows))
    return outcome


def _turn(stage: Stage, comparison: Comparison, contestant: str, template: str, rows: int) -> Turn:
    client = redis.Redis.from_url(stage.servers.redis_url)
    client.flushall()  # temporary server
    with ExitStack() as stack:
        name, folder = stack.enter_context(stage.copy_of(template)), stack.enter_context(tempfile.TemporaryDirectory())
        admin = stack.enter_context(stage.connected())
        place = Place(stage.servers.database_url(name), stage.servers.redis_url, rows, Path(folder))
        comparison.prepare(place)
        meters = Meters(admin, client, stage.servers.postmaster)
        before_left = _left(stage, comparison, name, place)
        told = {"comparison": comparison.name, "contestant": contestant, "rows": rows, "folder": folder}
        told |= {"database_url": place.database_url, "redis_url": place.redis_url}
        with process(Path(folder)) as contestant_process:
            assert contestant_process.stdin is not None
            answer(contestant_process, json.dumps(told), Path(folder))
            before = meters.read(name)
            longest = LongestTransaction(stack.enter_context(stage.connected()), name)
            with longest if comparison.times_transactions else nullcontext():
                took: dict[str, Any] = json.loads(answer(contestant_process, "go", Path(folder)))
            cost = meters.read(name).since(before)
            contestant_process.stdin.close()
        done = before_left - _left(stage, comparison, name, place)
    client.close()
    return Turn(done, took["seconds"], took["own_seconds"], took["resident_bytes"], cost, longest.seconds)


def _left(stage: Stage, comparison: Comparison, database: str, place: Place) -> int:
    if callable(comparison.undone):
        return comparison.undone(place)
    with stage.connected(database) as connection, connection.cursor() as cursor:
        cursor.execute(comparison.undone)
        row: Any = cursor.fetchone()
        return int(row[0])


def process(folder: Path, command: Sequence[str] = (sys.executable, "-m", "benchmarks.turn")) -> subprocess.Popen[str]:
    """Start a process for one turn, which waits for its contestant's name. Its stderr goes to the file ``log``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=kept | {"PYTHONPATH": str(Path(__file__).parents[1])},
            text=True,
        )


def answer(process: subprocess.Popen[str], line: str, folder: Path) -> str:
    """Send a line to a process and return its answer.

    Raises:
      RuntimeError: When it has ended instead; the text shows the end of its log.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"a contestant ended: {(folder / 'log').read_text(errors='replace')[-2000:]}")
    return answer
