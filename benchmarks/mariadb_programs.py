"""Programs that delete or archive old rows on MariaDB: pt-archiver, and hand-written statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.comparison import FLOOR, LIMITED
from benchmarks.mariadb import DATABASE, MariaDB, program
from benchmarks.visits import BATCH

BULK: Final = "pt-archiver, in bulk"
BY_ROW: Final = "pt-archiver, row by row"
DEFAULT: Final = "pt-archiver, as by default"
#: A transaction for each row takes a hundred times as long, so it gets a hundredth of the rows.
_PART: Final = 100
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
        one = batch.format(old=old, batch=BATCH, before=BATCH - 1)
        return begin + one * (rows // BATCH + 1)

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


_BATCHES: Final = ("--limit", str(BATCH), "--commit-each")
_DEST: Final = ("--dest", "t=old_visits,L=1")
_COPY: Final = "INSERT INTO old_visits SELECT * "
#: Programs of each comparison by contestant.
PROGRAMS: Final[Mapping[str, Mapping[str, Program]]] = {
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
