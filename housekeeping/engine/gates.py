"""Gates of a run: what may keep it from its first change. The run and ``housekeeping plan`` examine the same ones.

The run examines `OverrideGate`, takes its lease, begins its row in the ledger, examines `before_batches`, and starts.
A plan examines the same ones, with `LeaseGate` and `ThrottleGate` for what the run itself does at these points.

To add a gate, write a class with `examine` and put it into `before_batches`; the meaning of its reason stands in
`insight.why.REASONS`. What ends a run between two batches is in `Batches`: time, stop, override, and the throttle,
whose limits the settings call gates, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from housekeeping.core.clock import SYSTEM_CLOCK, RunBudget
from housekeeping.core.errors import ArchiveMismatch, BreakerTripped, ClocksDiffer
from housekeeping.core.logs import counted, format_duration
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.times import ClockSkew
from housekeeping.engine import CLOCK_SKEWS, RunRequest
from housekeeping.engine.guard import ENOUGH, UNCONFIRMED, RowGuard, in_numbers, in_words
from housekeeping.engine.speed import ExceededLimit, Throttle, throttled_tables
from housekeeping.ledger import runs
from housekeeping.ledger.leases import held_leases
from housekeeping.ledger.operators import Override, describe_override, override_of
from housekeeping.ledger.runs import Counts, Outcome, RunRow
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Stage
from housekeeping.sweeps.validate_tables import problems_of as archive_problems

logger = named_logger(__name__)

#: ``none``: the run continues. ``alerts``: it continues and raises an alert. ``slows``: it processes less at a time, or
#: waits. ``ends_early``: it ends as partial. ``unknown``: the check could not be made.
Effect = Literal["none", "alerts", "slows", "ends_early", "skips", "fails", "unknown"]

#: Outcome of a run by the effect that decides it.
OUTCOME_OF_EFFECT: Final[dict[str, Outcome]] = {"ends_early": "partial", "skips": "skipped", "fails": "failed"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one gate does to a run.

    Attributes:
      name: ``override``, ``lease``, ``clock``, ``archive``, ``first run``, ``breaker``, ``throttle`` or ``schedule``;
        ``ledger`` if the library's own tables cannot be read.
      text: What it found, with the command that helps; empty if there is nothing to say.
      reason: Reason of the run's outcome, if the check decides it.
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
            text = f"{describe_override(override)}. To end that: housekeeping resume {sweep.name}"
            return Check("override", "skips", text, "paused")
        problem = sweep.lacks()
        if problem is not None:
            fields = {"family": problem.family, "text": problem.text}
            log = (logging.INFO, "Worker not set up", fields)
            return Check("override", "skips", f"not set up: {problem.text}", "not_set_up", log=log)
        if override is None:
            return Check("override", "none", "neither paused nor narrowed")
        text = describe_override(override)
        narrow = override.state == "narrow"
        return Check("override", "slows", text) if narrow else Check("override", "none", f"{text}; --force runs it")


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
    """Whether another run holds the lease, as the ledger knows it; Redis is not asked. A run takes it instead."""

    sweep: Sweep
    argument: Any

    def examine(self) -> Check:
        if self.sweep.lease is None:
            return Check("lease", "none", "")
        key = self.sweep.lease.key_for(self.argument)
        for each in held_leases(None, ""):
            if each.key == key and (each.silent_for_s or 0) < runs.SILENCE.total_seconds():
                return Check("lease", "skips", f"run {each.run_label} holds the lease {key}", "lease_held")
        return Check("lease", "none", f"no run holds the lease {key}")


@dataclass(frozen=True, slots=True)
class ThrottleGate:
    """Whether the database is well now. The run looks before each batch."""

    sweep: Sweep
    stages: Sequence[Stage]
    now: datetime

    def examine(self) -> Check:
        limits = self.sweep.limits.throttle
        budget = RunBudget(self.sweep.limits.runtime, SYSTEM_CLOCK)
        exceeded, unknown = Throttle(limits, throttled_tables(self.stages, self.now), budget, time.sleep).look()
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
