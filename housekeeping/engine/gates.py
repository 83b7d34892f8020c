"""Gates of a run: what may keep it from its first change. The run and ``housekeeping plan`` examine the same ones.

The run examines `OverrideGate`, takes its lease, begins its row in the ledger, examines `before_batches`, and starts.
A plan examines the same ones, with `QueueGate` for the way to a worker, and `WriteGate`, `LeaseGate`, `LockGate` and
`ThrottleGate` for what the run itself does, or meets, at these points.

To add a gate, write a class with `examine` and put it into `before_batches`; the meaning of its reason stands in
`insight.why.REASONS`. What ends a run between two batches is in `Batches`: time, stop, override, and the throttle,
whose limits the settings call gates, too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from housekeeping.brokers import queue_lengths
from housekeeping.core.clock import SYSTEM_CLOCK, ClockSkew, RunBudget
from housekeeping.core.errors import (
    ArchiveMismatch,
    BreakerTripped,
    BrokerUnavailable,
    ClocksDiffer,
    RedisUnavailable,
    SettingsError,
)
from housekeeping.core.logs import counted, error_line, format_duration, in_one_line, mask_secrets
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.database.queries import why_read_only
from housekeeping.engine import CLOCK_SKEWS, RunRequest
from housekeeping.engine.alerts import no_living_worker
from housekeeping.engine.guard import ENOUGH, UNCONFIRMED, RowGuard, in_numbers, in_words
from housekeeping.engine.speed import ExceededLimit, ThrottleWatch, throttled_tables
from housekeeping.leases.renewal import shared_lease_store
from housekeeping.ledger import runs
from housekeeping.ledger.leases import held_leases
from housekeeping.ledger.operators import Override, describe_override, override_of
from housekeeping.ledger.processes import UNKNOWN, Processes, heartbeat_store, read_processes
from housekeeping.ledger.runs import Counts, Outcome, RunRow
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Stage
from housekeeping.sweeps.validate_tables import problems_of as archive_problems

logger = named_logger(__name__)

#: ``none``: the run continues. ``alerts``: it continues and raises an alert. ``slows``: it processes less at a time, or
#: pauses. ``waits``: it does not start, or continue, until something else ends. ``ends_early``: it ends as partial.
#: ``unknown``: the check could not be made.
Effect = Literal["none", "alerts", "slows", "waits", "ends_early", "skips", "fails", "unknown"]

#: Outcome of a run by the effect that decides it.
OUTCOME_OF_EFFECT: Final[dict[str, Outcome]] = {"ends_early": "partial", "skips": "skipped", "fails": "failed"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one gate does to a run.

    Attributes:
      name: ``override``, ``writes``, ``queue``, ``lease``, ``locks``, ``clock``, ``archive``, ``first run``,
        ``breaker``, ``throttle`` or ``schedule``; ``ledger`` if the library's own tables cannot be read, ``rows`` if
        the worker's rows cannot be counted.
      text: What it found, with the command that helps; empty if there is nothing to say.
      reason: Reason of the run's outcome, or why it waits, if the check decides it.
      error: The error with which the run fails; None if it is not the check that fails it.
      counts: What the ledger stores in the counts of the run.
      log: Level, event and fields of the run's log line; None for no line.
    """

    name: str
    effect: Effect
    text: str
    reason: str | None = None
    error: Exception | None = None
    counts: Counts = field(default_factory=dict)
    log: tuple[int, str, Mapping[str, Any]] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``checks`` in ``housekeeping plan --json``."""
        return {"check": self.name, "effect": self.effect, "text": self.text}


class Gate(Protocol):
    """One gate. It changes nothing."""

    def examine(self) -> Check:
        """Return what it does to a run that is here now.

        Raises:
          peewee.PeeweeException: The database does not answer, or the library's own tables are missing.
        """


def before_batches(
    request: RunRequest,
    stages: Sequence[Stage],
    skews: Sequence[ClockSkew],
    guard: RowGuard,
    history: Callable[[], Sequence[RunRow]],
) -> list[Gate]:
    """Return the gates between the start of the run's row and its first batch.

    Parameters:
      skews: How far this machine's clock is from those of the database and of other servers; empty if not measured.
      history: Returns the worker's past runs.
    """
    return [
        ClockGate(skews, request.force),
        ArchiveGate(stages),
        FirstRunGate(guard),
        BreakerGate(request.sweep, guard, history, confirmed=request.confirmed),
    ]


@dataclass(slots=True)
class OverrideGate:
    """Whether the worker is disabled, paused by an operator, or not set up.

    Attributes:
      override: What operators have set for the worker; None before `examine`, and without an override.
    """

    request: RunRequest
    override: Override | None = field(default=None, init=False)

    def examine(self) -> Check:
        sweep, force = self.request.sweep, self.request.force
        if not sweep.enabled:
            text = "the worker is disabled in HOUSEKEEPING_WORKERS"
            if not force:
                return Check("override", "skips", text, "disabled")
            self.override = override_of(sweep.name)
            return Check("override", "none", f"{text}; --force runs it")
        override = self.override = override_of(sweep.name)
        if override is not None and override.state == "paused" and not force:
            text = f"{describe_with_user(override)}. To end that: housekeeping resume {sweep.name}"
            return Check("override", "skips", text, "paused")
        problem = sweep.lacks()
        if problem is not None:
            fields = {"family": problem.family, "text": problem.text}
            log = (logging.INFO, "Worker not set up", fields)
            return Check("override", "skips", f"not set up: {problem.text}", "not_set_up", log=log)
        if override is None:
            return Check("override", "none", "neither paused nor narrowed")
        text = describe_with_user(override)
        narrow = override.state == "narrow"
        return Check("override", "slows", text) if narrow else Check("override", "none", f"{text}; --force runs it")


def describe_with_user(override: Override) -> str:
    """Return which override is in force, until when, why, and who set it when."""
    since = "" if override.since is None else f", {override.since:%Y-%m-%d %H:%M} UTC"
    return f"{describe_override(override)} (set by {override.said_by or 'unknown'}{since})"


@dataclass(frozen=True, slots=True)
class ClockGate:
    """Whether this machine's clock agrees with those of the servers whose times are compared."""

    skews: Sequence[ClockSkew]
    force: bool

    def examine(self) -> Check:
        exceeded = [each for each in self.skews if each.exceeded]
        if not exceeded:
            return Check("clock", "none", "")
        text, counts = "; ".join(map(str, exceeded)), {CLOCK_SKEWS[each.server]: each.seconds for each in exceeded}
        if any(each.refused for each in exceeded) and not self.force:
            error = ClocksDiffer(f"clocks differ, nothing was changed: {text}")
            return Check("clock", "fails", text, "clock", error, counts)
        worst = max(exceeded, key=lambda each: abs(each.seconds))
        log = (logging.WARNING, "Clocks differ", {"ahead_s": worst.seconds, "text": text})
        return Check("clock", "alerts", text, counts=counts, log=log)


