"""The handler behind the log lines: stderr, a line or many lines at a time."""

from __future__ import annotations

import logging
import select
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Final, TextIO

#: Bytes that a pipe takes whole: more could be torn apart by the lines of another process on the same one.
_WHOLE: Final = select.PIPE_BUF
#: What a line passes through on its way from a logger to its handlers.
_WAY: Final = ("_log", "makeRecord", "handle", "callHandlers")


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment, so that lines and a progress display do not mix."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        # periodiq spaces its banner with empty lines.
        return record.msg != "" and bool(super().filter(record))

    def handle(self, record: logging.LogRecord) -> bool:
        # Not under the lock, as the base class: only `write` needs it.
        passed = self.filter(record)
        if passed:
            self.emit(record)
        return passed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self.write([line])

    def write(self, lines: Iterable[str]) -> None:
        """Write lines in few pieces, none of them broken in two; what stderr refuses is lost, and never raises."""
        assert self.lock is not None
        # Not `acquire` and `release`: an interrupt between one of them and the `try` leaves the lock taken for ever.
        with self.lock:
            try:
                for piece in _pieces(lines):
                    self.stream.write(piece)
                self.stream.flush()
            except Exception:
                # A full disk, a reader that is gone: there is no other place to say so, and the work goes on.
                return

    def handleError(self, record: logging.LogRecord) -> None:
        # What a library logged with arguments that do not fit; the traceback logging would print is no log line.
        error = traceback.format_exception_only(*sys.exc_info()[:2])[-1].strip()
        # What is no text may fail again at being made one, in the midst of whoever logged it.
        line = record.msg if isinstance(record.msg, str) else f"<{type(record.msg).__name__}>"
        logging.getLogger("housekeeping.core.telemetry.logs").error(
            "A log line could not be written", extra={"line": line, "of": record.name, "error": error}
        )


def sole_handler(logger: logging.Logger) -> StderrHandler | None:
    """Our handler, where writing a line is all that happens to one of the logger's; null where others see it, too."""
    if logger.filters or logging.getLogRecordFactory() is not logging.LogRecord or not _is_as_it_was(logger):
        return None
    match list(_handlers(logger)):
        case [StderrHandler() as handler] if not handler.filters and handler.level == logging.NOTSET:
            return handler
    return None


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    each: logging.Logger | None = logger
    while each is not None:
        yield from each.handlers
        each = each.parent if each.propagate else None


def _is_as_it_was(logger: logging.Logger) -> bool:
    # Sentry's client, for one, puts a function of its own in the place of one of these, and makes errors its events.
    way = [getattr(type(logger), name) for name in _WAY]
    return all(getattr(step, "__globals__", None) is vars(logging) for step in way)


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    piece: list[str] = []
    length = 0
    for line in lines:
        size = len(line.encode(errors="replace")) + 1
        if piece and length + size > _WHOLE:
            yield "".join(piece)
            piece, length = [], 0
        piece.append(f"{line}\n")
        length += size
    if piece:
        yield "".join(piece)
