"""Invariants of sweeps: epochs, processed rows, ledger."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulator.stage import Stage
from tests.simulator.workload import SWEEPS


def epochs_never_go_down(stage: Stage) -> Iterator[str]:
    """F1, F2, L3: no run commits after the start of one with a higher epoch."""
    highest: dict[str, int] = {}
    for when, where, what, worker, run_id, *more in stage.events("run began", "committed by"):
        epoch = more[1] if what == "run began" else more[0]
        if epoch is None:
            continue
        if epoch < highest.get(worker, 0):
            yield f"run {run_id} of {where} committed at {when} with epoch {epoch}, after {highest[worker]} had begun"
        highest[worker] = max(epoch, highest.get(worker, 0))


def rows_are_processed_once_and_counted(stage: Stage) -> Iterator[str]:
    """F3, F4: each row changes at most once, and the ledger's totals equal the changed rows."""
    for table in SWEEPS:
        rows = stage.postgres.committed.get(table, {})
        for key, row in rows.items():
            if row["settled"] > 1:
                yield f"row {key} of {table} was settled {row['settled']} times"
        changed = sum(row["settled"] for row in rows.values())
        counted = sum(run["counts"].get("settled", 0) for run in stage.runs.values() if run["worker"] == table)
        if changed != counted:
            yield f"{changed} rows of {table} changed, the ledger counts {counted}"


def processed_rows_have_no_object_left(stage: Stage) -> Iterator[str]:
    """F9: no row is processed before its object is deleted."""
    for table in SWEEPS:
        for key, row in stage.postgres.committed.get(table, {}).items():
            if row["settled"] and (table, key) not in stage.world.shared["deleted"]:
                yield f"row {key} of {table} was settled, its object is still there"


def nothing_is_left_at_the_end(stage: Stage) -> Iterator[str]:
    """F3: the last runs, without faults, leave the state of an undisturbed run."""
    if stage.clock_stepped("scheduler"):
        return  # a clock that was an hour behind sends no more ticks in time
    left = [key for key, row in stage.postgres.committed.get("swept", {}).items() if not row["settled"]]
    if left:
        yield f"rows {left} of swept were never settled"


def a_done_run_has_skipped_no_row(stage: Stage) -> Iterator[str]:
    """F3: a completed run has processed everything stale when its pass started at the front.

    A run that begins at a place is of the walk that got there, and of the latest one if several did. That need not be
    the walk of the run before it: while one that died is not yet taken for dead, the next begins at the front, and
    when that one breaks off as well, the first one's place may be gone on from. After a run that ended as done the
    next begins at the front.
    """
    if stage.clock_stepped("worker"):
        return  # the process's clock decides what is stale
    began: dict[int, float] = {}  # run -> start of its pass at the front
    reached: dict[tuple[str, str], float] = {}  # worker and position -> start of the latest pass that reached it
    settled: dict[str, set[int]] = {table: set() for table in SWEEPS}
    excused: dict[str, set[int]] = {table: set() for table in SWEEPS}
    kinds = ("run began", "settled", "passed over", "committed by", "run ended")
    for _, _, what, worker, run_id, *more in stage.events(*kinds):
        if what == "run began":
            # The run has read the time before its row was committed, which may have waited.
            read: float = stage.runs[run_id]["started_at"].timestamp()
            # At an unknown position, the run has skipped what is before it.
            began[run_id] = read if more[2] is None else reached.get((worker, str(more[2])), read)
        elif what == "committed by":
            if more[1] is not None:  # a row of missed ticks has no position
                place = worker, str(more[1])
                reached[place] = max(began[run_id], reached.get(place, 0.0))
        elif what == "settled":
            settled[worker] |= set(more[0])
        elif what == "passed over":
            excused[worker].add(run_id)  # the row is locked by another run
        elif more[1] == "done" and stage.runs[run_id]["epoch"] is not None:
            for key, row in stage.postgres.committed[worker].items():
                stale = row["stale_at"] <= began[run_id] - 1
                if stale and key not in settled[worker] | excused[worker]:
                    yield f"run {run_id} of {worker} ended as done, row {key} was stale and is not settled"
            reached = {place: since for place, since in reached.items() if place[0] != worker}


def a_completed_sweep_does_not_run_again(stage: Stage) -> Iterator[str]:
    """I1: a completed sweep never runs again, because the ledger has its completion."""
    completed: set[str] = set()
    for _, _, what, worker, run_id, message_id, *more in stage.events("run began", "run ended"):
        if what == "run began" and message_id in completed:
            yield f"run {run_id} of {worker} began although message {message_id} was completed"
        elif what == "run ended" and (more[0] == "done" or (more[0] == "partial" and more[1] != "shutdown")):
            completed.add(message_id)


def a_dead_run_is_taken_over_in_time(stage: Stage) -> Iterator[str]:
    """F3: after a kill within a run, another run starts within two ttls, unless faults prevent it.

    Counted from the last kill of a process that had its message: an attempt that dies before it begins is another.
    """
    if set(stage.faults.struck) - {"kill before", "kill after"}:
        return  # other runs may delay it
    open_runs: dict[int, tuple[str, str]] = {}
    waited: dict[str, float] = {}
    deaths = [when for when, *_ in stage.of("killed")]
    for when, where, what, *details in stage.events("run began", "run ended", "killed", "interrupted"):
        if what == "interrupted":
            if details[0] in waited and details[-1] == "Killed":
                waited[details[0]] = when
        elif what == "run began":
            worker, run_id, *_ = details
            if worker in waited and (after := when - waited.pop(worker)) > 130 + 20 * len(deaths):
                yield f"{worker} was taken over only after {after} s"
            open_runs[run_id] = (worker, where)
        elif what == "run ended":
            open_runs.pop(details[1], None)
        else:
            for worker, process in open_runs.values():
                if process == details[0]:
                    waited.setdefault(worker, when)


LEDGER = (
    epochs_never_go_down,
    rows_are_processed_once_and_counted,
    processed_rows_have_no_object_left,
    nothing_is_left_at_the_end,
    a_done_run_has_skipped_no_row,
    a_completed_sweep_does_not_run_again,
    a_dead_run_is_taken_over_in_time,
)
