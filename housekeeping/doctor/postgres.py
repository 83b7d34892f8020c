"""Check of the PostgreSQL server: version, schema, timeouts, clock, long transactions, and rows of the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import SchemaMissing
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.catalog import quoted_name
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.models import OutboxRow
from housekeeping.sweeps.ledger.outbox import OVERDUE
from housekeeping.sweeps.registry import Finding

#: What `version()` of other servers contains that speak PostgreSQL's protocol.
_OTHERS: Final = {"CockroachDB": "CockroachDB", "YugabyteDB": "YugabyteDB", "-YB-": "YugabyteDB"}
OLDEST: Final = 130000  # PostgreSQL 13, the oldest tested version
#: VACUUM cannot remove rows that were deleted after the oldest open transaction started.
LONG: Final = timedelta(minutes=10)
_SHOWN: Final = 5  # transactions
_NTP: Final = "synchronize both by NTP"
#: A row with this many attempts has waited for half an hour.
_MANY: Final = 6
_EXAMINED: Final = 10_000  # rows

_SUMMARY: Final = """
SELECT event, subscription,
    count(*) FILTER (WHERE due_at < clock_timestamp() - %s),
    count(*) FILTER (WHERE attempts >= %s), max(attempts), max(error) FILTER (WHERE attempts >= %s)
FROM (SELECT * FROM {table} ORDER BY id LIMIT %s) AS first GROUP BY event, subscription ORDER BY 1, 2
"""


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the connection, schema, clock, session settings and long transactions."""
    with translate_postgres_errors():
        other = other_server()
    if other is not None:
        yield Finding("error", "postgres", "server", other, "use PostgreSQL 13 or later")
        return
    with translate_postgres_errors():
        before = SYSTEM_CLOCK.now()
        version, number, in_recovery, read_only, at, user = _row(
            "SELECT current_setting('server_version'), current_setting('server_version_num')::int, "
            "pg_is_in_recovery(), current_setting('default_transaction_read_only'), clock_timestamp(), current_user"
        )
        skew = ClockSkew.between(before, at, SYSTEM_CLOCK.now())
    yield Finding("fine", "postgres", "connection", f"PostgreSQL {version} as {user}")
    if database.prepared() is None:
        text = "transaction mode: limits are sent with each transaction, and no statements are prepared"
        yield Finding("fine", "postgres", "pooler", text)
    if number < OLDEST:
        yield Finding(
            "warning", "postgres", "version", f"{version} is older than 13", "upgrade; 13 and later are tested"
        )
    if in_recovery or read_only == "on":
        what = "a replica" if in_recovery else "read-only"
        yield Finding("error", "postgres", "writing", f"this server is {what}", "use the URL of the primary")
    yield from _failover()
    yield from _schema()
    yield from _clock(skew)
    yield from _session()
    yield from _long_transactions()


def _failover() -> Iterator[Finding]:
    parameters = database.connect_params
    hosts = len(str(parameters.get("host", "")).split(","))
    if hosts > 1 and parameters.get("target_session_attrs") not in ("read-write", "primary"):
        text = f"the URL has {hosts} hosts, and a session may reach one that is only a replica"
        yield Finding("warning", "postgres", "failover", text, "add target_session_attrs=read-write to the URL")
    elif hosts > 1:
        yield Finding("fine", "postgres", "failover", f"{hosts} hosts; sessions use the one that accepts writes")
    replicas, names = _row(
        "SELECT (SELECT count(*) FROM pg_stat_replication), current_setting('synchronous_standby_names')"
    )
    if replicas:
        loss = "loses nothing" if names else "may undo the last batches, which the next run repeats"
        text = f"{counted(replicas, 'replica')} ({'synchronous' if names else 'asynchronous'}): a failover {loss}"
        yield Finding("fine", "postgres", "replication", text)


