"""A sweep of small batches, and rows that are due for it."""

from __future__ import annotations

import dataclasses
from typing import Final

from housekeeping.workers.user_status_cleanup.worker import sweep

SMALL: Final = dataclasses.replace(sweep, batch_size=10)
#: Due by any real clock, the lowest ids first.
DUE: Final = "now() - interval '1 hour' + interval '1 millisecond' * n"
