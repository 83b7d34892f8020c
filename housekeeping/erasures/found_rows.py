"""Rows of a subject in every table of its graph, counted and exported; and erased subjects that exist again.

The rows are those that one snapshot of each database has. Each link adds the rows that depend on the rows found so far,
until no link adds any more. So trees and circles end. The places of the rows are kept in temporary tables: memory does
not grow with their number.

After the restore of a backup, `look_for` finds erased subjects that exist again. The ledger has no keys of erased ones.
So the keys of all rows of the subject's table are read page by page, and the HMAC of each is compared with those of the
erasures.
"""

# ruff: noqa: S608 - names come from the catalog, quoted; values are parameters

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

from pydantic import SecretStr

from housekeeping.core.errors import DeclarationError
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.catalog import escaped, key_of, quoted, quoted_name, sql_name
from housekeeping.database.connection import database, handle_of, translate_postgres_errors
from housekeeping.erasures.graph import Branch, Reach, TableName
from housekeeping.erasures.stages import Conditions, rows_with_places, text_of, typed_key
from housekeeping.erasures.work import located
from housekeeping.ledger.erasures import each_secret, key_hmac, mark_of
from housekeeping.ledger.schema import Erasure, name_database
from housekeeping.sweeps.subjects import Subject

#: A snapshot lasts until everything is read. The last limit ends one whose reader has stopped reading.
_SNAPSHOT: Final = (
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SET LOCAL statement_timeout = 0; "
    "SET LOCAL idle_in_transaction_session_timeout = '1h'"
)
_PAGE: Final = 1_000_000  # characters that are fetched at once
_MOST_FETCHED: Final = 1000  # rows
_KEYS: Final = 5000  # keys of a subject's table that are read at once


def decision_of(branch: Branch) -> Literal["delete", "anonymise", "keep"]:
    """Return what becomes of the rows of a link."""
    return "delete" if branch.deletes else "anonymise" if branch.values else "keep"


