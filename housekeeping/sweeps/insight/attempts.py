"""One run as an attempt at its work, and what its outcome and reason mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from housekeeping.core.wording import counted
from housekeeping.sweeps.insight.status import outcome_in_words
from housekeeping.sweeps.ledger.history import RunRecord
from housekeeping.sweeps.ledger.runs import PURGE, RESTORE
from housekeeping.sweeps.limits.first_run import UNCONFIRMED, in_words

#: Meaning of a recorded reason, with what to do about it.
REASONS: Final = {
    "lease_held": "another run held the lease and did the work; nothing to do unless that run hangs: "
    "housekeeping leases list",
    "paused": "the worker is paused: housekeeping resume NAME",
    "disabled": "the worker is disabled in HOUSEKEEPING_WORKERS",
    "not_set_up": "the worker's tables or stores are not set up here, so it is not scheduled; housekeeping list says "
    "what is missing. To get an alert instead, name its family in HOUSEKEEPING_BUILT_IN",
    "deduplicated": "another message for the same work was waiting or running, so this one was dropped",
    "already_done": "the message was completed earlier and delivered again",
    "tick_already_sent": "another scheduler had sent this tick",
    "no_scheduler": "no scheduler ran, or none reached Redis: is the process `housekeeping scheduler` alive?",
    "out_of_time": "it reached its time limit; the next run continues",
    "limit": "it reached its limit of records; the next run continues",
    "shutdown": "its process was stopped; its message went back to the queue, and the next attempt resumes",
    "taken_over": "it sent no heartbeat, and another attempt took over; see the next attempt",
    "lease_lost": "another run had taken its lease; its uncommitted batch was rolled back",
    "gate": "the database stayed overloaded, or a throttle of your own asked to wait; see the log line `Still "
    "throttled, ending the run`. The run continued slowly until then, and the next run resumes",
    "breaker": "far more rows were stale than usual. It processed as many as its breaker allows, and the next run "
    "resumes there. To process all at once: housekeeping plan NAME, then run --confirm",
    UNCONFIRMED: "no run of this worker has completed yet, or its predicate has changed, and it would process a large "
    "part of a table",
    "clock": "this machine's clock differed from the database's by more than a minute; check NTP on both. The message "
    "is retried; to run now: housekeeping run NAME --force",
    "retry_waits": "a retry of this worker was already waiting and does the same work",
}

#: End of a meaning that says what continues the work.
_CONTINUED: Final = re.compile(r"[;,] (?:and )?the next (?:run|attempt) [^.]+$")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the ledger; `outcome` is ``running`` while it is open, ``silent`` without heartbeats.

    Attributes:
      label: The run's label, see `history.run_label`.
    """

    run_id: int
    trigger: str
    outcome: str
    reason: str | None
    started_at: datetime
    finished_at: datetime | None
    counts: dict[str, Any]
    error: str | None
    heartbeat_age_s: float | None = None
    label: str = ""

    def __str__(self) -> str:
        return outcome_in_words(None if self.outcome in ("running", "silent") else self.outcome, self.heartbeat_age_s)

    @classmethod
    def of(cls, record: RunRecord) -> Attempt:
        """Return the run that the ledger has recorded."""
        return cls(
            record.run_id,
            record.trigger,
            record.outcome or ("silent" if record.lost else "running"),
            record.reason,
            record.started_at,
            record.finished_at,
            record.counts,
            record.error,
            None if record.silent_s is None else round(record.silent_s, 3),
            record.label,
        )


def meaning_of(worker: str, attempt: Attempt) -> str:
    """Return what an attempt's outcome and reason mean, with what to do."""
    text = _meaning(worker, attempt)
    # No schedule follows a purge or a restore: its operator continues it.
    return text if {PURGE, RESTORE}.isdisjoint(attempt.counts) else _CONTINUED.sub("", text)


def _meaning(worker: str, attempt: Attempt) -> str:
    if attempt.outcome == "running":
        return "it is running"
    if attempt.outcome == "silent":
        return "its process was killed or hangs; the next attempt takes over"
    if attempt.outcome == "done":
        failed = attempt.counts.get("failed")
        rows = f"; {counted(failed, 'row')} failed, housekeeping status shows why (REJECTED)" if failed else ""
        return f"it completed{rows}"
    if (attempt.trigger, attempt.reason) == ("cli", "shutdown"):
        return "it was interrupted, by Ctrl-C or SIGTERM; the next run resumes where it stopped"
    if attempt.reason == UNCONFIRMED and UNCONFIRMED in attempt.counts:
        return in_words(attempt.counts[UNCONFIRMED])
    if attempt.error:
        return f"it failed: {attempt.error}"
    return REASONS.get(attempt.reason or "", attempt.reason or attempt.outcome).replace("NAME", worker)
