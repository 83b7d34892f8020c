from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from housekeeping import Delete, Rows, Sweep
from tests.declarations import changed
from tests.internals.insight import process_alerts
from tests.internals.ledger import UNKNOWN, BusyThread, Heartbeat, Process, Processes

NOW = datetime(2026, 11, 20, 12, 0, 30, tzinfo=UTC)


def sweep(**more: Any) -> Sweep:
    rows = Rows("sessions", stale=lambda row, now: row.expires_at <= now, action=Delete())
    return changed(Sweep("test.alerts", rows, schedule="*/5 * * * *"), **more)


def process(kind: str, age_s: float = 1.0, **more: Any) -> Process:
    said = {"kind": kind, "host": "a", "pid": 7, "version": "1", "up_s": 0.0, **more}
    if kind == "worker":
        said.setdefault("queues", ["cronjob"])
    heartbeat = Heartbeat(**said)
    return Process(heartbeat, NOW - timedelta(seconds=age_s), age_s)


def alerts(*processes: Process, waiting: dict[str, int] | None = None, **more: Any) -> list[str]:
    every = tuple(sorted(processes, key=lambda each: each.age_s))
    found = process_alerts([sweep(**more)], Processes(every), waiting or {}, NOW, UTC, ever_ran=True)
    return [alert.name for alert in found]


def test_worker_and_scheduler_alive_raise_no_alert() -> None:
    assert alerts(process("worker"), process("scheduler")) == []


@pytest.mark.parametrize("how", [{"age_s": 31}, {"stopped": True}, {"queues": ["git_refs"]}])
def test_queue_that_no_living_worker_serves_raises_no_worker(how: dict[str, Any]) -> None:
    assert alerts(process("worker", **how), process("scheduler")) == ["no_worker"]


def test_queue_with_waiting_messages_needs_a_worker_without_a_schedule() -> None:
    served = process("worker"), process("scheduler")

    assert alerts(*served, waiting={"git_refs": 0}) == []
    assert alerts(*served, waiting={"git_refs": 1}) == ["no_worker"]


@pytest.mark.parametrize(
    ("age_s", "more", "rings"),
    [
        (600, {}, []),
        (601, {}, ["no_scheduler"]),
        (120, {"schedule": "* * * * *"}, []),  # two minutes at the earliest
        (121, {"schedule": "* * * * *"}, ["no_scheduler"]),
    ],
)
def test_scheduler_is_missed_after_two_periods(age_s: float, more: dict[str, Any], rings: list[str]) -> None:
    assert alerts(process("worker"), process("scheduler", age_s, stopped="schedule" in more), **more) == rings


@pytest.mark.parametrize(("up_s", "rings"), [(599.0, []), (600.0, ["no_scheduler"])])
def test_missing_scheduler_is_counted_from_the_first_process_start(up_s: float, rings: list[str]) -> None:
    assert alerts(process("worker", up_s=up_s)) == rings


def test_one_living_scheduler_is_enough() -> None:
    assert alerts(process("worker"), process("scheduler", 5_000), process("scheduler", 2)) == []


@pytest.mark.parametrize("more", [{"enabled": False}, {"schedule": None}])
def test_installation_without_work_needs_no_process(more: dict[str, Any]) -> None:
    assert alerts(**more) == []
    assert alerts(process("worker", 5_000), process("scheduler", 5_000), **more) == []


def test_no_alert_when_no_store_could_be_read() -> None:
    assert process_alerts([sweep()], UNKNOWN, {"cronjob": 5}, NOW, UTC, ever_ran=True) == []


@pytest.mark.parametrize(("ever_ran", "since"), [(False, "yet"), (True, "for a day")])
def test_installation_without_any_process_misses_worker_and_scheduler(ever_ran: bool, since: str) -> None:
    sweeps = [sweep(), sweep(actor={"queue_name": "git_refs"})]

    found = process_alerts(sweeps, Processes(), {"mails": 3}, NOW, UTC, ever_ran=ever_ran)

    assert [(alert.name, alert.text) for alert in found] == [
        ("no_worker", f"no worker has sent a heartbeat {since}: start `housekeeping worker`"),
        ("no_scheduler", f"no scheduler has sent a heartbeat {since}: start `housekeeping scheduler`"),
    ]


