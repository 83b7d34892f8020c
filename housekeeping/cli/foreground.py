"""Foreground work that Ctrl-C and SIGTERM end within a second, even if its thread hangs in a blocking call."""

from __future__ import annotations

import contextvars
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Final, Generic, NoReturn, TypeVar

from dramatiq.middleware import Shutdown
from peewee import PeeweeException

from housekeeping.cli.formatting import ProgressLine, notify, progress
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.thread_interrupt import interrupt, run_interruptibly
from housekeeping.database.connection import database
from housekeeping.middleware.interrupts.statements import StatementInProgress, statement_of_this_thread
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import in_order, initial_counts
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.runs import Closed

T = TypeVar("T")

#: Seconds for the current batch to commit. A batch usually takes a fraction of that.
_GRACE_S: Final = 0.5
#: Seconds for the rollback and the ledger row after the interrupt. Grace, unwinding and exit take below one second.
_UNWIND_S: Final = 0.25
#: Seconds to close the ledger row, which waits for a pending COMMIT of the run.
_LONGEST_S: Final = 0.5
#: Seconds between looks at signals that did not end the wait. A tenth of the second in which the process ends.
_SIGNAL_CHECK_S: Final = 0.1
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Abandoned(Exception):
    """Raised while the work still runs in its thread and the process has to end.

    Attributes:
      second_signal: Whether a second signal arrived. False means that the work exceeded its time.
      exit_code: Exit status of a program that a signal ended, by shell convention.
    """

    def __init__(self, number: signal.Signals, *, second_signal: bool) -> None:
        super().__init__(number.name)
        self.second_signal = second_signal
        self.exit_code = 128 + number


class Foreground(Generic[T]):
    """Runs work in a thread that the main thread stops when a signal arrives.

    Python runs signal handlers only in the main thread, and not during a call into C such as an SQL statement. So the
    main thread only waits for the work and for signals.

    Parameters:
      work: Called with an event. When the event is set, the work stops after its current batch.
    """

    def __init__(self, work: Callable[[threading.Event], T]) -> None:
        self._work = work
        self._stopping = threading.Event()
        # Not an Event: a signal handler that sets one can deadlock with the thread that it interrupts.
        self._messages: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._statement: StatementInProgress | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    def result(self) -> T:
        """Return the work's result, or raise its exception.

        After a signal the work may finish its batch. After half a second it is interrupted and its statement canceled.

        Raises:
          Shutdown: The work was interrupted and returned no result.
          Abandoned: The work did not end in time, or a second signal arrived.
        """
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run,), name="foreground", daemon=True)
        with self._catch_signals():
            thread.start()
            number = self._next_message()
            if number is not None:
                self._stop(thread, number)
        thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _next_message(self) -> signal.Signals | None:
        while True:
            # The kernel may give the signal to a thread of a library, or just before the wait begins. It ends no wait
            # then, and its handler runs when the main thread is back in Python.
            with suppress(queue.Empty):
                return self._messages.get(timeout=_SIGNAL_CHECK_S)

    def _run(self) -> None:
        self._statement = statement_of_this_thread()
        try:
            self._result = self._work(self._stopping)
        except BaseException as error:
            self._error = error
        finally:
            self._messages.put(None)

    def _stop(self, thread: threading.Thread, number: signal.Signals) -> None:
        self._stopping.set()
        if self._ended_within(_GRACE_S):
            return
        # Interrupt first, so that the exception is pending when the canceled statement returns.
        if interrupt(thread.ident or 0, Shutdown) and self._statement is not None:
            threading.Thread(target=self._statement.cancel, daemon=True).start()
        if not self._ended_within(_UNWIND_S):
            raise Abandoned(number, second_signal=False)

    def _ended_within(self, seconds: float) -> bool:
        try:
            number = self._messages.get(timeout=seconds)
        except queue.Empty:
            return False
        if number is not None:
            raise Abandoned(number, second_signal=True)
        return True

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._messages.put(signal.Signals(number))

        handlers = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        except Abandoned as error:
            # The process is ending. A further signal is ignored, or has its default effect.
            handlers = dict.fromkeys(_SIGNALS, signal.SIG_IGN if error.second_signal else signal.SIG_DFL)
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def count_for_dry_run(name: str, count: Callable[..., T], *args: Any, **options: Any) -> T:
    """Count what a run would do, with a progress line. Ctrl-C ends the process with 130."""
    try:
        with progress(f"{name}: counting"):
            return Foreground(lambda stopping: run_interruptibly(count, *args, **options)).result()
    except (Abandoned, Shutdown):
        end_process(130, "interrupted")


#: Runs a sweep, given its progress line, an event that stops it after a batch, and a function that takes the run's id.
Work = Callable[[ProgressLine, threading.Event, Callable[[int], None]], RunResult]


def run_with_progress(sweep: Sweep, work: Work, *, continued_by: str) -> tuple[RunResult, bool]:
    """Run a sweep with a progress line; return the result, and whether the run's thread has ended.

    Parameters:
      continued_by: What continues the run if its end cannot be recorded, such as ``a run after a minute``.
    """
    started_at = datetime.now(UTC)
    run_ids: list[int] = []
    try:
        with progress(f"{sweep.name}: starting") as line:
            return Foreground(lambda stopping: work(line, stopping, run_ids.append)).result(), True
    except Abandoned as error:
        if error.second_signal:
            end_process(error.exit_code, f"ended at once; committed batches stay, and {continued_by} continues")
        result = _close_run(sweep, run_ids[0] if run_ids else None, started_at)
        if result is None:
            line_of_end = f"interrupted; the run's end could not be recorded, but {continued_by} continues"
            end_process(error.exit_code, line_of_end)
        return result, False


def _close_run(sweep: Sweep, run_id: int | None, started_at: datetime) -> RunResult | None:
    """Record the end of a run whose thread still hangs, and return its result; `None` if that takes too long.

    Afterward the run can no longer commit. The next run takes over its lease.
    """
    closed = Closed("partial", "shutdown", {}) if run_id is None else _closed(run_id, sweep.database)
    if closed is None:
        return None
    return RunResult(
        sweep.name,
        closed.outcome,
        closed.reason,
        run_id,
        started_at,
        (datetime.now(UTC) - started_at).total_seconds(),
        in_order(sweep, {**initial_counts(sweep), **closed.counts}),
    )


def _closed(run_id: int, database_name: str) -> Closed | None:
    results: list[Closed] = []

    def close() -> None:
        try:
            with database.using(database_name), database.atomic():
                results.append(runs.fail(run_id, "partial", "shutdown", None, {}))
        except (PeeweeException, HousekeepingError):
            return  # the next run marks it as lost

    # In a thread with its own connection, which may hang as well.
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    return results[0] if results and not thread.is_alive() else None


def end_process(exit_code: int, line: str | None = None) -> NoReturn:
    """Exit at once after printing a line. Hanging threads would delay a normal exit."""
    if line is not None:
        notify(line)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)
