"""Logging handler that writes to stderr, one line or many lines at a time."""

from __future__ import annotations

import logging
import select
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TextIO

#: Bytes that a pipe writes at once. Longer writes can be mixed with lines of another process on the same pipe.
_ATOMIC_WRITE: Final = select.PIPE_BUF
#: Lines that this thread collects by their handler; None while each line is written at once.
_together: Final[ContextVar[dict[StderrHandler, list[str]] | None]] = ContextVar("together", default=None)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stderr`, so that lines and a progress display do not mix."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        # periodiq surrounds its banner with empty lines.
        return record.msg != "" and bool(super().filter(record))

    def handle(self, record: logging.LogRecord) -> bool:
        # The base class holds the lock here. Only `write` needs it.
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
        together = _together.get()
        if together is None:
            self.write([line])
        else:
            together.setdefault(self, []).append(line)

    def write(self, lines: Iterable[str]) -> None:
        """Write lines in few chunks, none of them split; never raises. Lines that stderr does not accept are lost."""
        assert self.lock is not None
        # Not `acquire` and `release`: an interrupt between `acquire` and `try` would leave it locked forever.
        with self.lock:
            try:
                for chunk in _chunks(lines):
                    self.stream.write(chunk)
                self.stream.flush()
            except Exception:
                # A full disk or a closed pipe cannot be reported anywhere else, and the work continues.
                return

    def handleError(self, record: logging.LogRecord) -> None:
        # A library logged with arguments that do not fit. logging would print a traceback, which is no log line.
        error = traceback.format_exception_only(*sys.exc_info()[:2])[-1].strip()
        # A message that is not a string can fail again when it is converted.
        line = record.msg if isinstance(record.msg, str) else f"<{type(record.msg).__name__}>"
        logging.getLogger("housekeeping.core.telemetry.logs").error(
            "A log line could not be written", extra={"line": line, "of": record.name, "error": error}
        )


@contextmanager
def written_together() -> Iterator[None]:
    """Collect the lines that this thread logs within the block, and write them at its end."""
    lines: dict[StderrHandler, list[str]] = {}
    token = _together.set(lines)
    try:
        yield
    finally:
        _together.reset(token)
        for handler, each in lines.items():
            handler.write(each)


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    chunk: list[str] = []
    length = 0
    for line in lines:
        size = len(line.encode(errors="replace")) + 1
        if chunk and length + size > _ATOMIC_WRITE:
            yield "".join(chunk)
            chunk, length = [], 0
        chunk.append(f"{line}\n")
        length += size
    if chunk:
        yield "".join(chunk)
