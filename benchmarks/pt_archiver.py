"""Comparison of pt-archiver with hand-written statements for the same work, on MariaDB."""

from __future__ import annotations

import subprocess
import time
from statistics import median
from typing import Final

from benchmarks.comparison import Comparison
from benchmarks.mariadb import MariaDB, program
from benchmarks.mariadb_programs import PROGRAMS, Program
from benchmarks.meters import Reading
from benchmarks.rounds import Outcome, Turn
from benchmarks.visits import AGE, SECONDS

_IDLE_RUNS: Final = 3
_OLD: Final = f"seen_at < CURRENT_DATE - INTERVAL {AGE.days} DAY"
_NONE: Final = "seen_at < '1999-01-01'"
_COLUMNS: Final = (
    "id BIGINT NOT NULL PRIMARY KEY, seen_at DATETIME(6) NOT NULL, user_id BIGINT NOT NULL, path VARCHAR(200) NOT NULL"
)
_FILL: Final = """
CREATE TABLE template ({columns}, INDEX visits_seen_at (seen_at, id));
INSERT INTO template SELECT n, CURRENT_DATE + INTERVAL ({seconds}) SECOND, n % 5000, concat('/articles/', n)
FROM (SELECT seq AS n FROM seq_1_to_{among}) AS numbers;
"""
#: Ends with a checkpoint of the table.
_RESET: Final = """
DROP TABLE IF EXISTS visits, old_visits;
CREATE TABLE visits LIKE template;
INSERT INTO visits SELECT * FROM template;
CREATE TABLE old_visits ({columns});
FLUSH TABLES visits FOR EXPORT;
UNLOCK TABLES;
"""
_LEFT: Final = "SELECT count(*) FROM visits WHERE {old}; SELECT count(*) FROM old_visits;"


def version() -> str:
    """Return the version of the installed pt-archiver."""
    done = subprocess.run([program("pt-archiver"), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def compare(server: MariaDB, rows: int, rounds: int) -> list[Outcome]:
    """Run the turns of every program, as `rounds.compare` does on PostgreSQL.

    Raises:
      RuntimeError: A program failed, or left rows.
    """
    seconds = SECONDS.format(rows=rows, among=2 * rows)
    server.execute(_FILL.format(columns=_COLUMNS, seconds=seconds, among=2 * rows))
    outcomes = []
    for name, programs in PROGRAMS.items():
        outcome = Outcome(Comparison(name=name, contestants={}, targets={}, undone=""))
        names = list(programs)
        for number in range(rounds):
            for each in names[number % len(names) :] + names[: number % len(names)]:
                outcome.turns.setdefault(each, []).append(_turn(server, programs[each], rows, name))
        outcomes.append(outcome)
    return outcomes


def _turn(server: MariaDB, measured: Program, rows: int, name: str) -> Turn:
    server.execute(_RESET.format(columns=_COLUMNS))
    part = max(1, rows // measured.part)
    old = _OLD if part == rows else f"{_OLD} AND id <= {part}"
    # Connecting, which the clock leaves out on PostgreSQL.
    idle = median(_seconds(server, measured, _NONE, 0) for _ in range(_IDLE_RUNS))
    seconds = _seconds(server, measured, old, part)
    left, copied = server.execute(_LEFT.format(old=old))
    if int(left) or int(copied) != (part if name.startswith("archive") else 0):
        raise RuntimeError(f"{name}: {left} of {part} rows are left, and {copied} were copied")
    return Turn(part, max(seconds - idle, 0.001), 0, 0, Reading(0, 0, None, 0, 0, 0))


def _seconds(server: MariaDB, measured: Program, old: str, rows: int) -> float:
    stdin = measured.stdin(old, rows)
    began = time.perf_counter()
    done = subprocess.run(measured.command(server, old), input=stdin, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise RuntimeError(f"{done.args[0]}: {done.stderr.strip()[-2000:]}")
    return seconds
