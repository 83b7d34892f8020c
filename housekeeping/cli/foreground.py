"""Work in the foreground that Ctrl-C and SIGTERM end within a second, whatever it waits for."""

from __future__ import annotations

import contextvars
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Generic, TypeVar

from dramatiq.middleware import Shutdown

from housekeeping.core.thread_interrupt import interrupt
from housekeeping.middleware.interrupts.statements import StatementInProgress, statement_of_this_thread

T = TypeVar("T")

#: Seconds for the batch in progress to commit; a batch takes a fraction of it.
_GRACE_S: Final = 0.5
#: Seconds for the rollback and the ledger row after the interrupt. With the grace and the exit: below one second.
_UNWIND_S: Final = 0.25
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Abandoned(Exception):
    """The work goes on in its thread, and the process has to end.

    Attributes:
      again: Whether a second signal asked for that; False: it has not ended in time.
      exit_code: The status that shells expect of a program that a signal ended.
    """

    def __init__(self, number: signal.Signals, *, again: bool) -> None:
        super().__init__(number.name)
        self.again = again
        self.exit_code = 128 + number


class Foreground(Generic[T]):
    """Work in a thread of its own, which the main thread stops when a signal arrives.

    Python runs signal handlers in the main thread only, and not while that waits for a statement, an object store or
    any other call into C. So the main thread does nothing but wait for the work and for signals.

    Parameters:
      work: Given the event that asks it to stop after the batch in progress.
    """

    def __init__(self, work: Callable[[threading.Event], T]) -> None:
        self._work = work
        self._stopping = threading.Event()
        # Not an event: a signal handler that sets one can wait for ever for the thread that it interrupts.
        self._news: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._statement: StatementInProgress | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    def result(self) -> T:
        """Return what the work returns, or raise what it raises.

        After the first signal the work may finish its batch. After half a second it is interrupted, and its statement
        is cancelled.

        Raises:
          Shutdown: The work was interrupted and does not return a result for that.
          Abandoned: It has not ended in time, or a second signal arrived.
        """
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run,), name="foreground", daemon=True)
        with self._hearing_signals():
            thread.start()
            number = self._news.get()
            if number is not None:
                self._stop(thread, number)
        thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        self._statement = statement_of_this_thread()
        try:
            self._result = self._work(self._stopping)
        except BaseException as error:
            self._error = error
        finally:
            self._news.put(None)

    def _stop(self, thread: threading.Thread, number: signal.Signals) -> None:
        self._stopping.set()
        if self._ended_within(_GRACE_S):
            return
        # The interrupt first, so that it is waiting when the cancelled statement returns.
        if interrupt(thread.ident or 0, Shutdown) and self._statement is not None:
            threading.Thread(target=self._statement.cancel, daemon=True).start()
        if not self._ended_within(_UNWIND_S):
            raise Abandoned(number, again=False)

    def _ended_within(self, seconds: float) -> bool:
        try:
            number = self._news.get(timeout=seconds)
        except queue.Empty:
            return False
        if number is not None:
            raise Abandoned(number, again=True)
        return True

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        def hear(number: int, frame: FrameType | None) -> None:
            self._news.put(signal.Signals(number))

        after = {number: signal.signal(number, hear) for number in _SIGNALS}
        try:
            yield
        except Abandoned as error:
            # The process is ending: nothing more to do for a further signal, or its plain effect.
            after = dict.fromkeys(_SIGNALS, signal.SIG_IGN if error.again else signal.SIG_DFL)
            raise
        finally:
            for number, handler in after.items():
                signal.signal(number, handler)
