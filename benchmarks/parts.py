"""``user_status_cleanup.batch`` with one, two and four shards, each in its own process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, Final

from benchmarks import statuses
from benchmarks.comparison import Comparison, Contestant, Place
from benchmarks.ours import composed
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.workers.user_status_cleanup.models import UserStatus

_BATCH: Final = 1_000
_PATIENCE_S: Final = 600


def _parts(number: int) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        spawning = multiprocessing.get_context("spawn")
        start: Any = spawning.Barrier(number)
        others = [spawning.Process(target=_other, args=(place, start)) for _ in range(number - 1)]
        for other in others:
            other.start()
        sweep = composed(place, statuses.WORKER, batch_size=_BATCH)
        start.wait(_PATIENCE_S)  # all are ready

        def work() -> None:
            start.wait(_PATIENCE_S)
            run_sweep(sweep)
            for other in others:
                other.join(_PATIENCE_S)
                if other.exitcode != 0:
                    raise RuntimeError(f"a part ended with {other.exitcode}")

        return work

    return ready


def _other(place: Place, start: Any) -> None:
    sweep = composed(place, statuses.WORKER, batch_size=_BATCH)
    start.wait(_PATIENCE_S)
    start.wait(_PATIENCE_S)
    run_sweep(sweep)


COMPARISONS: Final = (
    Comparison(
        name="parts",
        template="statuses",
        models=(UserStatus,),
        fill=statuses.fill,
        undone=statuses.UNDONE,
        contestants={"1 part": _parts(1), "2 parts": _parts(2), "4 parts": _parts(4)},
    ),
)
