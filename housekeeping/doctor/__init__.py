"""Floor 3: looks at everything the workers stand on, and says what is wrong and what to do; changes nothing."""

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
    redis_server,
    references,
    tables,
    unique_keys,
    web_token,
)
from housekeeping.sweeps.declaration import SetupProblem, Sweep
from housekeeping.sweeps.family_setup import by_problem, problems_of
from housekeeping.sweeps.insight.diagnostics import Finding

#: Looks at one part; in this order a part stands on those before it.
Examination = Callable[[Settings, dict[str, Sweep]], Iterator[Finding]]


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Look at every part; one that cannot be looked at is a finding itself, and hides those that stand on it only.

    Parameters:
      sweeps: The workers by name; those that are disabled or not set up are not looked at.
    """
    problems = _problems(sweeps)
    enabled = {name: sweep for name, sweep in sweeps.items() if sweep.enabled and name not in problems}
    parts: list[tuple[str, Examination]] = []
    if settings.database_url is None:
        yield Finding(
            "error", "postgres", "connection", "HOUSEKEEPING_DATABASE_URL is not set", "set it: postgresql://..."
        )
    else:
        on_postgres = (postgres, tables, partitions, columns, unique_keys, references, indexes, outbox)
        parts += [("postgres", part.examine) for part in on_postgres]
    if settings.redis_url is None:
        yield Finding("error", "redis", "connection", "HOUSEKEEPING_REDIS_URL is not set", "set it: redis://...")
    else:
        parts += [("redis", redis_server.examine), ("broker", brokers.examine)]
    parts += [("outside", external.examine), ("dashboard", web_token.examine)]
    for problem, workers in by_problem(problems).items():
        yield Finding("fine", "workers", problem.family, f"not set up: {problem.text}; off: {', '.join(workers)}")
    unreachable: set[str] = set()
    for area, examination in parts:
        if area in unreachable or (area == "broker" and settings.broker_url is None and "redis" in unreachable):
            continue
        try:
            yield from examination(settings, enabled)
        except (HousekeepingError, PeeweeException, redis.RedisError, OSError) as error:
            unreachable.add(area)
            yield Finding("error", area, "connection", error_line(error), "everything below it cannot be looked at")


def _problems(sweeps: dict[str, Sweep]) -> dict[str, SetupProblem]:
    try:
        return problems_of(sweeps.values())
    except (HousekeepingError, PeeweeException):  # the examination of PostgreSQL reports it
        return {}
