"""Shortcuts that compute once what is the same in every schedule."""

from __future__ import annotations

import gc
import sys
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final

import dramatiq.middleware.retries

from tests.internals.core import Cron
from tests.internals.middleware import retries

_FEW_OBJECTS: Final = 100_000  # objects per garbage collection; a schedule makes about as many


def install() -> None:
    """Speed up schedules in this interpreter."""
    _read_each_spec_once()
    _ask_for_each_tick_once()
    # Tracebacks are not used, and each costs as much as ten round trips to Redis.
    without: Any = SimpleNamespace(
        format_exc=lambda limit: repr(sys.exception()), format_exception=lambda error, limit: [repr(error)]
    )
    modules: tuple[Any, ...] = (dramatiq.middleware.retries, retries)
    for module in modules:
        module.traceback = without
    # Dramatiq imports it for every broker, and would search the path each time.
    sys.modules.setdefault("gevent", None)  # type: ignore[arg-type]
    gc.collect()
    gc.freeze()
    gc.set_threshold(_FEW_OBJECTS, 20, 20)


def _read_each_spec_once() -> None:
    real: Any = Cron
    read = real.__post_init__
    known: dict[Cron, dict[str, Any]] = {}

    def once(cron: Cron) -> None:
        if cron not in known:
            read(cron)
            known[cron] = {**vars(cron)}
        vars(cron).update(known[cron])

    real.__post_init__ = once


def _ask_for_each_tick_once() -> None:
    real: Any = Cron
    latest = lru_cache(maxsize=4096)(real.latest)
    real.latest = lambda cron, at: latest(cron, at.replace(second=0, microsecond=0))
