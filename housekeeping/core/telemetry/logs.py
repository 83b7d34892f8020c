"""Log lines on stderr: JSON objects for machines, readable lines on a terminal."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from housekeeping.core.sanitize import mask_secrets, printable
from housekeeping.core.telemetry.log_handler import StderrHandler, written_together

if TYPE_CHECKING:
    import structlog
    from structlog.typing import EventDict, WrappedLogger

Format = Literal["json", "console"]

#: Libraries whose INFO lines concern only their own developers.
_QUIET: Final = ("pika", "urllib3", "botocore")
_JSON: Final = json.JSONEncoder(check_circular=False)  # `to_log_value` ends cycles by its depth
_RECORD_ATTRIBUTES: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
_RESERVED: Final = _RECORD_ATTRIBUTES - {"exc_info", "stack_info"}
_DEPTH: Final = 6  # levels of nesting that are kept; deeper values are written as text


def to_log_value(value: Any, depth: int = _DEPTH) -> Any:
    """Return the value as JSON types, with passwords masked; never raises."""
    if type(value) is str:
        return _masked(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict) and depth:
        return {_text(key): to_log_value(each, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        return [to_log_value(each, depth - 1) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return _masked(str(value))
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _masked(text: str) -> str:
    # A secret follows one of these characters. The search takes longer than the rest of the line.
    return mask_secrets(text) if ":" in text or "=" in text else text


def _printable(value: Any, *, keep_lines: bool) -> Any:
    if isinstance(value, str):
        # A line end in a name would start another log line. Tracebacks keep their line ends.
        return printable(value) if keep_lines else printable(value).replace("\n", "\\n")
    return value


@lru_cache(maxsize=1)  # rows that are logged together differ in none of these
def _trailing_fields(level: str, name: str, created: float) -> dict[str, Any]:
    import structlog

    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    fields = {**structlog.stdlib.add_log_level(None, level.lower(), {}), "logger": name, "timestamp": at}
    return _to_log_values(fields)


def _to_log_values(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): to_log_value(value) for name, value in fields.items()}


class _LineFormatter(logging.Formatter):
    """Formatter that writes a record as one line: event, context, fields, logger, timestamp."""

    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.render: Final = render

    def format(self, record: logging.LogRecord) -> str:
        import structlog

        event = record.getMessage()
        fields: EventDict = {"event": event}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        if record.stack_info:
            fields["stack_info"] = record.stack_info
        structlog.contextvars.merge_contextvars(None, "", fields)
        fields.update({name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES})
        # Event, level, logger and timestamp come last, so that no field of the caller replaces them.
        fields["event"] = event
        trailing = _trailing_fields(record.levelname, record.name, record.created)
        if "exc_info" in fields:
            # Before passwords are masked, because the exception's text may quote a URL.
            fields = structlog.processors.format_exc_info(None, "", {**fields, **trailing})
        return self.render({**_to_log_values(fields), **trailing})


class _JsonFormatter(_LineFormatter):
    """Formatter that writes records as JSON."""

    def __init__(self) -> None:
        super().__init__(_JSON.encode)

    def format(self, record: logging.LogRecord) -> str:
        template = _row_template.get()
        return (None if template is None else template.line(record)) or super().format(record)


class _RowTemplate:
    """JSON that the lines of many rows share, which is written once.

    Parameters:
      record: The record that those of the rows are copies of.
    """

    def __init__(self, record: logging.LogRecord) -> None:
        self._record: Final = record

    @cached_property
    def _shared(self) -> tuple[str, str, Set[str]]:
        """Return the JSON before and after a row's fields, and the names that a row's fields must not have."""
        record = self._record
        trailing = _trailing_fields(record.levelname, record.name, record.created)
        reserved = _RECORD_ATTRIBUTES | trailing.keys() | {"event"}
        context = {name: value for name, value in vars(record).items() if name not in reserved}
        leading = _to_log_values({"event": record.msg, **context})
        return _JSON.encode(leading)[:-1], _JSON.encode(trailing)[1:], reserved | context.keys()

    def line(self, record: logging.LogRecord) -> str | None:
        """Return the line of a copy; None unless it differs from the template by further fields only."""
        start, end, reserved = self._shared
        attributes = vars(self._record)
        own = {name: value for name, value in vars(record).items() if attributes.get(name, self) is not value}
        if not own or not reserved.isdisjoint(own):
            return None
        return f"{start}, {_JSON.encode(_to_log_values(own))[1:-1]}, {end}"


#: Template of the rows that this thread logs; None for all other lines.
_row_template: Final[ContextVar[_RowTemplate | None]] = ContextVar("row_template", default=None)


def _field_name(name: str) -> str:
    # logging raises KeyError for an extra field with the name of one of its own.
    return f"{name}_" if name in _RESERVED else name


def _rename_reserved(_: WrappedLogger, __: str, event: Mapping[str, Any]) -> dict[str, Any]:
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
    handler.setFormatter(_JsonFormatter() if form == "json" else _LineFormatter(_console()))
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

    @cache
    def renderer() -> structlog.dev.ConsoleRenderer:
        import structlog

        return structlog.dev.ConsoleRenderer(
            colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )

    def render(fields: dict[str, Any]) -> str:
        # Names of objects and refs can contain control characters, which a terminal would obey.
        shown = {printable(name): _printable(value, keep_lines=name == "exception") for name, value in fields.items()}
        return renderer()(None, "", shown)

    return render


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger that writes keywords as fields: ``logger(__name__).info("event", rows=3)``.

    It uses the standard library's logging and no global configuration of structlog. In an application with its own
    logging configuration the fields arrive as ``extra``.
    """
    return cast("structlog.stdlib.BoundLogger", _Logger(name))


class _Logger:
    """Logger that imports structlog with its first line, because structlog imports much more."""

    def __init__(self, name: str) -> None:
        self._name: Final = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        bound = structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                _rename_reserved,
                structlog.stdlib.render_to_log_kwargs,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        ).bind()
        found = getattr(bound, method)
        setattr(self, method, found)
        return found


def log_rows(name: str, level: int, event: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Log one line for each row, with its items as fields: ``logger(name).log(level, event, **row)``.

    Each row has a record that passes through all filters and handlers. `StderrHandler` writes their lines at once.
    """
    standard_logger = logging.getLogger(name)
    if not standard_logger.isEnabledFor(level):
        return
    import structlog

    file, line, *_ = standard_logger.findCaller(stacklevel=2)
    context = _rename_reserved(standard_logger, "", structlog.contextvars.get_contextvars())
    shared = standard_logger.makeRecord(name, level, file, line, event, (), None, extra=context)
    token = _row_template.set(_RowTemplate(shared))
    try:
        with written_together():
            for row in rows:
                # A copy costs a third of a new record.
                record = shared.__class__.__new__(shared.__class__)
                record.__dict__ = {**vars(shared), **_rename_reserved(standard_logger, "", row)}
                standard_logger.handle(record)
    finally:
        _row_template.reset(token)
