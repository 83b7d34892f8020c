"""What must hold of sweeps: their epochs, the rows they settle, what the ledger says of it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulator.stage import Stage
from tests.simulator.workload import SWEEPS


def epochs_never_go_down(stage: Stage) -> Iterator[str]:
    """F1, F2, L3: no commit of a run comes after the beginning of one with a higher epoch."""
    highest: dict[str, int] = {}
    for when, where, what, worker, run_id, *more in stage.events("run began", "committed by"):
        epoch = more[1] if what == "run began" else more[0]
        if epoch is None:
            continue
        if epoch < highest.get(worker, 0):
            yield f"run {run_id} of {where} committed at {when} with epoch {epoch}, after {highest[worker]} had begun"
        highest[worker] = max(epoch, highest.get(worker, 0))


def rows_are_settled_once_and_counted(stage: Stage) -> Iterator[str]:
    """F3, F4: each row at most once, and the ledger's totals are the rows that changed."""
    for table in SWEEPS:
        rows = stage.postgres.committed.get(table, {})
        for key, row in rows.items():
            if row["settled"] > 1:
                yield f"row {key} of {table} was settled {row['settled']} times"
        changed = sum(row["settled"] for row in rows.values())
        counted = sum(run["counts"].get("settled", 0) for run in stage.runs.values() if run["worker"] == table)
        if changed != counted:
            yield f"{changed} rows of {table} changed, the ledger counts {counted}"


def what_was_settled_is_gone_outside(stage: Stage) -> Iterator[str]:
    """F9: no row is settled whose object was not deleted before."""
    for table in SWEEPS:
        for key, row in stage.postgres.committed.get(table, {}).items():
            if row["settled"] and (table, key) not in stage.world.shared["deleted"]:
                yield f"row {key} of {table} was settled, its object is still there"


def nothing_is_left_at_the_end(stage: Stage) -> Iterator[str]:
    """F3: the scheduled sweep's last runs, without faults, leave the state of an undisturbed run."""
    if stage.clock_stepped("scheduler"):
        return  # one whose clock was an hour behind fires no more ticks in the time there is
    left = [key for key, row in stage.postgres.committed.get("swept", {}).items() if not row["settled"]]
    if left:
        yield f"rows {left} of swept were never settled"


def a_run_that_ends_well_has_passed_over_nothing(stage: Stage) -> Iterator[str]:
    """F3: a run has settled all that was stale when the walk to its end began at the front.

    A run that begins at a place is of the walk that got there, and of the latest one if several did. That need not be
    the walk of the run before it: while one that died is not yet taken for dead, the next begins at the front, and
    when that one breaks off as well, the first one's place may be gone on from. After a run that ended as done the
    next begins at the front.
    """
    if stage.clock_stepped("worker"):
        return  # what is stale depends on the clock of the process
    began: dict[int, float] = {}  # run -> when its walk began at the front
    reached: dict[tuple[str, str], float] = {}  # worker and place -> likewise, of the latest walk that got there
    settled: dict[str, set[int]] = {table: set() for table in SWEEPS}
    excused: dict[str, set[int]] = {table: set() for table in SWEEPS}
    kinds = ("run began", "settled", "passed over", "committed by", "run ended")
    for when, _, what, worker, run_id, *more in stage.events(*kinds):
        if what == "run began":
            # At a place where no walk stands, it has passed over what is before it.
            began[run_id] = float(when) if more[2] is None else reached.get((worker, str(more[2])), float(when))
        elif what == "committed by":
            if more[1] is not None:  # a row that counts missed ticks has no place
                place = worker, str(more[1])
                reached[place] = max(began[run_id], reached.get(place, 0.0))
        elif what == "settled":
            settled[worker] |= set(more[0])
        elif what == "passed over":
            excused[worker].add(run_id)  # here: the row, locked by another run
        elif more[1] == "done" and stage.runs[run_id]["epoch"] is not None:
            for key, row in stage.postgres.committed[worker].items():
                stale = row["stale_at"] <= began[run_id] - 1
                if stale and key not in settled[worker] | excused[worker]:
                    yield f"run {run_id} of {worker} ended as done, row {key} was stale and is not settled"
            reached = {place: since for place, since in reached.items() if place[0] != worker}


def a_completed_sweep_does_not_run_again(stage: Stage) -> Iterator[str]:
    """I1: always, because its completion is in the ledger."""
    completed: set[str] = set()
    for _, _, what, worker, run_id, message_id, *more in stage.events("run began", "run ended"):
        if what == "run began" and message_id in completed:
            yield f"run {run_id} of {worker} began although message {message_id} was completed"
        elif what == "run ended" and (more[0] == "done" or (more[0] == "partial" and more[1] != "shutdown")):
            completed.add(message_id)


def a_dead_run_is_taken_over_in_time(stage: Stage) -> Iterator[str]:
    """F3: after a kill within a run, another one begins within two ttls of a minute, faults permitting.

    Counted from the last kill of a process that had its message: an attempt that dies before it begins is another.
    """
    if set(stage.faults.struck) - {"kill before", "kill after"}:
        return  # others may keep it from beginning
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
    rows_are_settled_once_and_counted,
    what_was_settled_is_gone_outside,
    nothing_is_left_at_the_end,
    a_run_that_ends_well_has_passed_over_nothing,
    a_completed_sweep_does_not_run_again,
    a_dead_run_is_taken_over_in_time,
)
