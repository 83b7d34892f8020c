"""Floor 2: one package a worker, named after its design document; none knows another."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from housekeeping.workers.user_status_cleanup import worker as user_status_cleanup

#: Every built-in worker, in the order they are listed; each module has `sweep` and `MODELS`.
BUILT_IN: Final[tuple[ModuleType, ...]] = (user_status_cleanup,)
