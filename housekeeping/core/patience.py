"""Patience of interactive commands and pages: they wait two seconds for a server, and ask a silent one only once.

A worker waits longer, as nobody looks at it, and what it has begun would be lost. A person who asks why nothing runs
needs the answer now, most of all while a server hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

#: Seconds that an impatient command or page waits for a server. libpq waits no shorter for a connection.
PATIENCE_S: Final = 2
#: Seconds after which a failed attempt was a timeout. A server that is down refuses at once.
_WAITED_S: Final = 0.5

#: Server -> the error of the attempt that it has not answered, within `impatient`.
Silent = dict[str, Exception]
_silent: Final[ContextVar[Silent | None]] = ContextVar("silent_servers", default=None)


@contextmanager
def impatient() -> Iterator[None]:
    """Wait at most two seconds for each server in the block, and do not ask a server again that has not answered."""
    before = _silent.set({})
    try:
        yield
    finally:
        _silent.reset(before)


def silent_servers() -> Silent | None:
    """Return the servers that have not answered; None if the caller is patient."""
    return _silent.get()


@contextmanager
def asking(server: str, errors: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Ask a server in the block; if it has not answered an impatient caller before, raise that error again instead.

    Parameters:
      errors: What an attempt raises that the server has not answered.
    """
    silent = _silent.get()
    if silent is None:
        yield
        return
    if server in silent:
        raise silent[server]
    began = time.monotonic()
    try:
        yield
    except errors as error:
        if time.monotonic() - began >= _WAITED_S:
            silent[server] = error
        raise
