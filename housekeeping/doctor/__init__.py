"""Checks of an installation. Start with `examine`, which runs all checks in their order.

`servers` checks PostgreSQL, Redis and the broker, `tables` the tables of workers and erasures and the rights on them,
`stages` the statements of each sweep. Each check yields findings and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import redis
from peewee import PeeweeException

from housekeeping.core.errors import DeclarationError, HousekeepingError
from housekeeping.core.logs import counted, error_line
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.errors import is_timeout, is_unavailable
from housekeeping.doctor import servers, stages, tables
from housekeeping.engine.registry import by_database, by_problem, setup_problems
from housekeeping.ledger.alerts import count_refused_events
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.values import Finding, SetupProblem
from housekeeping.workers import families_of

#: Random characters that cannot be guessed, from however many addresses.
_SAFE_LENGTH: Final = 32

#: Subject of the finding that a server does not answer.
CONNECTION: Final = "connection"
_DOWN: Final = "start the server, or repair what the error names; the checks that need it were skipped"

#: Check of one subject. Checks run in an order in which each depends on the earlier ones.
Check = Callable[[Settings, dict[str, Sweep]], Iterator[Finding]]


def examine(settings: Settings, sweeps: dict[str, Sweep], *, only_databases: bool = False) -> Iterator[Finding]:
    """Yield the findings of all checks. A server that does not answer is one finding and skips the checks that need it.

    Parameters:
      sweeps: The workers by name. Workers that are disabled or not set up are skipped.
      only_databases: Whether to leave out Redis, the broker, and what is outside of them.
    """
    # Every worker needs the database, so without one there is none to examine.
    by_name = {} if settings.database_url is None else by_database(sweeps.values())
    problems: dict[str, SetupProblem] = {}
    for workers in by_name.values():
        with suppress(HousekeepingError, PeeweeException):  # other checks report it
            problems |= {worker: found for worker, found in setup_problems(workers).items() if found is not None}
    usable = {sweep.name: sweep for workers in by_name.values() for sweep in workers if sweep.name not in problems}
    enabled = {name: sweep for name, sweep in usable.items() if sweep.enabled}
    checks: list[tuple[str, Check]] = []
    if settings.database_url is None:
        yield Finding(
            "error", "postgres", "connection", "HOUSEKEEPING_DATABASE_URL is not set", "set it: postgresql://..."
        )
    else:
        for name in by_name:
            area = f"postgres {name}" if settings.databases else "postgres"
            of_tables = [
                partial(_each_family, each)
                for each in (tables.examine_tables, tables.examine_columns, tables.examine_archives)
            ]
            of_workers = (
                partial(stages.examine_stages, declared=sweeps.values()),
                tables.examine_partitions,
                stages.examine_throttles,
            )
            of_database: tuple[Check, ...] = (servers.examine_postgres, *of_tables, *of_workers, servers.outbox)
            checks += [(area, partial(_of_database, name, area, check)) for check in of_database]
        checks.append(("subjects", tables.examine_subjects))
    if shared_redis.is_replaced(settings) and not only_databases:
        checks.append(("postgres", servers.examine_alone))
    elif settings.redis_url is None and not only_databases:
        yield Finding("error", "redis", "connection", "HOUSEKEEPING_REDIS_URL is not set", "set it: redis://...")
    elif not only_databases:
        checks += [("redis", servers.examine_redis), ("broker", servers.examine_broker)]
    checks += [] if only_databases else [("outside", _external), ("dashboard", web_token)]
    if settings.alert_webhook_url is not None and by_name and not only_databases:
        checks.append(("webhook", webhook))
    for problem, names in by_problem(problems).items():
        yield Finding("fine", "workers", problem.family, f"not set up: {problem.text}; off: {', '.join(names)}")
    unreachable: set[str] = set()
    down: set[str] = set()
    told: set[tuple[str, str]] = set()
    for area, check in checks:
        if area in unreachable or (area == "broker" and settings.broker_url is None and "redis" in unreachable):
            continue
        try:
            for finding in check(settings, enabled):
                # A broken sweep fails every check of its stages with the same error.
                said = (finding.area, finding.text.removeprefix(stages.UNEXAMINED))
                if finding.level == "fine" or said not in told:
                    told.add(said)
                    yield finding
        except (HousekeepingError, PeeweeException, redis.RedisError, OSError) as error:
            if isinstance(error, PeeweeException) and not is_unavailable(error):
                yield Finding("error", area, "check", f"{stages.UNEXAMINED}{error_line(error)}")
                continue
            unreachable.add(area)
            cause = error.__cause__
            if cause is not None and is_timeout(cause):
                yield replace(stages.unexamined(area, "check", cause), level="error")
            elif (line := error_line(error)) not in down:
                down.add(line)
                yield Finding("error", area, CONNECTION, line, _DOWN)


def _of_database(name: str, area: str, check: Check, settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield the findings of a check in one database, for its workers."""
    workers = {each.name: each for each in sweeps.values() if each.database == name}
    findings = check(settings, workers)
    while True:
        with database.using(name), translate_postgres_errors():
            finding = next(findings, None)
        if finding is None:
            return
        yield replace(finding, area=area) if finding.area == "postgres" else finding


def _each_family(check: Check, settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield the findings of a check for each family, or for each worker of a family that cannot be examined."""
    for family in families_of(settings, sweeps):
        workers = {each.name: sweeps[each.name] for each in family.sweeps}
        try:
            yield from list(check(settings, workers))
        except Exception as error:
            if is_unavailable(error):
                raise
            for name, sweep in workers.items():
                yield from _of_worker(check, settings, name, sweep)


def _of_worker(check: Check, settings: Settings, name: str, sweep: Sweep) -> Iterator[Finding]:
    try:
        yield from check(settings, {name: sweep})
    except Exception as error:
        if is_unavailable(error):
            raise
        if not isinstance(error, DeclarationError):  # `examine_columns` reports it
            yield stages.unexamined(name, "tables", error)


def _external(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about object stores, the folder of repositories and the git program."""
    for family in families_of(settings, sweeps):
        if family.examine is not None:
            try:
                yield from family.examine()
            except Exception as error:
                yield Finding("error", family.sweeps[0].name, "outside", f"could not be examined: {error_line(error)}")


def webhook(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding about the events that the webhook's receiver has not accepted."""
    if number := count_refused_events():
        text = f"{counted(number, 'event')} not accepted by the receiver, and sent again"
        yield Finding("warning", "webhook", "delivery", text, "the log has the reason: Webhook could not be sent")
    else:
        yield Finding("fine", "webhook", "delivery", "no event was refused")


def web_token(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a warning for each short token of the dashboard."""
    for name, token in (("WEB_TOKEN", settings.web_token), ("WEB_READ_TOKEN", settings.web_read_token)):
        if token is not None and len(token) < _SAFE_LENGTH:
            text = f"HOUSEKEEPING_{name} has fewer than {_SAFE_LENGTH} characters, and could be guessed"
            yield Finding("warning", "dashboard", "token", text, "set it to the output of: openssl rand -hex 32")
