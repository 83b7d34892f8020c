"""What each alarm means and what to do about it, in a line each; the long form is in docs/howto/alerts.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Help:
    """An alarm in words: what it means, and what a person does."""

    means: str
    do: str


#: By the alarm's name; ``most_…`` stands for all alarms on a count.
ALARMS: Final = {
    "longest_run": Help(
        "A run took longer than its document allows.",
        "See by its counts whether it had more to do or was slower. When the database suffers, narrow the worker; "
        "housekeeping doctor names a missing index.",
    ),
    "backlog": Help(
        "More records wait than its document allows.",
        "Compare arrived and settled an hour on the worker's page. When runs do not happen, see why; "
        "when they do and it still grows, raise batch_size or max_runtime_s.",
    ),
    "failed_rows": Help(
        "Some records could not be settled; all others were.",
        "The worker's page shows what is rejected, since when and why; the log has the first 20 of each cause. "
        "The next run tries them again.",
    ),
    "clock": Help(
        "The clock of the machine of the last run is over 5 s from the database's. Over a minute, no run starts there.",
        "Check NTP on that machine and on the database's (chronyc tracking, timedatectl). What is stale is decided by "
        "the database's clock; schedules fire by the scheduler's.",
    ),
    "most_…": Help(
        "One run counted unusually many of something.",
        "Look whether something is wrong with what makes them (CI runners, say) and pause the worker while you do.",
    ),
    "failed_runs": Help(
        "So many runs in a row ended badly.",
        "Read the last run's error, then: housekeeping doctor. Nothing is lost: a batch that failed was rolled back.",
    ),
    "last_run": Help(
        "The last run failed or was lost.",
        "Its text is the reason. Its retry and its next tick come by themselves; when they fail too, do as the "
        "reason says.",
    ),
    "overdue": Help(
        "It has not run for several periods of its schedule.",
        "See that housekeeping scheduler and housekeeping worker are alive, then: housekeeping why NAME.",
    ),
    "breaker": Help(
        "Far more rows are stale than usual. By default the run goes on; its breaker may be set to limit or stop it.",
        "Look at the plan. If these rows should stay, pause the worker. If they should go and the breaker limits or "
        "stops the runs: housekeeping run NAME --confirm with the plan's id.",
    ),
    "unconfirmed": Help(
        "No run of the worker has ended yet, and a run would process over 20 % of a table, 1,000 rows or more.",
        "Look at the plan. If the rows should go: housekeeping run NAME --confirm with the plan's id; scheduled runs "
        "follow. If not, correct the declaration of the sweep.",
    ),
    "throttled": Help(
        "The last three runs met a database that was not well, worked slowly for a short time and ended.",
        "Its text names the sign, such as the lag of a standby. Repair it, or remove an unused standby. Or set "
        "another limit under gates in HOUSEKEEPING_WORKERS.",
    ),
    "no_worker": Help(
        "No living worker process serves a queue that has scheduled workers or waiting messages.",
        "Start housekeeping worker, or see why it ended: its last log lines, the kernel's (out of memory). Nothing is "
        "lost: messages wait, and those of a killed worker run again.",
    ),
    "no_scheduler": Help(
        "No scheduler has been alive for two periods of the shortest schedule, and for at least two minutes.",
        "Start housekeeping scheduler, or see why it ended. It makes up the latest tick that was missed.",
    ),
    "unseen": Help(
        "What waits cannot be counted: a table or store is away or must not be read, or a predicate fails.",
        "The text names it; housekeeping doctor says what is missing.",
    ),
}
_OTHER: Final = Help("Something should be looked at.", "Its text says what it is; housekeeping doctor may know more.")


def topic(name: str) -> str:
    """Under which heading the help of this alarm stands."""
    return "most_…" if name.startswith("most_") else name


def help_for(name: str) -> Help:
    """The help for an alarm, also for one that is not known here."""
    return ALARMS.get(topic(name), _OTHER)
