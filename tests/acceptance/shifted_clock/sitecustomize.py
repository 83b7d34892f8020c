"""Shifted clocks for a process that imports this module at start."""

from __future__ import annotations

import datetime as datetime_module
import os
import time
from datetime import datetime, tzinfo
from typing import Any

_AHEAD_S = float(os.environ.get("TEST_CLOCK_AHEAD_S", "0"))
_real_time = time.time


def _shifted_time() -> float:
    return _real_time() + _AHEAD_S


class _LikeTheRealOne(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)


class _Shifted(datetime, metaclass=_LikeTheRealOne):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.fromtimestamp(_shifted_time(), tz)


if _AHEAD_S:
    time.time = _shifted_time
    datetime_module.datetime = _Shifted  # type: ignore[misc]
