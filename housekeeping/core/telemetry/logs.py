"""Log lines: one JSON object a line for machines, readable lines on a terminal; both on stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

from housekeeping.core.sanitize import mask_secrets, printable
from housekeeping.core.telemetry.log_handler import StderrHandler, sole_handler

Format = Literal["json", "console"]

#: Libraries that say at INFO what only their own developers want to know.
_QUIET: Final = ("pika", "urllib3", "botocore")
_JSON: Final = json.JSONEncoder(check_circular=False)  # `to_log_value` ends what holds itself
_RECORD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
_RESERVED: Final = _RECORD - {"exc_info", "stack_info"}
_DEPTH: Final = 6  # levels of nesting that are shown; deeper ones are written as text


def to_log_value(value: Any, depth: int = _DEPTH) -> Any:
    """The value in a form that any JSON reader takes, with the passwords in it masked; never raises."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict) and depth:
        return {_text(key): to_log_value(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [to_log_value(each, depth - 1) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        text = str(value)
        # A secret comes after one of these; to look for it takes longer than all the rest of a line.
        return mask_secrets(text) if ":" in text or "=" in text else text
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _presented(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): to_log_value(value) for name, value in fields.items()}


def _visible(value: Any, *, lines: bool) -> Any:
    if isinstance(value, str):
        # A line end would let a name begin a log line of its own; a traceback has its own.
        return printable(value) if lines else printable(value).replace("\n", "\\n")
    return value


def _beginning(record: logging.LogRecord) -> EventDict:
    fields: EventDict = {"event": record.getMessage()}
    if record.exc_info:
        fields["exc_info"] = record.exc_info
    if record.stack_info:
        fields["stack_info"] = record.stack_info
    return structlog.contextvars.merge_contextvars(None, "", fields)


def _end(record: logging.LogRecord) -> EventDict:
    at = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
    level = structlog.stdlib.add_log_level(None, record.levelname.lower(), {})
    return {**level, "logger": record.name, "timestamp": at}


class _Lines(logging.Formatter):
    """Makes a line of a record: its event, the context, its own fields, and where and when it was logged."""

    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.render: Final = render

    def format(self, record: logging.LogRecord) -> str:
        beginning = _beginning(record)
        own = {name: value for name, value in vars(record).items() if name not in _RECORD}
        # The record's own comes last: what a caller calls "level" or "event" does not pass for the line's.
        fields: EventDict = {**beginning, **own, "event": beginning["event"], **_end(record)}
        if "exc_info" in fields:
            # Before masking: an exception's text may quote a URL.
            fields = structlog.processors.format_exc_info(None, "", fields)
        return self.render(_presented(fields))

    def together(self, record: logging.LogRecord, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """A line for each of the rows, which have all else in common."""
        beginning, end = _presented(_beginning(record)), _presented(_end(record))
        return [
            self.render({**beginning, **{_named(name): to_log_value(row[name]) for name in row}, **end}) for row in rows
        ]


def _named(name: str) -> str:
    # logging refuses, with a KeyError, an extra that is called as one of its own.
    return f"{name}_" if name in _RESERVED else name


def _without_clashes(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {_named(name): value for name, value in event.items()}


class _SkipsAreNoWarnings(logging.Filter):
    """Lowers Dramatiq's line for a skipped message: a lease held elsewhere is no error (semantics.md, L4)."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Message %s was skipped.":
            return True
        record.levelno, record.levelname = logging.INFO, "INFO"
        return logging.getLogger().isEnabledFor(logging.INFO)


def configure(level: str = "INFO", form: Format | None = None) -> None:
    """Send every log line of this process, the libraries' own included, to stderr.

    Replaces the handlers of the root logger; meant for processes that are ours (the command
    line and `housekeeping.app`), never called by merely importing the library.

    Parameters:
      level: The lowest level that is written.
      form: ``json`` or ``console``; readable lines when stderr is a terminal and nothing is said.
    """
    form = form or ("console" if sys.stderr.isatty() else "json")
    handler = StderrHandler()
    # JSON has an escape for whatever a terminal would obey.
    handler.setFormatter(_Lines(_JSON.encode if form == "json" else _console()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("dramatiq.worker.WorkerThread").addFilter(_SkipsAreNoWarnings())
    logging.captureWarnings(True)


def _console() -> Callable[[dict[str, Any]], str]:
    # https://no-color.org
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    renderer = structlog.dev.ConsoleRenderer(
        colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )

    def render(fields: dict[str, Any]) -> str:
        # Names of objects and refs, and errors that quote them, reach a terminal as text it does not obey.
        shown = {printable(name): _visible(value, lines=name == "exception") for name, value in fields.items()}
        return renderer(None, "", shown)

    return render


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that writes keywords as fields: ``logger(__name__).info("event", rows=3)``.

    Stands on the standard library's logging and on nothing global of structlog's, so that in an
    application with a configuration of its own the fields arrive as ``extra``.
    """
    bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            _without_clashes,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return bound


def log_rows(name: str, level: int, event: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each of the rows, with its items as fields: ``logger(name).log(level, event, **row)``.

    Where nobody but our own handler would see the records, none are made and the lines are written together, with one
    timestamp; a line costs a fifth then.
    """
    to = logging.getLogger(name)
    if not to.isEnabledFor(level):
        return
    if _written_together(to, level, event, rows):
        return
    one_by_one = logger(name)
    for row in rows:
        one_by_one.log(level, event, **row)


def _written_together(to: logging.Logger, level: int, event: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    handler = sole_handler(to)
    if handler is None or not isinstance(handler.formatter, _Lines):
        return False
    record = to.makeRecord(to.name, level, "", 0, event, (), None)
    try:
        lines = handler.formatter.together(record, rows)
    except Exception:
        # One of them cannot be made; one by one, the others can.
        return False
    handler.write(lines)
    return True
