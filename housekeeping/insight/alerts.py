"""What active alerts mean together: which of them explain others, in which order they are shown, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from housekeeping.core.clock import REFUSED
from housekeeping.core.logs import counted
from housekeeping.engine.alerts import GRACE, LATE, NO_SCHEDULER, NO_SPACE, NO_WORKER, SATURATED, UNAVAILABLE
from housekeeping.engine.guard import UNCONFIRMED
from housekeeping.insight.wording import format_age
from housekeeping.ledger.alerts import Alert, AlertKey
from housekeeping.sweeps.declaration import Sweep


@dataclass(frozen=True, slots=True)
class Help:
    """Meaning of an alert and what an operator does about it.

    Attributes:
      title: What is wrong; the worker, queue or server follows.
    """

    title: str
    means: str
    do: str


#: Alert name -> what to do before the installation has had any process. Later, the advice begins with it.
_START: Final = {
    NO_WORKER: "Start housekeeping worker (without Redis: housekeeping serve)",
    NO_SCHEDULER: "Start housekeeping scheduler (without Redis: housekeeping serve)",
}

#: Alert name -> help, in the order in which alerts are shown: causes before what they cause. ``most_…`` stands for all
#: alerts on a count.
ALERTS: Final = {
    "unavailable": Help(
        "Unavailable",
        "A database, Redis or the broker does not answer, or rejects all writes. Alerts that it explains are counted "
        "with it.",
        "Start the server, or repair what its error names: address, network, login, rights, a limit. Runs wait or "
        "fail, and are retried.",
    ),
    "no_space": Help(
        "No space",
        "A disk of PostgreSQL, or the disk or memory of Redis, is full: the server answers and rejects writes. Without "
        "writes to Redis there are no heartbeats and no messages.",
        "Free space on the server's disk, or enlarge it (Redis: or raise maxmemory). Nothing is lost: failed batches "
        "were rolled back, and runs are retried.",
    ),
    "no_worker": Help(
        "No worker",
        "No living worker process serves a queue that has scheduled workers or waiting messages.",
        f"{_START[NO_WORKER]}, or restart one that hangs. Find out why: its last log lines, the kernel log (out of "
        "memory). Nothing is lost: messages wait, and those of a killed worker run again.",
    ),
    "no_scheduler": Help(
        "No scheduler",
        "No scheduler has been alive for two periods of the shortest schedule, and for at least two minutes.",
        f"{_START[NO_SCHEDULER]}, or restart one that hangs. It sends the latest missed tick. Find out why: its last "
        "log lines.",
    ),
    "stuck": Help(
        "Stuck run",
        "A run is open for over a minute longer than its maximum runtime, or has sent no heartbeat for two minutes and "
        "no other run has taken over. It may wait for a server that never answers, and it occupies a thread.",
        "Look at the run: housekeeping runs ID. Restart the process that the text names; another run takes over "
        "and resumes. Give the function of a Call a time limit of its own.",
    ),
    "saturated": Help(
        "All threads busy",
        "All threads of the workers that serve a queue have been in the same message for longer than a period of the "
        "queue's shortest schedule, and for over a minute, and messages wait.",
        "Look at what they do: the text names it. Start another process, or restart one that hangs.",
    ),
    "failed_runs": Help(
        "Failed runs",
        "Several runs in a row failed. Of a worker with an argument: several with the same one, which the text names.",
        "Read the last run's error, then: housekeeping doctor. Nothing is lost: failed batches were rolled back. A "
        "failing argument is tried again after 1 minute at first, after an hour at most.",
    ),
    "overdue": Help(
        "Overdue",
        "The worker has not run for several periods of its schedule.",
        "Check that the processes are running (housekeeping status), then: housekeeping why NAME.",
    ),
    "last_run": Help(
        "Failed run",
        "The last run failed or was lost.",
        "Read its error (housekeeping errors); the retry and the next tick follow automatically. If they fail too, fix "
        "the reason.",
    ),
    "dead_letters": Help(
        "Dead letters",
        "Messages failed for good: they are in the broker's dead letters. The text names their actors.",
        "Read their errors: housekeeping deadletters list. Then requeue or delete them. Acknowledged, the alert comes "
        "back with the next one.",
    ),
    "erasure_late": Help(
        "Erasure not done",
        "An erasure was requested a day ago or longer (HOUSEKEEPING_ERASURE_LATE_S) and is not done: it waits for a "
        "worker, it failed, or rows are left.",
        "See its state and error: housekeeping erasures. Repair the cause, then erase the subject again; the alert "
        "ends when an erasure of the same subject is done.",
    ),
    "unseen": Help(
        "Unreadable rows",
        "The backlog cannot be counted: a table is locked, a table or store is unavailable, or a predicate fails. Runs "
        "of the worker fail for the same reason.",
        "Read the text of the alert: end the session that locks a table, or repair the table, the column or the "
        "predicate that it names. housekeeping doctor shows what is missing.",
    ),
    "clock": Help(
        "Wrong clock",
        "The clock of the last run's machine is over 5 s from the database's or, for uploads, from that of Redis. Over "
        "a minute, no run starts there.",
        "Check NTP on that machine and on the server's (chronyc tracking, timedatectl). The database's clock decides "
        "which rows are stale; the scheduler's clock decides when schedules fire.",
    ),
    "backlog": Help(
        "Large backlog",
        "The backlog exceeds what its document allows.",
        "Compare arrived and processed rows on the worker's page. If runs are missing, see housekeeping why; "
        "if they are not and the backlog grows, raise batch_size or max_runtime_s.",
    ),
    "late": Help(
        "Rows stay too long",
        "Stale rows that are not on hold are older than the worker promises, whether or not its runs succeed; or their "
        "age cannot be read.",
        "See which rows stay: housekeeping plan NAME. Runs skip locked rows, reject those that an error or a trigger "
        "keeps, and block parents whose dependents must stay. If they are only slow, raise max_runtime_s.",
    ),
    "unconfirmed": Help(
        "Waits for a confirmation",
        "No run of the worker has completed yet, or its predicate has changed since, and a run would process over 20 % "
        "of a table and at least 1,000 rows.",
        "Look at the plan. If the rows should go: housekeeping run NAME --confirm; scheduled runs "
        "follow. If not, correct the declaration of the sweep.",
    ),
    "breaker": Help(
        "Unusually many stale rows",
        "Far more rows are stale than usual. By default the run continues; a breaker can be set to limit or stop it.",
        "Look at the plan. If these rows should stay, pause the worker. If they should go and the breaker limits or "
        "stops the runs: housekeeping run NAME --confirm.",
    ),
    "throttled": Help(
        "Throttled",
        "The last three runs were throttled because of the database's health or by a function of your own, and ended "
        "early.",
        "The text names the cause, such as replication lag. Repair it, or remove an unused standby. Or change the "
        "limit under gates in HOUSEKEEPING_WORKERS.",
    ),
    "longest_run": Help(
        "Long run",
        "A run exceeded the duration that its document allows.",
        "Compare the counts of the last runs: more rows, or slower? If the database is overloaded, narrow the worker. "
        "housekeeping doctor names missing indexes.",
    ),
    "failed_rows": Help(
        "Rejected rows",
        "Some records could not be processed; all others were.",
        "Look at the rows and their causes: housekeeping errors, or the worker's page. The next run retries them; the "
        "log has the first 20 of each cause.",
    ),
    "most_…": Help(
        "Unusual count",
        "One run had an unusually high count.",
        "Check the source of these rows, such as CI runners. Pause the worker while you do.",
    ),
}
_OTHER: Final = Help(
    "Alert", "This alert has no help text.", "The text says what happened; housekeeping doctor may know more."
)

#: Alerts of a worker whose work is late.
_LATE: Final = frozenset({"overdue", "backlog", LATE})
#: Alerts of a worker that cannot reach a server.
_FAILING: Final = frozenset({"overdue", "backlog", LATE, "last_run", "failed_runs", "stuck"})
#: Alerts of a worker whose runs do not come, do not end, or do not process its rows.
_STOPPED: Final = frozenset({"stuck", "overdue", "failed_runs", "unconfirmed", "last_run"})
#: Alerts that need the heartbeats or the queues.
_OF_PROCESSES: Final = frozenset({NO_WORKER, NO_SCHEDULER, SATURATED, "dead_letters"})


def topic(name: str) -> str:
    """Return the key in `ALERTS` for an alert's name."""
    return "most_…" if name.startswith("most_") else name


