"""A sweep of small batches, and rows that are due for it."""

from __future__ import annotations

from typing import Final

from tests.declarations import changed
from tests.internals.workers import status_sweep as sweep

SMALL: Final = changed(sweep, batch=10)
#: Due by any real clock, the lowest ids first.
DUE: Final = "now() - interval '1 hour' + interval '1 millisecond' * n"