@dataclass(frozen=True, slots=True)
class ArchiveGate:
    """Whether each archive can take all columns of its table."""

    stages: Sequence[Stage]

    def examine(self) -> Check:
        for problem in archive_problems(self.stages):
            error = ArchiveMismatch(f"nothing was changed: {problem}")
            return Check("archive", "fails", str(problem), "archive", error)
        return Check("archive", "none", "")


@dataclass(frozen=True, slots=True)
class FirstRunGate:
    """Whether the first run, or the first one of a changed predicate, would process much of a table."""

    guard: RowGuard

    def examine(self) -> Check:
        unconfirmed = self.guard.first_run()
        if unconfirmed is None:
            return Check("first run", "none", "no confirmation is needed")
        return Check("first run", "skips", in_words(unconfirmed), UNCONFIRMED, counts={UNCONFIRMED: unconfirmed})


@dataclass(frozen=True, slots=True)
class BreakerGate:
    """Whether far more rows are stale than usual, and what the sweep's breaker then does."""

    sweep: Sweep
    guard: RowGuard
    history: Callable[[], Sequence[RunRow]]
    confirmed: bool

    def examine(self) -> Check:
        if self.confirmed:
            return Check("breaker", "none", "confirmed: the run may process any number of rows")
        history = self.history()
        numbers = self.guard.breaker(history)
        if numbers is None:
            few = self.sweep.guard.times_history is not None and len(history) < ENOUGH
            are = f"{'is' if len(history) == 1 else 'are'} {len(history)}"
            text = f"has no limit before {ENOUGH} past runs; there {are}" if few else "has no limit"
            return Check("breaker", "none", text)
        found = in_numbers(numbers)
        if not self.guard.exceeded:
            return Check("breaker", "none", found)
        counts, action, worker = {"breaker": numbers}, numbers["action"], self.guard.worker
        if action == "stop":
            refusal = (
                f"{found}; nothing was changed. Look at: housekeeping plan {worker}; "
                f"to continue: housekeeping run {worker} --confirm"
            )
            log = (logging.ERROR, "Breaker tripped", {"error": refusal})
            return Check("breaker", "fails", refusal, "breaker", BreakerTripped(refusal), counts, log)
        fields = {"action": action, "stale": numbers["stale"], "allowed": numbers["allowed"]}
        exceeded = (logging.WARNING, "Breaker exceeded", fields)
        if action == "limit":
            rows = counted(self.guard.row_limit.rows or 0, "row")
            text = f"{found}: the run ends after {rows}, and the next one resumes"
            return Check("breaker", "ends_early", text, "breaker", counts=counts, log=exceeded)
        return Check(
            "breaker", "alerts", f"{found}: the run continues and raises an alert", counts=counts, log=exceeded
        )