def help_for(name: str) -> Help:
    """Return the help of an alert, or a general one for an unknown alert."""
    return ALERTS.get(topic(name), _OTHER)


def _help_of(alert: Alert) -> Help:
    found = help_for(alert.name)
    if not alert.never_seen:
        return found
    return replace(found, title=f"{found.title} process has been seen yet", do=f"{_START[alert.name]}.")


def advice(alert: Alert) -> str:
    """Return what an operator does about an alert, with the names of its worker and run in the commands."""
    sentences = _help_of(alert).do.split(". ")
    known = [each for each in sentences if alert.run is not None or not each.endswith(" ID")]
    return ". ".join(known).replace("NAME", alert.worker or "NAME").replace(" ID", f" {alert.run}")


def explained(alerts: Iterable[Alert], sweeps: Mapping[str, Sweep], server_of: Callable[[str], str]) -> list[Alert]:
    """Return the alerts with their causes: each root cause, the gravest first, before what it has caused.

    Parameters:
      server_of: Returns what the server of a database is called.
    """
    active = Active(alerts)
    causes = {
        key: next((each for each in _causes(alert, active, sweeps, server_of) if each in active), None)
        for key, alert in active.items()
    }
    roots = {key: _root(key, causes) for key in active}
    found = [replace(alert, cause=None if roots[key] == key else roots[key]) for key, alert in active.items()]
    return sorted(found, key=lambda alert: (_place(active[roots[alert.key]]), alert.cause is not None, _place(alert)))