def other_server() -> str | None:
    """Return why the server cannot be used although it speaks PostgreSQL's protocol; None for PostgreSQL.

    Raises:
      peewee.PeeweeException: If the server cannot be asked.
    """
    (version,) = _row("SELECT version()")
    name = next((name for mark, name in _OTHERS.items() if mark in version), None)
    if name is None:
        return None
    return f"this server is {name}: it lacks catalogs, locks and system columns of PostgreSQL that the batches need"


def _schema() -> Iterator[Finding]:
    try:
        schema.require()
    except SchemaMissing as missing:
        yield Finding("error", "postgres", "schema", str(missing), "housekeeping init")
    else:
        yield Finding("fine", "postgres", "schema", "the library's own tables are up to date")


def _clock(skew: ClockSkew) -> Iterator[Finding]:
    if skew.refused:
        yield Finding("error", "postgres", "clock", f"no run starts on this machine: {skew}", _NTP)
    elif skew.exceeded:
        yield Finding("warning", "postgres", "clock", str(skew), _NTP)
    else:
        yield Finding("fine", "postgres", "clock", "within 5 s of this machine's")


def _session() -> Iterator[Finding]:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "TimeZone")
    values = dict(zip(names, _row(f"SELECT {', '.join(f'current_setting({n!r})' for n in names)}"), strict=True))
    off = [name for name in names[:3] if values[name] == "0"]
    if off:
        text = f"{', '.join(off)} off: a statement that hangs blocks a thread for good"
        yield Finding(
            "warning",
            "postgres",
            "timeouts",
            text,
            "remove it from the URL's options; defaults: 30 s, 10 s, 60 s",
        )
    else:
        yield Finding("fine", "postgres", "timeouts", ", ".join(f"{name} {values[name]}" for name in names[:3]))
    if values["TimeZone"] not in ("UTC", "Etc/UTC"):
        text = f"sessions use {values['TimeZone']}: times without time zone would be read in it"
        yield Finding("warning", "postgres", "time zone", text, "remove TimeZone from the URL's options")


def _long_transactions() -> Iterator[Finding]:
    rows = database.execute_sql(
        "SELECT pid, coalesce(usename, '?'), coalesce(nullif(application_name, ''), '?'), "
        "extract(epoch FROM clock_timestamp() - xact_start)::int FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND xact_start < clock_timestamp() - %s "
        "AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT %s",
        (LONG, _SHOWN),
    ).fetchall()
    for pid, user, application, seconds in rows:
        text = f"{application} ({user}, process {pid}) has had a transaction open for {seconds // 60} min"
        yield Finding(
            "warning",
            "postgres",
            "long transactions",
            text,
            f"VACUUM cannot remove newer deleted rows until it ends; to end it: SELECT pg_terminate_backend({pid})",
        )
    if not rows:
        yield Finding("fine", "postgres", "long transactions", "none over 10 min")


def _row(sql: str) -> Any:
    return database.execute_sql(sql).fetchone()


def outbox(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the oldest rows. Handlers are in other processes, so only the rows can be examined."""
    table = quoted_name(OutboxRow)
    if database.execute_sql("SELECT to_regclass(%s)", (table,)).fetchone()[0] is None:
        return  # another check reports the missing schema
    summaries = database.execute_sql(_SUMMARY.format(table=table), (OVERDUE, _MANY, _MANY, _EXAMINED)).fetchall()
    healthy = True
    for event, name, overdue, failing, attempts, error in summaries:
        if overdue:
            healthy = False
            yield Finding(
                "error",
                "postgres",
                "outbox",
                f"{counted(overdue, 'row')} of {event}: no process delivers to the subscription {name!r}",
                "import the module with its events.on(...) where housekeeping.outbox runs; if the handler was removed, "
                f"delete its rows from {table}",
            )
        elif failing:
            healthy = False
            yield Finding(
                "warning",
                "postgres",
                "outbox",
                f"{counted(failing, 'row')} of {event} could not be delivered to {name!r} for "
                f"{counted(attempts, 'time')}: {error}",
                "repair the handler; each row is retried once an hour",
            )
    if healthy:
        yield Finding("fine", "postgres", "outbox", "no overdue rows")
