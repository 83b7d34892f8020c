"""End of a process by a signal, also where Python ignores the first exception."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

#: An orderly end takes less than this in most cases, and a supervisor waits ten seconds and more.
_AGAIN_S: Final = 2.0


def exit_on(*numbers: int, again_s: float = _AGAIN_S) -> Callable[[], None]:
    """Raise SystemExit(0) in the main thread on these signals, repeatedly until the returned function is called.

    Python ignores an exception that a signal's handler raises within a destructor, so once is not enough.

    Parameters:
      again_s: Time until the next exception, in seconds.
    """
    main, ended, repeating = threading.main_thread(), threading.Event(), threading.Event()

    def repeat(number: int) -> None:
        while not ended.wait(again_s) and main.ident is not None:
            signal.pthread_kill(main.ident, number)

    def stop(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            return
        if not repeating.is_set():
            repeating.set()
            # `Thread.start` takes a lock, which the interrupted code may hold.
            _thread.start_new_thread(repeat, (number,))
        raise SystemExit(0)

    for number in numbers:
        signal.signal(number, stop)
    return ended.set