@pytest.mark.parametrize(
    ("processes", "ever_ran", "names"),
    [
        ([], False, []),
        ([process("worker", queues=["mails"], up_s=5_000)], False, []),
        ([], True, ["no_worker", "no_scheduler"]),
        ([process("scheduler", 5_000)], False, ["no_worker", "no_scheduler"]),
    ],
)
def test_maintenance_alone_needs_processes_only_where_there_were_some(
    processes: list[Process], ever_ran: bool, names: list[str]
) -> None:
    maintenance = [sweep(name="housekeeping.old_runs"), sweep(name="housekeeping.outbox.ci")]

    found = process_alerts(maintenance, Processes(tuple(processes)), {}, NOW, UTC, ever_ran=ever_ran)

    assert [alert.name for alert in found] == names


def test_dead_scheduler_is_missed_although_workers_are_dead_too() -> None:
    assert alerts(process("worker", 5_000), process("scheduler", 5_000)) == ["no_worker", "no_scheduler"]


def busy(*seconds: float, threads: int = 2, of: str = "shop.calls", **more: Any) -> Process:
    thread = {"name": "t", "worker": of, "message_id": "m", "frame": "socket.py:7 f"}
    long = [BusyThread(**thread, busy_s=each) for each in seconds]
    return process("worker", 1.0, threads=threads, busy=threads, busy_threads=long, **more)


@pytest.mark.parametrize(
    ("workers", "waiting", "rings"),
    [
        ([busy(300.0, 900.0)], 3, True),
        ([busy(299.0, 900.0)], 3, False),
        ([busy(900.0)], 3, False),
        ([busy(900.0, 900.0)], 2, False),
        ([busy(900.0, 900.0), process("worker", threads=1)], 9, False),
        ([busy(900.0, 900.0), busy(400.0, 400.0)], 5, True),
        ([busy(900.0, 900.0), busy(900.0, 900.0, queues=["mails"])], 3, True),
    ],
    ids=["over a period", "at it", "one free", "none waits", "a free process", "two processes", "another queue"],
)
def test_queue_is_saturated_when_all_threads_are_busy_for_a_period_and_messages_wait(
    workers: list[Process], waiting: int, rings: bool
) -> None:
    found = alerts(process("scheduler"), *workers, waiting={"cronjob": waiting})

    assert found == (["saturated"] if rings else [])


def test_saturated_queue_is_described() -> None:
    every = (busy(400.0, 900.0), process("scheduler"))
    [alert] = process_alerts([sweep()], Processes(every), {"cronjob": 5}, NOW, UTC, ever_ran=True)

    assert alert.text == (
        "all 2 threads of the queue 'cronjob' have been busy for 6.7 min, and 3 messages wait; "
        "at work: shop.calls (2). Start another `housekeeping worker`"
    )
    assert (alert.subject, alert.limit, alert.since) == ("cronjob", 300, NOW - timedelta(seconds=101))


def test_process_killed_again_and_again_does_not_fill_the_list() -> None:
    dead = [process("worker", 100.0 + n) for n in range(50)]
    stopped = process("worker", 90, stopped=True)

    listed = Processes((process("scheduler"), stopped, *dead)).listed

    assert [each.alive for each in listed] == [True] + [False] * 10
    assert stopped not in listed


def test_alert_names_the_stopped_worker_and_counts_only_messages_that_wait() -> None:
    stopped = Processes((process("worker", 2.5, stopped=True),))

    def text(waiting: dict[str, int]) -> str:
        return process_alerts([sweep()], stopped, waiting, NOW, UTC, ever_ran=True)[0].text

    said = "no worker serves the queue 'cronjob' since 2026-11-20 12:00:27 UTC (a:7 stopped 2.5 s ago): "
    assert text({}) == f"{said}start `housekeeping worker`"
    assert text({"cronjob": 2}) == f"{said}start `housekeeping worker`; 2 messages wait"