class Active(dict[AlertKey, Alert]):
    """Active alerts by key, in the order in which they are shown.

    Attributes:
      outages: Keys of the alerts about servers other than PostgreSQL, which may explain any other alert.
      places: Position of each key in the order.
    """

    def __init__(self, alerts: Iterable[Alert]) -> None:
        super().__init__((alert.key, alert) for alert in alerts)
        of_servers = (key for key in self if key[1] in (UNAVAILABLE, NO_SPACE))
        self.outages: Final = [key for key in of_servers if not key[2].startswith("PostgreSQL")]
        self.places: Final = {key: place for place, key in enumerate(self)}


def _causes(
    alert: Alert, active: Active, sweeps: Mapping[str, Sweep], server_of: Callable[[str], str]
) -> Iterator[AlertKey]:
    """Yield the keys of alerts that would explain this one, the gravest first."""
    sweep = sweeps.get(alert.worker)
    if sweep is not None:
        yield "", UNAVAILABLE, server_of(sweep.database)
    if alert.name in _FAILING | _OF_PROCESSES:
        yield from active.outages
    elif alert.name == "unseen":  # pending uploads are in Redis
        yield from (key for key in active.outages if active[key].text in alert.text)
    if sweep is None:
        if alert.name == SATURATED:
            stuck = [each for each in active.values() if each.name == "stuck" and _queue(each, sweeps) == alert.subject]
            yield from (each.key for each in sorted(stuck, key=_place))
        return
    if alert.name in _FAILING:
        yield from _not_before(alert, active, ("", NO_SPACE, server_of(sweep.database)))
    if alert.name in ("last_run", "failed_runs"):
        clock = active.get((sweep.name, "clock", ""))
        if clock is not None and (clock.value or 0.0) > REFUSED.total_seconds():
            yield clock.key
        yield sweep.name, "unseen", ""
    if alert.name == "last_run":
        yield sweep.name, "failed_runs", ""
    if alert.name == "breaker" and alert.value is None:  # the stale rows could not be counted
        yield sweep.name, "unseen", ""
    if alert.name == LATE:
        yield from ((sweep.name, name, "") for name in ("overdue", "failed_runs", UNCONFIRMED, "unseen"))
    if alert.name in _LATE or alert.name == "stuck":
        yield from _not_before(alert, active, ("", NO_WORKER, sweep.queue), ("", NO_WORKER, ""))
    if alert.name in _LATE:
        yield from _not_before(alert, active, ("", NO_SCHEDULER, ""), ("", SATURATED, sweep.queue))