@dataclass(frozen=True, slots=True)
class LeaseGate:
    """Whether another run holds the lease. A run takes it instead, or takes it over from a dead holder."""

    sweep: Sweep
    argument: Any

    def examine(self) -> Check:
        needed = self.sweep.lease_for_run()
        if needed is None:
            return Check("lease", "none", "")
        key, worker = needed.key_for(self.argument), self.sweep.name
        try:
            held = held_leases(shared_lease_store(), key)
        except (RedisUnavailable, SettingsError) as error:
            text = f"a run cannot take the lease {key}, and its holder is unknown: {error}"
            return Check("lease", "fails", text, error_line(error), error)
        if not held:
            return Check("lease", "none", f"no run holds the lease {key}")
        (lease,) = held
        holder = f"run {lease.run_label}, {lease.holder}," if lease.run_id is not None else lease.holder
        since = "" if lease.held_for_s is None else f" for {format_duration(lease.held_for_s)}"
        if lease.remaining_s is None:
            return Check("lease", "none", f"{holder} has lost the lease {key}; the next run fences that run off")
        if lease.worker == worker and runs.holder_is_gone(worker, key, lease.token):
            return Check("lease", "none", f"{holder} held the lease {key} and is dead; a run takes it over")
        ends = f"It ends with its holder, at the latest {format_duration(lease.remaining_s)} after that dies"
        text = f"{holder} holds the lease {key}{since}. {ends}; if it hangs: housekeeping leases release {key}"
        return Check("lease", "skips", text, "lease_held")


class WriteGate:
    """Whether PostgreSQL accepts writes."""

    def examine(self) -> Check:
        text = "" if (why := why_read_only()) is None else f"PostgreSQL rejects writes: {why}"
        return Check("writes", "fails" if text else "none", text, "PostgreSQL rejects writes" if text else None)


#: Modes of a lock on a table with which a statement that reads and changes rows waits.
_EXCLUDING: Final = ["ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"]
#: The sessions that lock these tables, and those for which this library's own sessions wait that use them.
#: All of it is visible to any role, except times and statements of other roles' sessions.
_BLOCKERS: Final = """WITH tables AS (
    SELECT name, to_regclass(name)::oid AS id FROM unnest(%s::text[]) AS name
), locks AS (
    SELECT pid, name, mode, granted FROM pg_locks JOIN tables ON relation = id
    WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database())
), blockers AS (
    SELECT pid, name FROM locks WHERE granted AND mode = ANY(%s)
    UNION
    SELECT unnest(pg_blocking_pids(pid)), name FROM locks JOIN pg_stat_activity USING (pid)
    WHERE starts_with(application_name, nullif(split_part(current_setting('application_name'), ' ', 1), ''))
        AND pid IN (SELECT waiting.pid FROM pg_locks AS waiting WHERE NOT waiting.granted)
)
SELECT name, pid, usename, application_name, state,
    extract(epoch FROM clock_timestamp() - xact_start)::float8,
    extract(epoch FROM clock_timestamp() - query_start)::float8, query
FROM blockers LEFT JOIN pg_stat_activity USING (pid)
WHERE pid IS DISTINCT FROM pg_backend_pid() ORDER BY xact_start, pid LIMIT 3
"""
#: What may begin a literal of a statement, which may be a secret.
_LITERAL: Final = re.compile(r"'|\$\w*\$")
_STATEMENT_WIDTH: Final = 80  # characters


@dataclass(frozen=True, slots=True)
class LockGate:
    """Whether the statements of a run would wait for another session's lock."""

    stages: Sequence[Stage]
    now: datetime

    def examine(self) -> Check:
        found = database.execute_sql(_BLOCKERS, (throttled_tables(self.stages, self.now), _EXCLUDING)).fetchall()
        if not found:
            return Check("locks", "none", "no other session locks its tables")
        text = f"{'; '.join(_describe_blocker(*each) for each in found)}. A batch waits up to lock_timeout, then fails"
        return Check("locks", "waits", text, "locked")