class FoundRows:
    """Rows that belong to a subject; valid within the block of `found_rows`.

    Attributes:
      branches: The followed links.
      numbers: Number of rows by link, in the order of the graph; None is the subject's row. A row is counted once.
    """

    def __init__(
        self, reach: Reach, found: Mapping[str, str | None], branches: Sequence[Branch], *, of_others: bool
    ) -> None:
        self._reach, self._found, self._of_others = reach, found, of_others
        self.branches: Final = branches
        self.tables: Final = list(dict.fromkeys([reach.root, *(each.table for each in branches)]))
        self._places = {each: self._create(each, number) for number, each in enumerate(self.tables)}
        where, values = Conditions(reach, [found]).of_root("t")
        self.numbers: Final[dict[int | None, int]] = {
            None: self._add(reach.root, f"{rows_with_places(reach.root[1])} WHERE {where}", values, leads_on=True)
        }
        self.numbers.update(dict.fromkeys(range(len(branches)), 0))
        followed = dict.fromkeys(range(len(branches)), 0)
        # Not any(): each link is followed.
        while sum([self._follow(number, branch, followed) for number, branch in enumerate(branches)]):
            pass

    def _create(self, table: TableName, number: int) -> str:
        """Create the temporary table of the places of a table's rows, with the values that links compare."""
        name = f"housekeeping_found_{number}"
        handle = handle_of(table[0])
        handle.execute_sql(
            f"CREATE TEMPORARY TABLE {name} ON COMMIT DROP AS "
            f"SELECT {self._selected(table)} FROM {rows_with_places(table[1])} WITH NO DATA",
            (),
        )
        handle.execute_sql(
            f"ALTER TABLE {name} ADD housekeeping_number bigint GENERATED ALWAYS AS IDENTITY, "
            "ADD housekeeping_leads boolean, ADD PRIMARY KEY (housekeeping_table, housekeeping_row)"
        )
        return f"pg_temp.{name}"

    def _selected(self, table: TableName, alias: str = "t.") -> str:
        """Return the columns of a temporary table: where a row is, and what links compare with its dependents."""
        compared = dict.fromkeys(
            sql_name(name) for each in self._reach.below(table) for name in each.link.parent_columns
        )
        return ", ".join(f"{alias}{each}" for each in ("housekeeping_table", "housekeeping_row", *compared))

    def _add(self, table: TableName, source: str, values: Sequence[Any], *, leads_on: bool) -> int:
        """Add the rows of a table that are not known yet, and return their number.

        Parameters:
          source: What follows FROM; the rows are ``t``.
          leads_on: Whether rows that depend on them are the subject's as well.
        """
        place, handle = self._places[table], handle_of(table[0])
        row: Any = handle.execute_sql(
            f"WITH added AS (INSERT INTO {place} AS f ({self._selected(table, '')}, housekeeping_leads) "
            f"SELECT {self._selected(table)}, {leads_on} FROM {source} ON CONFLICT (housekeeping_table, "
            "housekeeping_row) DO UPDATE SET housekeeping_leads = TRUE, housekeeping_number = DEFAULT "
            "WHERE excluded.housekeeping_leads AND NOT f.housekeeping_leads RETURNING xmax = 0 AS is_new) "
            "SELECT count(*) FILTER (WHERE is_new) FROM added",
            values,
        ).fetchone()
        handle.execute_sql(f"ANALYZE {place}")
        return int(row[0])

    def _follow(self, number: int, branch: Branch, followed: dict[int, int]) -> bool:
        """Add the rows that a link leads to from rows where it was not followed yet. Return if there were such rows."""
        link, parent = branch.link, branch.parent
        first, last = followed[number], self._value(parent, "coalesce(max(housekeeping_number), 0)")
        if parent == self._reach.root:
            last = 1  # its row may be deleted; what it had is known
        if first == last:
            return False
        followed[number] = last
        columns = [sql_name(each) for each in link.parent_columns]
        owners = (
            f"SELECT DISTINCT {', '.join(columns)} FROM {self._places[parent]} WHERE housekeeping_leads "
            f"AND housekeeping_number BETWEEN {first + 1} AND {last} AND ({', '.join(columns)}) IS NOT NULL"
        )
        names = ", ".join(f"v{place}" for place in range(len(columns)))
        same = " AND ".join(f"t.{sql_name(each)} = o.v{place}" for place, each in enumerate(link.columns))
        own = [] if self._of_others else [_not_of(each) for each in self._reach.nearer_owners(branch)]
        where = " AND ".join(f"({each})" for each in (link.where, *own) if each is not None) or None
        dependents = f"AS o ({names}) JOIN {rows_with_places(link.table, where)} ON {same}"
        arrays = f"unnest({', '.join(f'%s::text[]::{escaped(kind)}[]' for kind in link.parent_types)})"
        given: Iterable[tuple[str, list[Any]]] = [(f"({owners})", [])]
        if parent == self._reach.root:
            given = [(arrays, [[self._found.get(each)] for each in link.parent_columns])]
        elif not branch.is_local:
            as_text = ", ".join(f"{each}::text" for each in columns)
            pages = _pages(parent[0], f"SELECT {as_text} FROM ({owners}) AS o")
            given = ((arrays, [list(each) for each in zip(*page, strict=True)]) for page in pages)
        for source, values in given:
            added = self._add(branch.table, f"{source} {dependents}", values, leads_on=branch.leads_on)
            self.numbers[number] += added
        return True

    def _value(self, table: TableName, selected: str) -> int:
        handle = handle_of(table[0])
        value: int = handle.execute_sql(f"SELECT {selected} FROM {self._places[table]}").fetchone()[0]
        return value

    def read(self, table: TableName) -> Iterator[str]:
        """Yield each row of a table as a JSON object in one line, in the order of the primary key.

        PostgreSQL writes the values: numbers, true, false, null, lists, and objects for JSON and composite types.
        Everything else is text: times with a zone in UTC, ``bytea`` in hexadecimal after ``\\x``.
        """
        try:
            order = ", ".join(f"t.{sql_name(each.column_name)}" for each in key_of(self._reach.model_of(table)))
        except DeclarationError:  # a table whose rows are kept needs no key
            order = "f.housekeeping_table, f.housekeeping_row"
        query = (
            f"SELECT row_to_json(t.*)::text FROM {escaped(table[1])} AS t JOIN {self._places[table]} AS f "
            f"ON t.ctid = f.housekeeping_row AND t.tableoid = f.housekeeping_table ORDER BY {order}"
        )
        for page in _pages(table[0], query):
            # Values of type json keep the white space that they were written with.
            yield from (text.replace("\n", " ").replace("\r", " ") for (text,) in page)


