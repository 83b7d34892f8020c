"""``--topology=citus-like``: tables of the tests are distributed tables of Citus, or PostgreSQL acts as if they were.

On a server with the extension, `Cluster` distributes them. On any other one, it lists them in a ``pg_dist_partition``
of the test's schema, and `CitusLike`, a proxy, refuses those of the library's statements that Citus 13.2 refuses, with
the SQLSTATEs and texts of Citus.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg2
import pytest
from peewee import CompositeKey, Model
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import parse_dsn

from tests.chaos.proxy import Link, Proxy
from tests.internals.database import Database

#: Tables that these tests' holds and predicates read; an application makes reference tables of them.
REFERENCE_TABLES: Final = ("legal_holds", "policies")
CATALOG: Final = """
CREATE TABLE pg_dist_partition (logicalrelid regclass PRIMARY KEY, partmethod "char", partkey text, repmodel "char");
GRANT SELECT ON pg_dist_partition TO PUBLIC;
CREATE FUNCTION citus_total_relation_size(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT pg_total_relation_size($1)'
"""
_LOCKS: Final = "Citus locks no row for a query of several shards; a locked row is waited for"
_GROUPS: Final = "Citus refuses a LIMIT for each group"
_AT_ONCE: Final = "the test is about a batch of one statement; on Citus it is a transaction"
_TRIGGERS: Final = "Citus has no triggers on distributed tables, so that a row that stays is one that has changed"
_LEASES: Final = "the runs of the test overlap; on Citus they have a lease"
_INDEXES: Final = "doctor does not examine the indexes of a distributed table"
_LOCAL: Final = "no local table can refer to a distributed one by a foreign key"
_BUILT_IN: Final = "the stage locks rows of several tables, which Citus refuses"
_SWEEPS: Final = "tests/integration/sweeps"
#: Beginning of a test's id -> why distributed tables leave it out.
LEFT_OUT: Final = {
    f"{_SWEEPS}/engine/test_batch_sizing.py::test_batch_whose_locks_others_wait_for_shrinks": _AT_ONCE,
    f"{_SWEEPS}/engine/test_executor_overrides.py::test_alerts_are_raised_above_their_thresholds_only": _LOCKS,
    f"{_SWEEPS}/engine/test_lost_connections.py": _AT_ONCE,
    f"{_SWEEPS}/engine/test_row_errors.py::test_imports_that_all_fail": _BUILT_IN,
    f"{_SWEEPS}/engine/test_row_errors.py::test_row_that_a_policy_refuses_fails_alone": _TRIGGERS,
    f"{_SWEEPS}/engine/test_row_errors.py::test_row_with_any_error_fails_alone[entities": _BUILT_IN,
    f"{_SWEEPS}/engine/test_row_errors.py::test_row_with_any_error_fails_alone[imports": _BUILT_IN,
    f"{_SWEEPS}/engine/test_row_errors.py::test_row_with_any_error_fails_alone[trackers": _BUILT_IN,
    f"{_SWEEPS}/engine/test_zombies.py::test_zombie_that_wakes_before_its_statement_commits_nothing": _AT_ONCE,
    f"{_SWEEPS}/engine/test_zombies.py::test_zombie_that_wakes_within_a_batch_commits_nothing": _LOCKS,
    f"{_SWEEPS}/stages/test_bisection.py::test_run_fails_after_a_few_probes_when_everything_times_out": _AT_ONCE,
    f"{_SWEEPS}/stages/test_call.py::test_function_is_not_called_for_a_locked_row": _LOCKS,
    f"{_SWEEPS}/stages/test_dependents_being_added.py::test_deletion_or_change_of_the_key_skips_the_row": _LOCKS,
    f"{_SWEEPS}/stages/test_groups.py": _GROUPS,
    f"{_SWEEPS}/stages/test_repeated_runs.py::test_later_run_compiles_no_statement_of_a_batch": _AT_ONCE,
    f"{_SWEEPS}/stages/test_undone_changes.py::test_row_whose_deletion_is_suppressed_fails_alone": _TRIGGERS,
    f"{_SWEEPS}/checks/test_triggers.py::test_triggers_that_the_action_fires_are_named": _TRIGGERS,
    "tests/integration/purge/test_holds.py::test_purge_that_ignores_holds_deletes": _LOCAL,
    "tests/integration/purge/test_holds.py::test_purge_whose_cascade": _LOCAL,
    "tests/integration/own_sweeps/test_broken.py::test_doctor_examines_the_sweeps_beside_a_broken_one": _INDEXES,
    "tests/integration/own_sweeps/test_installed.py::test_doctor_names_the_missing_index_of_a_query": _INDEXES,
    f"{_SWEEPS}/insight/test_now.py::test_no_run_would_start_while_redis_is_stopped": _LEASES,
}
_VOLATILE: Final = re.compile(r"\b(clock_timestamp|random|gen_random_uuid|nextval|setval|txid_current)\s*\(", re.I)
_MUTABLE: Final = re.compile(rf"{_VOLATILE.pattern}|\b(now|statement_timestamp|current_setting)\s*\(", re.I)
_CHANGE: Final = re.compile(r"\b(?:UPDATE|DELETE FROM|INSERT INTO) ((?:\"\w+\"\.)?\"?\w+\"?)", re.I)
_READ: Final = re.compile(r"\b(?:FROM|JOIN|USING) ((?:\"\w+\"\.)?\"?\w+\"?)", re.I)
_CTE: Final = re.compile(r'"?(\w+)"?(?: \([^)]*\))? AS (?:NOT )?(?:MATERIALIZED )?\(', re.I)
_NOT_TABLES: Final = ("pg_", "information_schema", "unnest", "jsonb_", "generate_series", "lateral", "only", "select")
#: Length of the message that asks for encryption. The server answers it, and the client begins again.
_ASKS_FOR_ENCRYPTION: Final = 8
_ROW_LOCKS: Final = "could not run distributed query with FOR UPDATE/SHARE commands"
_PLANNING: Final = "cannot perform distributed planning for the given modification"
_MUTABLE_IN: Final = "non-IMMUTABLE functions are not allowed in"
_UNSUPPORTED, _INTERNAL = "0A000", "XX000"


def refusal(sql: str, distributed: set[str], reference: set[str]) -> tuple[str, str] | None:
    """Return the SQLSTATE and text with which Citus refuses a statement; None for one that it executes.

    Parameters:
      distributed, reference: Names of such tables.
    """
    sql = re.sub("'(?:[^']|'')*'", "''", sql)
    detached = re.match(r"ALTER TABLE (\S+) DETACH PARTITION .*\bCONCURRENTLY\b", sql)
    if detached and _plain(detached[1]) in distributed:
        return _INTERNAL, "ALTER TABLE .. DETACH PARTITION .. CONCURRENTLY commands are currently unsupported."
    if re.match("CREATE|ALTER", sql):
        return None
    changes = bool(_named(_CHANGE, sql) & distributed)
    if changes and _VOLATILE.search(sql):
        return _UNSUPPORTED, "functions used in UPDATE queries on distributed tables must not be VOLATILE"
    ctes = {name.lower() for name in _CTE.findall(sql)}
    for part in _parts(sql):
        read = {name for name in _named(_READ, part) if not name.lower().startswith(_NOT_TABLES)} - ctes
        written = _named(_CHANGE, part) & distributed
        if not (read | written) & distributed:
            continue
        others = read - distributed - reference if read & distributed else set()
        for is_refused, text in (
            (re.search(r"\bFOR (NO KEY )?(UPDATE|SHARE)\b", part), _ROW_LOCKS),
            (re.search(r"\bLATERAL\b.*\bLIMIT\b", part, re.S), "cannot push down this subquery"),
            (others, "direct joins between distributed and local tables are not supported"),
            (written and re.search(r"\bctid\b", part), _PLANNING),
            (written and _is_mutable(part, r"\bCOALESCE\("), f"{_MUTABLE_IN} CASE or COALESCE statements"),
            (written and _is_mutable(part, r"\bRETURNING "), f"{_MUTABLE_IN} the RETURNING clause"),
        ):
            if is_refused:
                return _UNSUPPORTED, text
    return None


def _plain(name: str) -> str:
    return name.rpartition(".")[2].strip('"')


def _named(keyword: re.Pattern[str], sql: str) -> set[str]:
    """Return the tables after a keyword, without those in the library's own schema."""
    return {_plain(each) for each in keyword.findall(sql) if '_own".' not in each}


def _parts(sql: str) -> list[str]:
    """Return the queries of the CTEs of a statement, which Citus plans one by one, and what is left of it."""
    parts, left = [], sql
    for match in _CTE.finditer(sql):
        part = _argument(sql, match.end())
        parts.append(part)
        left = left.replace(part, "")
    return [*parts, left]


def _is_mutable(sql: str, before: str) -> bool:
    """Return whether a function that is not IMMUTABLE comes in what follows a text."""
    return any(_MUTABLE.search(_argument(sql, match.end())) for match in re.finditer(before, sql, re.I))


def _argument(sql: str, begin: int) -> str:
    """Return the text from a place to the bracket that closes what it is in."""
    depth = 0
    for end in range(begin, len(sql)):
        depth += (sql[end] == "(") - (sql[end] == ")")
        if depth < 0:
            return sql[begin:end]
    return sql[begin:]


class CitusLike(Proxy):
    """Proxy that lets the server raise the error of Citus instead of executing a statement that Citus refuses."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.distributed: set[str] = set()
        self.reference: set[str] = set()
        #: Whether the client has sent its first message, which has no type, and the beginning of its next one.
        self._unread: dict[Link, tuple[bool, bytes]] = {}

    def through(self, url: str) -> str:
        """Return the URL of a database by way of the proxy, with the URL's options."""
        given = parse_dsn(url)
        name, user = quote(given.get("dbname", "postgres")), quote(given.get("user", "postgres"))
        return f"postgresql://{user}@127.0.0.1:{self.port}/{name}?options={quote(given.get('options', ''))}"

    def _from_client(self, link: Link, data: bytes) -> bytes | None:
        has_begun, before = self._unread.get(link, (False, b""))
        data, forwarded = before + data, b""
        while len(data) >= 4 + has_begun:
            length = int(struct.unpack_from("!i", data, int(has_begun))[0]) + has_begun
            if len(data) < length:
                break
            message, data = data[:length], data[length:]
            forwarded += self._instead_of(message) if has_begun else message
            has_begun = has_begun or length > _ASKS_FOR_ENCRYPTION
        self._unread[link] = has_begun, data
        return forwarded

    def _instead_of(self, message: bytes) -> bytes:
        found = None
        if message[:1] == b"Q":
            found = refusal(message[5:-1].decode(errors="replace"), self.distributed, self.reference)
        if found is None:
            return message
        code, text = found
        raising = f"DO $$ BEGIN RAISE EXCEPTION '{text}' USING ERRCODE = '{code}'; END $$".encode() + b"\0"
        return b"Q" + struct.pack("!i", len(raising) + 4) + raising


class Cluster:
    """Distribution of a test's tables.

    Parameters:
      admin: Connection beside the library's, with the test's schema as its search path.
      proxy: None on a server with Citus.
    """

    def __init__(self, admin: Connection, proxy: CitusLike | None) -> None:
        self._admin = admin
        self._proxy = proxy
        if proxy is not None:
            proxy.distributed.clear()
            proxy.reference.clear()
            self._execute(CATALOG)

    @property
    def waits_for_locks(self) -> str:
        """A query that finds a row while a session waits for a lock of a row."""
        if self._proxy is None:
            return "SELECT 1 FROM citus_lock_waits"
        return "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'tuple')"

    def distribute(self, table: str, column: str) -> None:
        """Distribute the rows of a table to shards by a column."""
        if self._proxy is None:
            try:
                self._execute("SELECT create_distributed_table(%s, %s)", table, column)
            except psycopg2.errors.FeatureNotSupported as error:  # such as for a foreign key
                pytest.skip(f"Citus does not distribute {table}: {error.diag.message_primary}")
            return
        self._execute("INSERT INTO pg_dist_partition VALUES (%s, 'h', %s, 's')", table, column)
        self._proxy.distributed.add(table)

    def refer(self, table: str) -> None:
        """Make a reference table, which is on every node."""
        if self._proxy is None:
            self._execute("SELECT create_reference_table(%s)", table)
            return
        self._execute("INSERT INTO pg_dist_partition VALUES (%s, 'n', NULL, 't')", table)
        self._proxy.reference.add(table)

    def creating(self, database: Database) -> Callable[..., None]:
        """Return the database's `create_tables`, which then distributes each table by the first column of its key."""
        create = database.create_tables

        def create_tables(models: Sequence[type[Model]], **options: Any) -> None:
            create(models, **options)
            for model in models:
                meta: Any = model._meta
                key = meta.primary_key
                if meta.table_name in REFERENCE_TABLES or not key:
                    self.refer(meta.table_name)
                else:
                    field = meta.fields[key.field_names[0]] if isinstance(key, CompositeKey) else key
                    self.distribute(meta.table_name, field.column_name)

        return create_tables

    def _execute(self, sql: str, *values: str) -> None:
        with self._admin.cursor() as cursor:
            cursor.execute(sql, values or None)


def has_citus(url: str) -> bool:
    """Return whether a database has the extension."""
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL")
        return bool(cursor.fetchone()[0])


def proxy_of(url: str) -> CitusLike:
    """Return the proxy of a server, which listens on a unix socket."""
    given = parse_dsn(url)
    return CitusLike(Path(given["host"]) / f".s.PGSQL.{given.get('port', 5432)}")
