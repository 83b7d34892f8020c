"""Log lines: one JSON object a line for machines, readable lines on a terminal; both on stderr."""

from __future__ import annotations

import logging
import math
import os
import sys
import traceback
from datetime import datetime
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from housekeeping.foundation.printable import printable
from housekeeping.foundation.secrets import masked

Format = Literal["json", "console"]

#: Libraries that say at INFO what only their own developers want to know.
_QUIET: Final = ("pika", "urllib3", "botocore")
_EXTRA_ADDER: Final = structlog.stdlib.ExtraAdder()
_RESERVED: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"} - {"exc_info", "stack_info"}
_DEPTH: Final = 6  # levels of nesting that are shown; deeper ones are written as text


def presentable(value: Any, depth: int = _DEPTH) -> Any:
    """The value in a form that any JSON reader takes, with the passwords in it masked; never raises."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict) and depth:
        return {_text(key): presentable(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [presentable(each, depth - 1) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return masked(str(value))
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _present(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {str(name): presentable(value) for name, value in event.items()}


def _printable(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Names of objects and refs, and errors that quote them, reach a terminal as text it does not obey."""
    return {printable(name): _visible(value, lines=name == "exception") for name, value in event.items()}


def _visible(value: Any, *, lines: bool) -> Any:
    if isinstance(value, str):
        # A line end would let a name begin a log line of its own; a traceback has its own.
        return printable(value) if lines else printable(value).replace("\n", "\\n")
    return value


def _add_extra(wrapped: WrappedLogger, method: str, event: EventDict) -> EventDict:
    own = event["event"]
    return {**_EXTRA_ADDER(wrapped, method, event), "event": own}


def _without_clashes(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    # logging refuses, with a KeyError, an extra that is called as one of its own.
    return {f"{name}_" if name in _RESERVED else name: value for name, value in event.items()}


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment, so that lines and a progress display do not mix."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        # periodiq spaces its banner with empty lines.
        return record.msg != "" and bool(super().filter(record))

    def handleError(self, record: logging.LogRecord) -> None:
        # What a library logged with arguments that do not fit; the traceback logging would print is no log line.
        error = traceback.format_exception_only(*sys.exc_info()[:2])[-1].strip()
        logging.getLogger(__name__).error(
            "A log line could not be written", extra={"line": str(record.msg), "of": record.name, "error": error}
        )


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
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        # First, so that what a caller calls "level" or "event" does not pass for the line's own.
        _add_extra,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        # Before masking: an exception's text may quote a URL.
        structlog.processors.format_exc_info,
        _present,
        # JSON has an escape for whatever a terminal would obey.
        *([structlog.processors.JSONRenderer()] if form == "json" else [_printable, _console()]),
    ]
    handler = _Stderr()
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=rendering, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("dramatiq.worker.WorkerThread").addFilter(_SkipsAreNoWarnings())
    logging.captureWarnings(True)


def _console() -> Processor:
    # https://no-color.org
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return structlog.dev.ConsoleRenderer(
        colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )


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
    )
    return bound