def _describe_blocker(
    table: str,
    pid: int | None,
    user: str | None,
    application: str | None,
    state: str | None,
    open_s: float | None,
    query_s: float | None,
    query: str | None,
) -> str:
    if not pid:
        return f"{table} is locked by a prepared transaction (pg_prepared_xacts)"
    named = ", ".join(in_one_line(each, _STATEMENT_WIDTH) for each in (application, user) if each)
    session = f"{table} is locked by process {pid} of PostgreSQL ({named})"
    if open_s is None:
        return f"{session}, whose statement this role may not see"
    statement, *literal = _LITERAL.split(" ".join((query or "").split()), maxsplit=1)
    shown = in_one_line(mask_secrets(f"{statement}…" if literal else statement), _STATEMENT_WIDTH)
    times = (
        f"its transaction is open for {format_duration(open_s)}, its last statement began {format_duration(query_s)}"
    )
    return f"{session}, {state}: {times} ago: {shown}. To end it: SELECT pg_terminate_backend({pid})"


@dataclass(slots=True)
class QueueGate:
    """Whether a run that is sent now starts at once. A run that examines gates has started.

    Attributes:
      processes: The workers and schedulers by their heartbeats; unknown before `examine`, and if they cannot be read.
    """

    queue: str
    settings: Settings
    now: datetime
    processes: Processes = field(default=UNKNOWN, init=False)

    def examine(self) -> Check:
        settings, queue = self.settings, self.queue
        if shared_redis.is_replaced(settings):
            return self._examine_processes("")
        try:
            lengths = queue_lengths(settings, [queue])[queue]
        except (RedisUnavailable, BrokerUnavailable, SettingsError) as error:
            unknown = f"the queue {queue!r} and its workers are unknown"
            text = f"{str(error).rstrip('.')}. No run can be sent or received; {unknown}"
            return Check("queue", "waits", text, runs.NOT_SENT)
        messages = f"{counted(lengths.waiting, 'message is', 'messages are')} in its queue {queue!r}"
        if lengths.oldest_at is not None:
            messages += f", the oldest waits for {format_duration((self.now - lengths.oldest_at).total_seconds())}"
        return self._examine_processes(messages)

    def _examine_processes(self, messages: str) -> Check:
        queue = self.queue
        self.processes = read_processes(heartbeat_store(self.settings), self.now)
        if self.processes.rejected is not None:
            text = f"{str(self.processes.rejected).rstrip('.')}. No run can be sent or received"
            return Check("queue", "waits", text, runs.NOT_SENT)
        if not self.processes.known:
            text = "no heartbeats could be read, so its workers are unknown"
            return Check("queue", "unknown", f"{messages}; {text}" if messages else text)
        if (no_worker := no_living_worker(self.processes, queue)) is not None:
            return Check("queue", "waits", f"{messages}, but {no_worker}" if messages else no_worker, "no_worker")
        serving = [each.heartbeat for each in self.processes.serving(queue) if each.alive]
        threads, busy = sum(each.threads for each in serving), sum(each.busy for each in serving)
        free = f"{threads - busy:,} of {counted(threads, 'thread is', 'threads are')} free"
        found = f"{free}; {messages or 'runs need no queue'}"
        return Check("queue", "none", found) if busy < threads else Check("queue", "waits", found, "saturated")


@dataclass(frozen=True, slots=True)
class ThrottleGate:
    """Check whether the database is overloaded now. A run repeats it before each batch."""

    sweep: Sweep
    stages: Sequence[Stage]
    now: datetime

    def examine(self) -> Check:
        limits = self.sweep.limits.throttle
        budget = RunBudget(self.sweep.limits.runtime, SYSTEM_CLOCK)
        exceeded, unknown = ThrottleWatch(limits, throttled_tables(self.stages, self.now), budget, time.sleep).look()
        if exceeded:
            waits = f"waits up to {format_duration(limits.wait_s)}, continues slowly, and ends as partial if that lasts"
            return Check("throttle", "slows", f"{', '.join(map(_over_limit, exceeded))}: the run {waits}")
        if unknown:
            text = f"{', '.join(unknown)}: could not be read; the run continues without it"
            return Check("throttle", "unknown", text)
        return Check("throttle", "none", "no limit is exceeded")


def _over_limit(exceeded: ExceededLimit) -> str:
    if exceeded.limit is None:
        return f"{exceeded.gate}: {exceeded.value}"
    return f"{exceeded.gate} {exceeded.value} is over {exceeded.limit}"
