"""Faults of metrics: events that are not counted in the exporting process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Final

import pytest

from tests.twins import Twin

_PAGE: Final = "tests/integration/metrics/test_exposition.py::"
_ADDS_UP: Final = f"{_PAGE}test_metrics_page_sums_all_worker_processes"
_TICKS: Final = f"{_PAGE}test_scheduler_page_shows_sent_and_missed_ticks"


def _uncounted(metric: str) -> Callable[[pytest.MonkeyPatch], None]:
    silent = SimpleNamespace(add=lambda *labels, number=1: None)

    def breaks(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(f"housekeeping.core.telemetry.metrics.{metric}", silent)

    return breaks


def _twin(promise: str, name: str, metric: str, test: str = _ADDS_UP) -> Twin:
    return Twin(promise, name, test, _uncounted(metric), in_processes=True, slow=True)


TWINS: Final[list[Twin]] = [
    _twin("D2", "exports_no_duplicate", "DEDUPLICATED"),
    _twin("L2", "exports_no_lost_lease", "LEASES_LOST"),
    _twin("L4", "exports_no_held_lease", "LEASES_HELD"),
    _twin("R1", "exports_no_retry", "RETRIES"),
    _twin("R6", "exports_no_dead_letter", "DEAD_LETTERS"),
    _twin("S5", "exports_no_missed_tick", "TICKS_MISSED", _TICKS),
]
