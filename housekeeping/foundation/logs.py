"""Log lines: one JSON object a line for machines, readable lines on a terminal; both on stderr."""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from housekeeping.foundation.secrets import masked

Format = Literal["json", "console"]

#: Libraries that say at INFO what only their own developers want to know.
_QUIET: Final = ("pika", "urllib3", "botocore")


def _mask(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = masked(value)
    return event


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
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "json":
        rendering += [structlog.processors.format_exc_info, _mask, structlog.processors.JSONRenderer(default=str)]
    else:
        rendering += [_mask, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=rendering, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


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
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return bound
