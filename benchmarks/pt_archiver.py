"""Comparison of pt-archiver with hand-written statements for the same work, on MariaDB."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks import visits
from benchmarks.comparison import FLOOR, Comparison
from benchmarks.mariadb import DATABASE, MariaDB, program
from benchmarks.meters import Reading
from benchmarks.rounds import Outcome, Turn

BULK: Final = "pt-archiver, in bulk"
BY_ROW: Final = "pt-archiver, row by row"
DEFAULT: Final = "pt-archiver, as by default"
LIMITED: Final = "floor, LIMIT without a cursor"
#: A transaction for each row takes a hundred times as long, so it gets a hundredth of the rows.
_PART: Final = 100
_OLD: Final = f"seen_at < CURRENT_DATE - INTERVAL {visits.AGE.days} DAY"
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
_NEXT: Final = """
SET @upto = coalesce((SELECT id FROM visits WHERE {old} AND id > @last ORDER BY id LIMIT {before}, 1), 1 << 62);
{changes}
SET @last = @upto;
"""
_RANGE: Final = "FROM visits WHERE {old} AND id > @last AND id <= @upto"
_OLDEST: Final = "FROM visits WHERE {old} ORDER BY seen_at, id LIMIT {batch}"


@dataclass(frozen=True, slots=True)
class Program:
    """A command, given the server and the condition of the rows, and what it reads from its stdin."""

    command: Callable[[MariaDB, str], list[str]]
    stdin: Callable[[str, int], str] = lambda old, rows: ""
    part: int = 1


def _loop(begin: str, batch: str) -> Program:
    """Return statements for as many batches as there are, and one more."""

    def statements(old: str, rows: int) -> str:
        one = batch.format(old=old, batch=visits.BATCH, before=visits.BATCH - 1)
        return begin + one * (rows // visits.BATCH + 1)

    return Program(lambda server, old: server.client(), statements)


def _by_cursor(changes: str) -> Program:
    return _loop("SET autocommit = 0, @last = 0;", _NEXT.replace("{changes}", changes))


def _limited(changes: str) -> Program:
    return _loop("SET autocommit = 0;", changes)


def _pt_archiver(*options: str, part: int = 1) -> Program:
    def command(server: MariaDB, old: str) -> list[str]:
        source = f"S={server.socket},u=root,D={DATABASE},t=visits,L=1"
        plain = ["--source", source, "--charset", "utf8", "--no-version-check"]
        return [program("pt-archiver"), *plain, "--where", old, *options]

    return Program(command, part=part)


_BATCHES: Final = ("--limit", str(visits.BATCH), "--commit-each")
_DEST: Final = ("--dest", "t=old_visits,L=1")
_COPY: Final = "INSERT INTO old_visits SELECT * "
COMPARISONS: Final[Mapping[str, Mapping[str, Program]]] = {
    "delete, MariaDB": {
        FLOOR: _by_cursor(f"DELETE {_RANGE}; COMMIT;"),
        LIMITED: _limited(f"DELETE {_OLDEST}; COMMIT;\n"),
        BULK: _pt_archiver("--purge", *_BATCHES, "--bulk-delete"),
        BY_ROW: _pt_archiver("--purge", *_BATCHES),
        DEFAULT: _pt_archiver("--purge", part=_PART),
    },
    "archive, MariaDB": {
        FLOOR: _by_cursor(f"{_COPY} {_RANGE}; DELETE {_RANGE}; COMMIT;"),
        LIMITED: _limited(f"{_COPY} {_OLDEST}; DELETE {_OLDEST}; COMMIT;\n"),
        BULK: _pt_archiver(*_DEST, *_BATCHES, "--bulk-delete", "--bulk-insert"),
        BY_ROW: _pt_archiver(*_DEST, *_BATCHES),
        DEFAULT: _pt_archiver(*_DEST, part=_PART),
    },
}


def version() -> str:
    """Return the version of the installed pt-archiver."""
    done = subprocess.run([program("pt-archiver"), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def compare(server: MariaDB, rows: int, rounds: int) -> list[Outcome]:
    """Run the turns of every program, as `rounds.compare` does on PostgreSQL.

    Raises:
      RuntimeError: A program failed, or left rows.
    """
    seconds = visits.SECONDS.format(rows=rows, among=2 * rows)
    server.execute(_FILL.format(columns=_COLUMNS, seconds=seconds, among=2 * rows))
    outcomes = []
    for name, programs in COMPARISONS.items():
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
    idle = _seconds(server, measured, _NONE, 0)
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