def _not_of(branch: Branch) -> str:
    """Return the condition that a row does not refer to anything by a link."""
    link = branch.link
    is_set = f"({', '.join(map(quoted, link.columns))}) IS NOT NULL"
    return f"({is_set if link.where is None else f'({link.where}) AND {is_set}'}) IS NOT TRUE"


@contextmanager
def found_rows(reach: Reach, found: Mapping[str, str | None], *, of_others: bool = True) -> Iterator[FoundRows]:
    """Find the rows that belong to a subject, and show them as they are now for the length of the block.

    Parameters:
      found: Values of the subject's row by column, see `Erasing.found`.
      of_others: Whether to include rows of others that refer to rows of the subject, such as replies: rows by a link
        that leads back and does not delete them, and those of which another one is the `Reach.nearer_owners`.

    Raises:
      peewee.PeeweeException: A database does not answer, or the role may not create temporary tables.
    """
    branches = [each for each in reach.branches if of_others or each.deletes or not each.leads_back]
    with ExitStack() as stack:
        for name in dict.fromkeys([reach.root[0], *(each.table[0] for each in branches)]):
            stack.enter_context(handle_of(name).atomic())
            handle_of(name).execute_sql(_SNAPSHOT)
        yield FoundRows(reach, found, branches, of_others=of_others)


def export(subject: Subject, reach: Reach, found: Mapping[str, str | None], settings: Settings) -> Iterator[str]:
    """Yield each row that belongs to a subject as a JSON object in one line, with its table; then its objects.

    Secrets of the settings are masked. Rows of others that refer to rows of the subject are left out.

    Raises:
      DeclarationError: A location of objects is not configured.
      peewee.PeeweeException, ObjectStoreUnavailable: A server does not answer.
    """
    secrets = [json.dumps(each)[1:-1] for each in _secrets(settings)]
    with found_rows(reach, found, of_others=False) as rows:
        for table in rows.tables:
            branches = [each for each in rows.branches if each.table == table]
            decisions = ["delete"] if table == reach.root else map(decision_of, branches)
            shown = {"table": table[1], "decision": " or ".join(dict.fromkeys(decisions))}
            begin = json.dumps(name_database(shown, table[0]))[:-1]
            for row in rows.read(table):
                line = f'{begin}, "row": {row}}}'
                for each in secrets:
                    line = line.replace(each, "***")
                yield line
    for objects in subject.objects:
        store, key = located(objects, settings, found)
        for paths in store.paths_below(key) if key.endswith("/") else [[key]]:
            yield from (json.dumps({"location": objects.location, "object": each}) for each in paths)


def _secrets(settings: Settings) -> Iterator[str]:
    """Yield the values of the settings that are secret, and URLs, which may have passwords."""
    for value in (getattr(settings, name) for name in type(settings).model_fields):
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]:
            text = each.get_secret_value() if isinstance(each, SecretStr) else each
            if isinstance(text, str) and (isinstance(each, SecretStr) or "://" in text):
                yield from text.split(",") if isinstance(each, SecretStr) else [text]
    yield from (each for each in (settings.web_token, settings.web_read_token) if each)


