"""Lines are what structlog's own stack of processors makes of the same records; it takes several times as long."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pytest
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tests.internals.core import logs

Made = tuple[logging.LogRecord, Mapping[str, Any]]

_AT: Final = 1_767_225_600.25
_SECRET: Final = "\x1b[31m\r\nALARM \u202e \udc80 postgresql://me:hunter2@host/db password = 'a b' token: x"


class _Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def _own_event(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {**structlog.stdlib.ExtraAdder()(None, "", dict(event)), "event": event["event"]}  # type: ignore[arg-type]


def _at(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    stamp = datetime.fromtimestamp(_AT, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {**event, "timestamp": stamp}


def _presented(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {str(name): logs.to_log_value(value) for name, value in event.items()}


_SHARED: Final[list[Processor]] = [
    structlog.contextvars.merge_contextvars,
    _own_event,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    _at,
]
_RENDERING: Final[list[Processor]] = [
    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    structlog.processors.format_exc_info,
    _presented,
    structlog.processors.JSONRenderer(),
]


def _raised(error: Exception) -> Any:
    try:
        raise error
    except Exception:
        return sys.exc_info()


def _record(message: str = "Said", args: Any = (), exc_info: Any = None, **extra: Any) -> logging.LogRecord:
    record = logging.LogRecord("housekeeping.x", logging.WARNING, __file__, 1, message, args, exc_info)
    record.created = _AT
    vars(record).update(extra)
    return record


_VALUES: Final[list[Any]] = [
    _SECRET, "", "a: b", "a=b", "password:", None, True, 7, 2**200, 0.5, float("nan"), float("inf"), Decimal("1.10"),
    b"\x00\xff", UUID(int=7), datetime(2026, 1, 1, tzinfo=UTC), _Unshowable(), ValueError(_SECRET), [_SECRET, {1: {2}}],
    {_SECRET: (1, 2)}, {(1, 2): [[[[[[[[_SECRET]]]]]]]]}, object,
]  # fmt: skip

RECORDS: Final[list[logging.LogRecord]] = [
    *(_record(value=value) for value in _VALUES),
    _record(_SECRET, **{_SECRET[:5]: 1, "a b": 2}),
    _record("%s and %d", (_SECRET, 2)),
    _record("%(a)s", ({"a": _SECRET},)),
    _record("100 %"),
    _record(exc_info=_raised(ValueError(_SECRET)), before="x"),
    _record(exc_info=(None, None, None)),
    _record(stack_info=_SECRET),
    _record(level="mine", logger="mine", timestamp="mine", event="mine", exception="mine", worker="mine"),
]


@pytest.fixture(params=[{}, {"worker": "w", "run_id": 7}, {"url": _SECRET, "event": "theirs", "level": "theirs"}])
def context(request: pytest.FixtureRequest) -> Iterator[None]:
    with structlog.contextvars.bound_contextvars(**request.param):
        yield


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_line_equals_the_one_of_structlog(root_as_before: None, context: None, record: logging.LogRecord) -> None:
    structlogs = structlog.stdlib.ProcessorFormatter(processors=_RENDERING, foreign_pre_chain=_SHARED)
    logs.configure("INFO", "json")
    formatter = logging.getLogger().handlers[0].formatter

    assert formatter is not None
    assert formatter.format(record) == structlogs.format(record)
