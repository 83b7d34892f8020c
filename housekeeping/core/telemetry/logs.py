"""Log lines on stderr: JSON objects for machines, readable lines on a terminal."""

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

#: Libraries whose INFO lines concern only their own developers.
_QUIET: Final = ("pika", "urllib3", "botocore")
_JSON: Final = json.JSONEncoder(check_circular=False)  # `to_log_value` ends cycles by its depth
_RECORD_ATTRIBUTES: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
_RESERVED: Final = _RECORD_ATTRIBUTES - {"exc_info", "stack_info"}
_DEPTH: Final = 6  # levels of nesting that are kept; deeper values are written as text


def to_log_value(value: Any, depth: int = _DEPTH) -> Any:
    """Return the value as JSON types, with passwords masked; never raises."""
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
        # A secret follows one of these characters. The search takes longer than the rest of the line.
        return mask_secrets(text) if ":" in text or "=" in text else text
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _to_log_values(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): to_log_value(value) for name, value in fields.items()}


def _printable(value: Any, *, keep_lines: bool) -> Any:
    if isinstance(value, str):
        # A line end in a name would start another log line. Tracebacks keep theirs.
        return printable(value) if keep_lines else printable(value).replace("\n", "\\n")
    return value


def _leading_fields(record: logging.LogRecord) -> EventDict:
    fields: EventDict = {"event": record.getMessage()}
    if record.exc_info:
        fields["exc_info"] = record.exc_info
    if record.stack_info:
        fields["stack_info"] = record.stack_info
    return structlog.contextvars.merge_contextvars(None, "", fields)


def _trailing_fields(record: logging.LogRecord) -> EventDict:
    at = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
    level = structlog.stdlib.add_log_level(None, record.levelname.lower(), {})
    return {**level, "logger": record.name, "timestamp": at}


class _LineFormatter(logging.Formatter):
    """Formatter that writes a record as one line: event, context, fields, logger, timestamp."""

    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.render: Final = render

    def format(self, record: logging.LogRecord) -> str:
        leading = _leading_fields(record)
        own = {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}
        # Event, level, logger and timestamp come last, so that no field of the caller replaces them.
        fields: EventDict = {**leading, **own, "event": leading["event"], **_trailing_fields(record)}
        if "exc_info" in fields:
            # Before passwords are masked, because the exception's text may quote a URL.
            fields = structlog.processors.format_exc_info(None, "", fields)
        return self.render(_to_log_values(fields))

    def format_rows(self, record: logging.LogRecord, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return one line for each row; the lines differ only in the row's fields."""
        leading, trailing = _to_log_values(_leading_fields(record)), _to_log_values(_trailing_fields(record))
        return [
            self.render({**leading, **{_field_name(name): to_log_value(row[name]) for name in row}, **trailing})
            for row in rows
        ]


def _field_name(name: str) -> str:
    # logging raises KeyError for an extra field with the name of one of its own.
    return f"{name}_" if name in _RESERVED else name


def _rename_reserved(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {_field_name(name): value for name, value in event.items()}


class _LowerSkippedMessages(logging.Filter):
    """Filter that lowers Dramatiq's line for a skipped message to INFO. A skip, as for a held lease, is no problem."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Message %s was skipped.":
            return True
        record.levelno, record.levelname = logging.INFO, "INFO"
        return logging.getLogger().isEnabledFor(logging.INFO)


def configure(level: str = "INFO", form: Format | None = None) -> None:
    """Write every log line of this process, those of libraries included, to stderr.

    Replaces the handlers of the root logger. Meant for the library's own processes (the command line and
    `housekeeping.app`); importing the library does not call it.

    Parameters:
      level: The lowest level that is written.
      form: ``json`` or ``console``; by default ``console`` if stderr is a terminal.
    """
    form = form or ("console" if sys.stderr.isatty() else "json")
    handler = StderrHandler()
    # JSON escapes everything that a terminal would obey.
    handler.setFormatter(_LineFormatter(_JSON.encode if form == "json" else _console()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("dramatiq.worker.WorkerThread").addFilter(_LowerSkippedMessages())
    logging.captureWarnings(True)


def _console() -> Callable[[dict[str, Any]], str]:
    # https://no-color.org
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    renderer = structlog.dev.ConsoleRenderer(
        colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )

    def render(fields: dict[str, Any]) -> str:
        # Names of objects and refs can contain control characters, which a terminal would obey.
        shown = {printable(name): _printable(value, keep_lines=name == "exception") for name, value in fields.items()}
        return renderer(None, "", shown)

    return render


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger that writes keywords as fields: ``logger(__name__).info("event", rows=3)``.

    It uses the standard library's logging and no global configuration of structlog. In an application with its own
    logging configuration the fields arrive as ``extra``.
    """
    bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            _rename_reserved,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return bound


def log_rows(name: str, level: int, event: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log one line for each row, with its items as fields: ``logger(name).log(level, event, **row)``.

    If the `StderrHandler` is the only one, no records are created and all lines are written at once with one timestamp.
    A line costs a fifth then. From warnings on, each row has a record, because error trackers hook into
    `logging.Logger` to turn errors into reports.
    """
    standard_logger = logging.getLogger(name)
    if not standard_logger.isEnabledFor(level):
        return
    if level < logging.WARNING and _write_at_once(standard_logger, level, event, rows):
        return
    per_row = logger(name)
    for row in rows:
        per_row.log(level, event, **row)


def _write_at_once(logger: logging.Logger, level: int, event: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    handler = sole_handler(logger)
    if handler is None or not isinstance(handler.formatter, _LineFormatter):
        return False
    record = logger.makeRecord(logger.name, level, "", 0, event, (), None)
    try:
        lines = handler.formatter.format_rows(record, rows)
    except Exception:
        # One row cannot be formatted. Logged one by one, the others can.
        return False
    handler.write(lines)
    return True