def _pages(of_database: str, query: str) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Yield the rows of a query of texts, by a cursor. Large rows make small pages."""
    handle, size = handle_of(of_database), 1
    handle.execute_sql(f"DECLARE housekeeping_rows NO SCROLL CURSOR FOR {query}", ())
    while page := handle.execute_sql(f"FETCH {size} FROM housekeeping_rows", ()).fetchall():
        yield page
        largest = max(sum(len(text or "") for text in row) for row in page)
        size = max(1, min(_MOST_FETCHED, 2 * size, _PAGE // max(1, largest)))
    handle.execute_sql("CLOSE housekeeping_rows", ())


#: States of erasures that may have erased something.
_ERASED: Final = ("done", "incomplete", "failed")


class Erased(NamedTuple):
    """An earlier erasure."""

    subject: str
    key_hmac: str
    erasure_id: int


@dataclass(slots=True)
class Replay:
    """Earlier erasures, and which of their subjects exist.

    Attributes:
      back: Subject, values of its primary key, and the earlier erasure.
      lost: Number of erasures that cannot be looked for, because their secret is unknown.
      undeclared: Number of erasures of kinds that are not declared any more, by kind.
    """

    back: list[tuple[Subject, list[str], Erased]] = field(default_factory=list)
    lost: int = 0
    undeclared: dict[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all subjects could be looked for."""
        return not (self.lost or self.undeclared)


def erased_since(since: datetime) -> Iterator[Erased]:
    """Yield the erasures in the ledger that ended at this time or later, and were not refused."""
    with database.using(MAIN), translate_postgres_errors():
        rows: Any = Erasure.select(Erasure.subject, Erasure.key_hmac, Erasure.id)
        ended = rows.where(Erasure.ended_at >= since, Erasure.state.in_(_ERASED)).order_by(Erasure.id)
        yield from (Erased(*row) for row in ended.tuples())


def erased_by_receipts(receipts: Iterable[Mapping[str, Any]], since: datetime) -> Iterator[Erased]:
    """Yield the erasures of verified receipts that ended at this time or later, and were not refused."""
    for each in receipts:
        if each["state"] in _ERASED and datetime.fromisoformat(each["ended_at"]) >= since:
            yield Erased(each["subject"], each["key_hmac"], each["id"])


def look_for(erased: Iterable[Erased], subjects: Mapping[str, Subject], secret: SecretStr) -> Replay:
    """Return which subjects of earlier erasures exist.

    Parameters:
      secret: The setting ``HOUSEKEEPING_ERASURE_KEY``.

    Raises:
      peewee.PeeweeException: A database does not answer.
    """
    found, secrets = Replay(), {mark_of(each): each for each in each_secret(secret)}
    wanted: dict[str, dict[str, Erased]] = {}
    for each in erased:
        if each.key_hmac.rpartition(".")[2] not in secrets:
            found.lost += 1
        elif each.subject not in subjects:
            found.undeclared[each.subject] = found.undeclared.get(each.subject, 0) + 1
        else:
            wanted.setdefault(each.subject, {})[each.key_hmac] = each
    for name, erasures in wanted.items():
        marks = {each.rpartition(".")[2] for each in erasures}
        used = [secrets[each] for each in marks]
        for key in _keys(subjects[name]):
            same = next((digest for each in used if (digest := key_hmac(each, name, key)) in erasures), None)
            if same is not None:
                found.back.append((subjects[name], key, erasures[same]))
    return found


def _keys(subject: Subject) -> Iterator[list[str]]:
    """Yield the primary key of each row of the subject's table, as PostgreSQL writes its values."""
    with database.using(subject.database):
        model = subject.model
        key = typed_key(model)
        own, texts = ", ".join(key), ", ".join(text_of(name, kind) for name, kind in key.items())
        given = ", ".join(f"%s::text::{kind}" for kind in key.values())
        sql = f"SELECT {texts} FROM {quoted_name(model)}"
        last: list[str] = []
        while True:
            after = f" WHERE ({own}) > ({given})" if last else ""
            page: Any = database.execute_sql(f"{sql}{after} ORDER BY {own} LIMIT {_KEYS}", last).fetchall()
            yield from (list(row) for row in page)
            if len(page) < _KEYS:
                return
            last = list(page[-1])
