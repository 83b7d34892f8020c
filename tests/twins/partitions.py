"""Faults of sweeps that drop partitions and die, or are taken over (scenarios F1, F3)."""

from __future__ import annotations

from typing import Final

import pytest

from housekeeping.sweeps.partitions import marks, removal, stage
from tests.twins import Twin
from tests.twins.planting import instead

_TESTS: Final = "tests/integration/sweeps/partitions/"


def _detaches_unchecked(patch: pytest.MonkeyPatch) -> None:
    detach = removal.detach_first
    patch.setattr(stage, "detach_first", lambda found, candidate, check: detach(found, candidate, lambda: None))


TWINS: Final[list[Twin]] = [
    Twin(
        "F1",
        "detaches_after_a_takeover",
        _TESTS + "test_concurrent.py::test_run_that_was_taken_over_detaches_nothing",
        _detaches_unchecked,
    ),
    Twin(
        "F3",
        "forgets_detached_partitions",
        _TESTS + "test_killed.py::test_run_killed_between_detach_and_drop_is_finished_by_the_next",
        instead(marks, "detached_from", lambda table: []),
    ),
]
