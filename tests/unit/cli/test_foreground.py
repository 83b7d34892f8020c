"""Foreground work, without servers."""

from __future__ import annotations

import signal
import threading
import time

from tests.internals.cli import in_foreground
from tests.internals.core import thread_interrupt


def _main_thread_is_waiting() -> bool:
    frame = thread_interrupt.frame_of(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code is in_foreground.__code__


def test_signal_that_another_thread_receives_reaches_the_main_thread() -> None:
    # The kernel may choose a thread of a library. That does not end a wait of the main thread.
    stopping = threading.Event()

    def work() -> bool:
        while not _main_thread_is_waiting():
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return stopping.wait(30)

    assert in_foreground(work, lambda number: stopping.set())


def test_handlers_of_signals_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)

    in_foreground(lambda: None, lambda number: None)

    assert signal.getsignal(signal.SIGTERM) is before
