"""Checks of the throttles that need more than the tables: they can read the values that they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from housekeeping.core.sanitize import typed_error_line
from housekeeping.core.settings import Settings
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.limits.throttle import reason_to_wait
from housekeeping.sweeps.limits.wal_health import read_wal
from housekeeping.sweeps.registry import Finding

#: What a run does with a throttle that cannot be read.
_IGNORED: Final = "runs continue without this throttle"


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about limits on WAL and about custom functions, which it calls. Other limits need no check."""
    for sweep in sweeps.values():
        if sweep.throttle.queries_wal:
            yield _wal(sweep)
        if sweep.throttle.custom is not None:
            yield _custom(sweep.name, sweep.throttle.custom)


def _wal(sweep: Sweep) -> Finding:
    named = [name for name in ("wal_mb_per_s", "slot_lag_mb") if getattr(sweep.throttle, name) is not None]
    subject, state = f"gates {', '.join(named)}", read_wal()
    if state.position is not None:
        return Finding("fine", sweep.name, subject, "the server's WAL can be read")
    trouble = state.trouble or "the server is a standby, which writes no WAL"
    return Finding("warning", sweep.name, subject, f"{trouble}; {_IGNORED}")


def _custom(worker: str, custom: Callable[[], str | None]) -> Finding:
    try:
        reason = reason_to_wait(custom)
    except Exception as error:
        text = f"the function fails: {typed_error_line(error)}; {_IGNORED}"
        return Finding("warning", worker, "gates custom", text, "correct the function, or set gates.custom to null")
    return Finding("fine", worker, "gates custom", "no reason to wait" if reason is None else f"waits: {reason}")
