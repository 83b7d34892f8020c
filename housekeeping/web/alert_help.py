"""Meaning and remedy of each alert, in short; docs/howto/alerts.md has the long form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Help:
    """Meaning of an alert and what an operator does about it."""

    means: str
    do: str


#: Alert name -> help. ``most_…`` stands for all alerts on a count.
ALERTS: Final = {
    "longest_run": Help(
        "A run exceeded the duration that its document allows.",
        "Compare the counts of the last runs: more rows, or slower? If the database is overloaded, narrow the worker. "
        "housekeeping doctor names missing indexes.",
    ),
    "backlog": Help(
        "The backlog exceeds what its document allows.",
        "Compare arrived and processed rows on the worker's page. If runs are missing, see housekeeping why; "
        "if they are not and the backlog grows, raise batch_size or max_runtime_s.",
    ),
    "failed_rows": Help(
        "Some records could not be processed; all others were.",
        "The worker's page shows the rejected rows with time and cause; the log has the first 20 of each cause. "
        "The next run retries them.",
    ),
    "clock": Help(
        "The clock of the last run's machine is over 5 s from the database's. Over a minute, no run starts there.",
        "Check NTP on that machine and on the database's (chronyc tracking, timedatectl). The database's clock decides "
        "which rows are stale; the scheduler's clock decides when schedules fire.",
    ),
    "most_…": Help(
        "One run had an unusually high count.",
        "Check the source of these rows, such as CI runners. Pause the worker while you do.",
    ),
    "failed_runs": Help(
        "Several runs in a row failed.",
        "Read the last run's error, then: housekeeping doctor. Nothing is lost: failed batches were rolled back.",
    ),
    "last_run": Help(
        "The last run failed or was lost.",
        "The text is the reason. The retry and the next tick follow automatically. If they fail too, fix the reason.",
    ),
    "overdue": Help(
        "The worker has not run for several periods of its schedule.",
        "Check that housekeeping scheduler and housekeeping worker are running, then: housekeeping why NAME.",
    ),
    "breaker": Help(
        "Far more rows are stale than usual. By default the run continues; a breaker can be set to limit or stop it.",
        "Look at the plan. If these rows should stay, pause the worker. If they should go and the breaker limits or "
        "stops the runs: housekeeping run NAME --confirm.",
    ),
    "unconfirmed": Help(
        "No run of the worker has completed yet, or its predicate has changed since, and a run would process over 20 % "
        "of a table and at least 1,000 rows.",
        "Look at the plan. If the rows should go: housekeeping run NAME --confirm; scheduled runs "
        "follow. If not, correct the declaration of the sweep.",
    ),
    "throttled": Help(
        "The last three runs were throttled because of the database's health or by a function of your own, and ended "
        "early.",
        "The text names the cause, such as replication lag. Repair it, or remove an unused standby. Or change the "
        "limit under gates in HOUSEKEEPING_WORKERS.",
    ),
    "no_worker": Help(
        "No living worker process serves a queue that has scheduled workers or waiting messages.",
        "Start housekeeping worker, or find out why it ended: its last log lines, the kernel log (out of memory). "
        "Nothing is lost: messages wait, and those of a killed worker run again.",
    ),
    "no_scheduler": Help(
        "No scheduler has been alive for two periods of the shortest schedule, and for at least two minutes.",
        "Start housekeeping scheduler, or find out why it ended. It sends the latest missed tick.",
    ),
    "unseen": Help(
        "The backlog cannot be counted: a table or store is unavailable or unreadable, or a predicate fails.",
        "The text names the cause; housekeeping doctor shows what is missing.",
    ),
}
_OTHER: Final = Help("This alert has no help text.", "The text says what happened; housekeeping doctor may know more.")


def topic(name: str) -> str:
    """Return the key in `ALERTS` for an alert's name."""
    return "most_…" if name.startswith("most_") else name


def help_for(name: str) -> Help:
    """Return the help of an alert, or a general one for an unknown alert."""
    return ALERTS.get(topic(name), _OTHER)
