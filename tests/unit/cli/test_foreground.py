"""Foreground work, without servers."""

from __future__ import annotations

import signal
import sys
import threading
import time

from housekeeping.cli import foreground
from housekeeping.cli.foreground import Foreground


def _main_thread_is_waiting() -> bool:
    return sys._current_frames()[threading.main_thread().ident or 0].f_code.co_filename == foreground.__file__


def test_signal_that_another_thread_receives_stops_the_work() -> None:
    # The kernel may choose a thread of a library. That does not end a wait of the main thread.
    def work(stopping: threading.Event) -> bool:
        while not _main_thread_is_waiting():
            time.sleep(0.01)
        time.sleep(0.01)  # from the frame into the wait
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return stopping.wait(30)

    assert Foreground(work).result()
