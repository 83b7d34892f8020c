"""``housekeeping init``, ``list`` and ``doctor``: create the library's tables, list workers, check an installation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
from peewee import PeeweeException
from rich.text import Text

from housekeeping.cli.main import load_settings, use_database_if_set
from housekeeping.cli.output import (
    WIDE,
    json_option,
    notify,
    out,
    print_as_json,
    print_not_set_up,
    print_table,
    progress,
    say,
    table,
    wants_json,
)
from housekeeping.core.cron import in_words
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError, Refused, SchemaMissing, WrongArgument
from housekeeping.core.logs import counted, error_line, format_duration, printable
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import escaped
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.engine.registry import by_database, setup_problems
from housekeeping.insight.wording import format_age, format_ticks, format_time, next_ticks, state_of
from housekeeping.ledger import schema
from housekeeping.ledger.operators import Override, overrides
from housekeeping.ledger.schema import name_database, use_database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.values import Finding, Level, SetupProblem
from housekeeping.workers import configured_sweeps, families_of

if TYPE_CHECKING:
    from housekeeping.insight.load import DatabaseLoad

#: Worst finding -> exit status; 2 is for wrong usage and settings.
_EXIT: Final[dict[Level, int]] = {"fine": 0, "warning": 3, "error": 1}
_LABEL: Final[dict[Level, tuple[str, str]]] = {
    "fine": ("ok      ", "green"),
    "warning": ("warning ", "yellow"),
    "error": ("ERROR   ", "bold red"),
}


@click.command()
@json_option()
@click.option("--grants", "role", metavar="ROLE", help="Print the GRANT statements that a role needs.")
@click.option("--database", "load", is_flag=True, help="Show what the workers cost PostgreSQL now.")
def doctor(role: str | None, load: bool) -> None:
    """Check everything that the workers depend on and suggest repairs. Changes nothing.

    \b
    PostgreSQL  connection, version, schema, rights, timeouts, time zone,
                long transactions, autovacuum
    tables      needed columns, partitions, unique keys, foreign keys
    indexes     EXPLAIN of each worker's statements, and the missing
                CREATE INDEX CONCURRENTLY
    throttles   limits on WAL, your own functions (setting gates)
    subjects    secret of erasures, tables without a decision, rights,
                object stores
    Redis       eviction, persistence, other users
    others      dead letters, object stores, repositories, git, clocks,
                the dashboard's token, processes

    --database shows rows and WAL per second, replication lag, sessions that
    wait for locks, and the dead rows of the workers' tables, each with its
    limit. Values that the role may not read are unknown. Its exit status is 3
    if a value is over its limit, and 1 if a database cannot be read.

    Exit status: 0 all fine; 3 warnings; 1 errors; 2 wrong settings.
    """
    from housekeeping.doctor import examine

    settings = load_settings()
    sweeps = configured_sweeps(settings)
    use_database_if_set(settings)
    if role is not None:
        _print_grants(role, settings, sweeps)
        return
    if load:
        from housekeeping.insight.load import read_loads

        with progress("reading"):
            loads = read_loads(sweeps.values())
        if not print_as_json({"databases": loads}):
            for each in loads:
                _print_load(each)
        sys.exit(1 if any(each.incomplete for each in loads) else 3 if any(each.over for each in loads) else 0)
    findings: list[Finding] = []
    with progress("checking") as update:
        for finding in examine(settings, sweeps):
            findings.append(finding)
            update(f"checking {finding.area}: {finding.subject}")
    worst: Level = max((each.level for each in findings), key=["fine", "warning", "error"].index, default="fine")
    if not print_as_json({"level": worst, "findings": findings}):
        _print(findings)
    sys.exit(_EXIT[worst])


def _print_load(load: DatabaseLoad) -> None:
    if database.several():
        out.print(f"database {load.name}", style="bold")
    for text in load.incomplete:
        say(Text.assemble(("UNAVAILABLE", "bold red"), f" {text}"))
    if load.at is not None and load.started_at is not None:
        say(f"PostgreSQL started {format_time(load.started_at)} UTC, {format_age(load.started_at, load.at)}")
    rows = table("MEASURE", ">VALUE", ">LIMIT", "NOTE")
    for each in (*load.measures, *load.workers):
        name = f"rows_per_s {each.name}" if each in load.workers else each.name
        note = each.trouble if each.value is None else "OVER" if each.over else None
        value, limit = ("?" if number is None else f"{number:,.4g}" for number in (each.value, each.limit))
        rows.add_row(name, value, "-" if each.limit is None else limit, note or "")
    for state in load.tables:
        vacuumed = "VACUUM runs" if state.vacuum_runs else f"last VACUUM {format_time(state.vacuumed_at)}"
        note = f"OVER: autovacuum {'; '.join(state.problem)}" if state.problem else vacuumed
        rows.add_row(f"dead_rows {state.table}", f"{state.dead_rows:,}", f"{state.limit:,}", note)
    print_table(rows, empty="nothing could be read")
    for wait in load.waits:
        whom = "waits for" if wait.ours else "waits for the workers:"
        since = "" if wait.waited_s is None else f", {format_duration(wait.waited_s)}"
        who = f"process {wait.pid} ({wait.application or 'unknown'})"
        end = "; ".join(f"SELECT pg_terminate_backend({pid})" for pid in wait.blockers if wait.ours)
        do = f". To end what it waits for: {end}" if end else ""
        say(f"{who} {whom} {', '.join(map(str, wait.blockers))}, lock on {wait.table or 'a row'}{since}{do}")


def _print_grants(role: str, settings: Settings, sweeps: dict[str, Sweep]) -> None:
    if not settings.databases:
        _print_grants_in_database(role, settings)
        return
    for name, workers in by_database(sweeps.values()).items():
        click.echo(f"-- database {name}")
        with database.using(name):
            _print_grants_in_database(role, settings, {each.name for each in workers})


def _print_grants_in_database(role: str, settings: Settings, workers: set[str] | None = None) -> None:
    from housekeeping.doctor import tables

    needed, missing, user = tables.needed_rights(settings, workers), dict[str, tuple[str, ...]](), ""
    unknown: list[str] = []
    try:
        with translate_postgres_errors():
            of_dependents, unknown = tables.rights_of_dependents(settings)
            of_subjects, of_unknown_subjects = tables.rights_of_subjects(settings)
            unknown += of_unknown_subjects
            for name, rights in (*of_dependents.items(), *of_subjects.items()):
                needed[name] = tuple(dict.fromkeys((*needed.get(name, ()), *rights)))
            if settings.database_url is not None:
                may_count, place, user = database.execute_sql(tables.MAY_COUNT).fetchone()
                existing = [name for name in needed if tables.exists(name)]
                missing = {name: tuple(tables.missing_rights(name, needed[name])) for name in existing}
                if of_subjects:
                    needed[f"DATABASE {place}"] = ("TEMPORARY",)
                    missing[f"DATABASE {place}"] = () if may_count else ("TEMPORARY",)
    except (HousekeepingError, PeeweeException) as error:
        unknown.append(f"the rights of the current role, and what dependents and subjects need: {error_line(error)}")
    for statement in (*tables.own_tables_grants(role, settings), *tables.grants(role, needed)):
        click.echo(f"{statement};")
    for each in unknown:
        click.echo(f"-- unknown: {each}")
    for statement in tables.grants(user, {name: rights for name, rights in missing.items() if rights}):
        click.echo(f"-- {user}, the current role, lacks: {statement};")


def _print(findings: list[Finding]) -> None:
    area = ""
    for each in findings:
        if each.area != area:
            area = each.area
            out.print(area, style="bold")
        label, style = _LABEL[each.level]
        say(Text.assemble("  ", (label, style), printable(f"{each.subject}: {each.text}")))
        if each.way_out and each.level != "fine":
            say(f"          do: {each.way_out}")
    errors, warnings, fine = (sum(each.level == level for each in findings) for level in ("error", "warning", "fine"))
    out.print(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}, {fine} fine")


@click.command("list")
@json_option()
def list_workers() -> None:
    """List the workers: schedule in words, next ticks (three if there is room), limits, state.

    Works without a database; the state is then "unknown". Schedules are in HOUSEKEEPING_TIMEZONE (UTC by default),
    times are shown in UTC.
    """
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    current_overrides: dict[str, Override] = {}
    problems: dict[str, SetupProblem | None] = {}
    unread: dict[str, None] = {}
    if settings.database_url is not None:
        use_database(settings)
        for database_name, workers in by_database(sweeps.values()).items():
            with progress("reading overrides"), database.using(database_name):
                try:
                    examined = setup_problems(workers)
                    with time_limit(STATEMENT_TIME, LOCK_TIME):
                        schema.require()
                        current_overrides |= overrides()
                    problems |= examined
                except (PeeweeException, SchemaMissing, DatabaseUnavailable) as error:
                    unread[error_line(error)] = None
    now = datetime.now(UTC)
    rows: list[dict[str, Any]] = []
    for name, sweep in sweeps.items():
        problem = problems.get(name)
        override = current_overrides.get(name)
        state = state_of(sweep, override, problem)
        ticks = [] if problem else next_ticks(sweep, now, settings.timezone, override)
        rows.append(
            name_database(
                {
                    "worker": name,
                    "schedule": sweep.schedule,
                    "schedule_in_words": in_words(sweep.schedule) if sweep.schedule else None,
                    "next_tick": ticks[0] if ticks else None,
                    "next_ticks": ticks,
                    "batch_size": sweep.limits.batch,
                    "max_runtime_s": sweep.limits.runtime.total_seconds(),
                    "max_rows_per_s": sweep.limits.rows_per_s,
                    "rest": sweep.limits.rest,
                    "state": "unknown" if name not in problems and state == "on" else state,
                    "not_set_up": problem.text if problem else None,
                },
                sweep.database,
            )
        )
    if print_as_json({"workers": rows}):
        return
    named = ["DATABASE"] if settings.databases else []
    paced = ["PACE"] if any(_pace(sweep) for sweep in sweeps.values()) else []
    listed = table("WORKER", *named, "SCHEDULE", "NEXT TICKS (UTC)", ">BATCH", ">MAX RUNTIME", *paced, "STATE")
    for row, sweep in zip(rows, sweeps.values(), strict=True):
        if row["not_set_up"]:
            continue
        listed.add_row(
            row["worker"],
            *([sweep.database] if named else []),
            row["schedule_in_words"] or "-",
            format_ticks(row["next_ticks"] if out.width >= WIDE else row["next_ticks"][:1]),
            str(row["batch_size"]),
            format_duration(sweep.limits.runtime.total_seconds()),
            *([_pace(sweep) or "-"] if paced else []),
            row["state"],
        )
    print_table(listed)
    print_not_set_up({name: problem for name, problem in problems.items() if problem is not None})
    for text in unread:
        say(f"state unknown: {text}")


def _pace(sweep: Sweep) -> str:
    rate = [] if sweep.limits.rows_per_s is None else [f"{sweep.limits.rows_per_s:,g} rows/s"]
    return ", ".join([*rate, *([f"rest {sweep.limits.rest:g}"] if sweep.limits.rest else [])])


@click.command()
@click.option(
    "--with-tables", is_flag=True, help="Also create the tables that the built-in workers clean, for a trial."
)
@click.option("--with-sample-data", is_flag=True, help="Also add sample rows to these tables, for a trial.")
@click.option("--with-archives", is_flag=True, help="Also create the archives of sweeps that move rows to one.")
@click.option("--sql", is_flag=True, help="Print the missing statements without executing them.")
@json_option("Print JSON: what was created, and statements to execute by hand.")
def init(with_tables: bool, with_sample_data: bool, with_archives: bool, sql: bool) -> None:
    """Create or upgrade the library's own tables. Can be repeated safely.

    The tables are in the schema "housekeeping", or the one that HOUSEKEEPING_SCHEMA names. Existing tables of the
    application are not changed, and --with-tables creates the missing ones. A warning on stderr names each configured
    table that is a partition of another table.

    A sweep may move its rows to an archive. The command prints the statements that create each missing archive and add
    missing columns to the others. --with-archives executes them, except for those that rewrite an archive.

    --sql prints the statements that the command would execute, for a review or for psql. It reads from the database
    which statements are missing: all of them if the library has no tables there yet. Each part is one transaction, and
    begins with a comment that names the schema or archive, and the database if there are several.

    --with-sample-data adds a few hundred rows to each table of --with-tables, some of them stale. It stops if one of
    the tables already has rows.
    """
    if with_sample_data and not with_tables:
        raise WrongArgument("--with-sample-data needs --with-tables; give --with-tables as well")
    if sql and with_tables:
        raise WrongArgument("--sql does not include the trial tables of --with-tables; omit one of the two options")
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    schema.use_database(settings)
    results: list[dict[str, Any]] = []

    def report(kind: str, name: str, result: str, line: str, statements: Sequence[str] = ()) -> None:
        """Print a part of the result with the statements that are left to the operator, or keep it for --json."""
        values = {"kind": kind, "name": name, "result": result, "statements": list(statements)}
        results.append(name_database(values, database.selected))
        if sql:
            line = f"-- {' '.join(line.split())}"
            statements = ("BEGIN", *statements, "COMMIT") if statements else ()
        if not wants_json():
            click.echo("\n".join([line, *(f"{each};" for each in statements)]))

    for name, workers in by_database(sweeps.values()).items():
        with database.using(name), translate_postgres_errors():
            by_worker = {each.name: each for each in workers}
            _init_database(settings, by_worker, with_tables, with_sample_data, sql, report)
            _init_archives(by_worker, with_archives, sql, report)
    print_as_json({"results": results})


#: Reports a part of the result: its kind, its name, what was done, the line for people, and statements to execute.
_Report = Callable[..., None]


def _init_archives(workers: dict[str, Sweep], with_archives: bool, sql: bool, report: _Report) -> None:
    """Report the statements that create the archives or add missing columns, or execute them.

    Parameters:
      sql: Whether to report only statements that would be executed.
    """
    from housekeeping.sweeps.validate_tables import problems_of

    stages = [stage for each in workers.values() if each.enabled for stage in each.declared_stages()]
    for problem in problems_of(stages):
        if not problem.statements or (sql and (problem.rewrites or not with_archives)):
            notify(f"warning: {problem.text}")
            continue
        if sql:
            report("archive", problem.archive, "missing", f"archive {problem.archive}", problem.statements)
            continue
        if problem.rewrites or not with_archives:
            option = "" if problem.rewrites else "add --with-archives or "
            text = f"{problem.text}; to correct that, {option}execute:"
            report("archive", problem.archive, text, text, problem.statements)
            continue
        with database.atomic():
            for statement in problem.statements:
                database.execute_sql(escaped(statement))
        result = "created" if problem.is_missing else "missing columns added"
        report("archive", problem.archive, result, f"archive {problem.archive}: {result}")


def _init_database(
    settings: Settings, workers: dict[str, Sweep], with_tables: bool, with_sample_data: bool, sql: bool, report: _Report
) -> None:
    """Create the tables in the current database, for its workers; or report the statements for `sql`."""
    from housekeeping.cli.sample_rows import add_sample_rows
    from housekeeping.doctor import servers, tables
    from housekeeping.ledger.migrations import MIGRATIONS

    other = servers.other_server()
    if other is not None:
        raise Refused(f"{other}; use PostgreSQL 13 or later")
    place = f"database {database.selected}, " if settings.databases else ""
    place += f"schema {settings.schema_name}"
    if sql:
        version, missing = schema.missing_statements()
        result = f"version {version}, this release has {len(MIGRATIONS)}" if missing else "up to date"
        report("schema", settings.schema_name, "missing" if missing else result, f"{place}: {result}", missing)
    else:
        migrations = schema.init()
        result = "up to date" if not migrations else "created" if migrations == len(MIGRATIONS) else "upgraded"
        report("schema", settings.schema_name, result, f"{place}: {result}")
    found = [*families_of(settings, workers)]
    if with_tables:
        for model in (model for family in found for model in family.models.values()):
            meta: Any = model._meta
            exists = model.table_exists()
            if not exists:
                database.create_tables([model])
            result = "already exists" if exists else "created"
            report("table", meta.table_name, result, f"table {meta.table_name}: {result}")
    if with_sample_data:
        for name, rows in add_sample_rows(settings, found).items():
            result = counted(rows, "sample row")
            report("sample rows", name, result, f"table {name}: {result}")
    for warning in tables.lone_partitions(settings, {name: each for name, each in workers.items() if each.enabled}):
        notify(f"warning: {warning.text}; {warning.way_out}")