def what_stops(sweep: Sweep, active: Active, server_of: Callable[[str], str]) -> Alert | None:
    """Return the root cause that keeps a worker from processing its backlog; None if nothing does.

    Parameters:
      active: The alerts as `explained` returns them.
    """
    late = Alert("backlog", "", worker=sweep.name)
    causes = {*_causes(late, active, {sweep.name: sweep}, server_of), *((sweep.name, name, "") for name in _STOPPED)}
    if sweep.schedule is None:
        causes.discard(("", NO_SCHEDULER, ""))
    key = min(causes & active.keys(), key=active.places.__getitem__, default=None)
    if key is None:
        return None
    found = active[key]
    return found if found.cause is None else active.get(found.cause, found)


def _queue(alert: Alert, sweeps: Mapping[str, Sweep]) -> str | None:
    sweep = sweeps.get(alert.worker)
    return None if sweep is None else sweep.queue


def _not_before(alert: Alert, active: Mapping[AlertKey, Alert], *keys: AlertKey) -> Iterator[AlertKey]:
    """Yield the keys of alerts that did not begin after this one."""
    for key in keys:
        cause = active.get(key)
        if cause and not (alert.since and cause.since and alert.since < cause.since - GRACE):
            yield key


def _root(key: AlertKey, causes: Mapping[AlertKey, AlertKey | None]) -> AlertKey:
    passed = {key}
    while (cause := causes[key]) is not None and cause not in passed:
        passed.add(cause)
        key = cause
    return key


def _place(alert: Alert) -> tuple[bool, bool, int, str]:
    """Return the place of an alert in the order in which alerts are shown; acknowledged ones come last."""
    order = list(ALERTS)
    place = order.index(topic(alert.name)) if topic(alert.name) in ALERTS else len(order)
    return alert.acknowledged is not None, alert.severity != "critical", place, "".join(alert.key)


@dataclass(frozen=True, slots=True)
class Headline:
    """State of the installation in one sentence: what is wrong, since when and what to do, or that all is right.

    Attributes:
      label: What happened `at` the time: ``since`` or ``last tick``.
      more: What to do, and what else there is.
    """

    text: str
    label: str = "since"
    at: datetime | None = None
    more: str = ""

    def as_text(self, now: datetime) -> str:
        """Return the sentence as it is at a time."""
        ago = None if self.at is None else format_age(self.at, now)
        when = "" if ago is None else f", {self.label} {f'{self.at:%Y-%m-%d %H:%M:%S} UTC, ' * self.is_wrong}{ago}"
        return f"{self.text}{when}{'. ' if self.more else ''}{self.more}"

    @property
    def is_wrong(self) -> bool:
        """Whether an operator has to do something."""
        return bool(self.more)


def what_is_wrong(alerts: Sequence[Alert]) -> Headline | None:
    """Return the headline about the gravest root causes; None if each one is acknowledged.

    Parameters:
      alerts: As `explained` returns them.
    """
    roots = [alert for alert in alerts if alert.cause is None and alert.acknowledged is None]
    if not roots:
        return None
    same = [alert for alert in roots if alert.name == roots[0].name]
    caused = {alert.key for alert in same}
    folded = sum(alert.cause in caused for alert in alerts)
    of_workers = len({alert.worker for alert in same if alert.worker}) == len(same)
    where = (
        f"{len(same):,} {'workers' if of_workers else 'times'}"
        if len(same) > 1
        else (same[0].worker or same[0].subject)
    )
    found = _help_of(same[0])
    begun = () if same[0].never_seen else (alert.since for alert in same if alert.since)
    since = min(begun, default=None)
    more = [
        f"{advice(same[0]).split('. ')[0].rstrip('.')}.",
        *([f"This explains {counted(folded, 'other alert')}."] if folded else []),
        *([f"Then look at {counted(len(roots) - len(same), 'more alert')}."] if len(roots) > len(same) else []),
    ]
    return Headline(f"{found.title}{f': {where}' if where else ''}", at=since, more=" ".join(more))


def describe_caused(alerts: Iterable[Alert], root: Alert) -> str:
    """Return which alerts an alert explains, by name: ``overdue (61), backlog (3)``; empty without any."""
    return format_numbers(Counter(alert.name for alert in alerts if alert.cause == root.key))


def format_numbers(names: Counter[str]) -> str:
    """Return the number of alerts of each name, the most frequent first."""
    return ", ".join(f"{name} ({number:,})" for name, number in names.most_common())
