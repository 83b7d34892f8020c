"""Checks of an installation. `examine` runs one module per subject; each yields findings and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import redis
from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.doctor import (
    brokers,
    columns,
    external,
    indexes,
    outbox,
    partitions,
    postgres,
    processes,
    redis_server,
    references,
    tables,
    unique_keys,
    web_token,
)
from housekeeping.sweeps.declaration import SetupProblem, Sweep
from housekeeping.sweeps.family_setup import by_problem, problems_of
from housekeeping.sweeps.insight.diagnostics import Finding

#: Check of one subject. Checks run in an order in which each depends on the earlier ones.
Check = Callable[[Settings, dict[str, Sweep]], Iterator[Finding]]


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield the findings of all checks. A server that does not answer is one finding and skips the checks that need it.

    Parameters:
      sweeps: The workers by name. Workers that are disabled or not set up are skipped.
    """
    problems = _problems(sweeps)
    enabled = {name: sweep for name, sweep in sweeps.items() if sweep.enabled and name not in problems}
    checks: list[tuple[str, Check]] = []
    if settings.database_url is None:
        yield Finding(
            "error", "postgres", "connection", "HOUSEKEEPING_DATABASE_URL is not set", "set it: postgresql://..."
        )
    else:
        postgres_checks = (postgres, tables, partitions, columns, unique_keys, references, indexes, outbox)
        checks += [("postgres", module.examine) for module in postgres_checks]
    if settings.redis_url is None:
        yield Finding("error", "redis", "connection", "HOUSEKEEPING_REDIS_URL is not set", "set it: redis://...")
    else:
        checks += [("redis", redis_server.examine), ("broker", brokers.examine)]
        if settings.database_url is not None:
            checks.append(("broker", processes.examine))
    checks += [("outside", external.examine), ("dashboard", web_token.examine)]
    for problem, workers in by_problem(problems).items():
        yield Finding("fine", "workers", problem.family, f"not set up: {problem.text}; off: {', '.join(workers)}")
    unreachable: set[str] = set()
    for area, check in checks:
        if area in unreachable or (area == "broker" and settings.broker_url is None and "redis" in unreachable):
            continue
        try:
            yield from check(settings, enabled)
        except (HousekeepingError, PeeweeException, redis.RedisError, OSError) as error:
            unreachable.add(area)
            yield Finding("error", area, "connection", error_line(error), "the checks that need it were skipped")


def _problems(sweeps: dict[str, Sweep]) -> dict[str, SetupProblem]:
    try:
        return problems_of(sweeps.values())
    except (HousekeepingError, PeeweeException):  # the PostgreSQL check reports it
        return {}
