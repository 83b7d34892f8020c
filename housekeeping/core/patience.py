"""Short timeouts for interactive commands and pages: two seconds per server, and one attempt at a silent one.

A worker waits longer, because a timeout would discard the work it has begun. An operator who asks why nothing runs
needs the answer now, above all while a server hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

#: Seconds that an interactive command or page waits for a server. libpq has no shorter timeout for connecting.
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
    """Return the servers that have not answered; None outside of `impatient`."""
    return _silent.get()


@contextmanager
def asking(server: str, errors: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Ask a server in the block. Within `impatient`, raise the earlier error again if it has timed out before.

    Parameters:
      errors: The errors that an attempt raises if the server does not answer.
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
