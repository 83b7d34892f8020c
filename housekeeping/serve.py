"""Process of an installation without Redis, which sends the ticks, runs the sweeps and evaluates the alerts.

Several processes, also on several machines, share the work through the table of ticks (`ledger.ticks`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from dramatiq.middleware import Shutdown
from dramatiq.middleware.time_limit import TimeLimitExceeded
from dramatiq.threading import Interrupt
from peewee import PeeweeException

from housekeeping.brokers.dramatiq_internals import Requeue
from housekeeping.core import telemetry
from housekeeping.core.cron import Cron
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError
from housekeeping.core.interrupts import interrupt, run_interruptibly
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.pings import INSTALLATION, pings
from housekeeping.core.settings import MAIN, Settings
from housekeeping.core.telemetry import MessageContext, current_message
from housekeeping.database.connection import close_databases, database
from housekeeping.database.errors import is_unavailable
from housekeeping.database.queries import database_now
from housekeeping.engine.alerts import declare_metrics
from housekeeping.engine.registry import raise_for_retry, time_limit_of
from housekeeping.engine.run import classify_error, run_sweep
from housekeeping.insight.webhook import InstallationWatch
from housekeeping.ledger import ticks
from housekeeping.ledger.processes import PostgresHeartbeats
from housekeeping.ledger.ticks import TakenTick
from housekeeping.middleware.interrupts import Inside
from housekeeping.middleware.observe import AWAKE, Sender, export_zeros, long_busy
from housekeeping.middleware.retries import delay_before, next_delay
from housekeeping.middleware.schedule import SetupCheck
from housekeeping.sweeps.declaration import Sweep

logger = named_logger(__name__)

#: Interval of the check for due ticks, and so the maximum delay of a tick if a thread is free.
_POLL_S: Final = 1.0
#: Delay before ticks that could not be sent are sent again.
_AGAIN_S: Final = 10.0
#: Time for interrupted runs to end after the grace period.
_INTERRUPTED_S: Final = 10.0
_ATTEMPTS_AT_END: Final = 3  # to store the results of the last ticks at shutdown


@dataclass(slots=True, eq=False)
class _Delivery:
    """A tick that a thread of this process runs.

    Attributes:
      inside: Its thread, once it has begun.
    """

    tick: TakenTick
    stopping: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    inside: Inside | None = None

    def interrupt(self, kind: type[Interrupt]) -> None:
        """Interrupt the run, and cancel its current statement. Only a shutdown also cancels that of an earlier one."""
        inside = self.inside
        if inside is None:
            return
        if interrupt(inside.thread_id, kind):
            logger.warning("Run interrupted", worker=self.tick.worker, interrupt=kind.__name__)
        elif kind is not Shutdown:
            return
        # In a separate thread, because the server may not answer.
        threading.Thread(target=inside.cancel, args=(kind,), daemon=True).start()


@dataclass(slots=True, eq=False)
class _Sending:
    """How far the ticks of one database's workers were sent.

    Attributes:
      minute: Last minute whose ticks were sent, by the clock of the database ``main``.
      again_at: Time of the next attempt after a failure.
      unsent_at: When the first of the ticks could not be sent; None if all were.
      began: When the last attempt began.
      thread: Its thread, unless the database is ``main``. So a database that does not answer delays no other one.
    """

    sweeps: list[Sweep] = field(default_factory=list)
    minute: datetime | None = None
    again_at: float = 0.0
    unsent_at: float | None = None
    began: float = 0.0
    thread: threading.Thread | None = None

    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Service:
    """Scheduler and worker of an installation without Redis; runs sweeps in threads of this process.

    Parameters:
      sweeps: All workers. Only those that are enabled and have a schedule run.
      threads: Maximum number of simultaneous runs.
    """

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep], threads: int) -> None:
        scheduled = {name: sweep for name, sweep in sweeps.items() if sweep.enabled and sweep.schedule}
        self._sweeps = scheduled
        self._crons = {name: Cron(str(sweep.schedule), settings.timezone) for name, sweep in scheduled.items()}
        self._catch_up = settings.catch_up == "latest"
        self._grace_s = settings.grace_s
        self._threads = threads
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._busy: set[_Delivery] = set()
        #: Results of ended runs, not stored in the table of ticks yet: tick, delay until the next attempt, has failed.
        self._ended: deque[tuple[TakenTick, timedelta | None, bool]] = deque()
        self._sendings = {MAIN: _Sending()}
        for sweep in scheduled.values():
            self._sendings.setdefault(sweep.database, _Sending()).sweeps.append(sweep)
        self._woke_at = time.monotonic()
        self._is_set_up = SetupCheck()
        for name, cron in self._crons.items():
            export_zeros(name)
            for counter in (telemetry.TICKS_SENT, telemetry.TICKS_MISSED):
                counter.add(name, number=0)
            declare_metrics(scheduled[name], cron)
        store, watch = PostgresHeartbeats(), InstallationWatch(settings, sweeps)
        queues = sorted({sweep.queue for sweep in scheduled.values()})
        # Two heartbeats, because the process is a scheduler and a worker.
        self._scheduler = Sender(store, "scheduler", lambda: {} if self._is_awake() else None, watch.look)
        self._worker = Sender(store, "worker", lambda: {"queues": queues, "threads": threads, **self._describe_busy()})

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the enabled workers with a schedule."""
        return tuple(self._sweeps)

    def run(self) -> None:
        """Send and run ticks until `stop` is called; then end the runs after their batches, within the grace period."""
        self._scheduler.start()
        self._worker.start()
        try:
            while not self._stopping.is_set():
                self._look()
                self._changed.wait(_POLL_S)
                self._changed.clear()
        finally:
            self._end_runs()
            for each in self._sendings.values():
                if each.thread is not None:
                    each.thread.join(_POLL_S)
            self._scheduler.stop()
            self._worker.stop()  # its last heartbeat releases the ticks that have not ended
            close_databases()

    def stop(self) -> None:
        """Make `run` return. Callable from a signal handler."""
        self._stopping.set()
        self._changed.set()

    def _describe_busy(self) -> dict[str, Any]:
        busy = {
            each.inside.thread_id: (each.tick.worker, each.tick.message_id, each.began)
            for each in tuple(self._busy)
            if each.inside is not None
        }
        return {"busy": len(busy), "busy_threads": long_busy(busy)}

    def _is_awake(self) -> bool:
        return time.monotonic() - self._woke_at < AWAKE.total_seconds()

    def _look(self) -> None:
        """Send the ticks of a new minute and start due ticks; log errors of databases."""
        self._woke_at = time.monotonic()
        self._interrupt_late()
        try:
            self._write_ends()
            with database.using(MAIN):
                now = database_now()
            for place, sending in self._sendings.items():
                self._begin_sending(place, sending, now)
            self._start_due()
        except Exception as error:
            self._note_unsent(error, *self._sendings.values())

    def _begin_sending(self, place: str, sending: _Sending, now: datetime) -> None:
        """Send the ticks of a new minute; in a separate thread unless their database is ``main``."""
        if sending.is_running():
            if sending.unsent_at is None and time.monotonic() - sending.began > AWAKE.total_seconds():
                self._note_unsent(DatabaseUnavailable(f"the database {place!r} does not answer"), sending)
            return
        if now.replace(second=0, microsecond=0) == sending.minute or time.monotonic() < sending.again_at:
            return
        sending.began = time.monotonic()
        if place == MAIN:
            ticks.forget_removed(self._sweeps)
            self._send(sending, now, self._start_due)  # the ticks of a thousand workers take a while
        elif sending.sweeps:
            sending.thread = threading.Thread(
                target=self._send_beside, args=(sending, now), name=f"ticks of {place}", daemon=True
            )
            sending.thread.start()

    def _send_beside(self, sending: _Sending, now: datetime) -> None:
        try:
            self._send(sending, now, lambda: None)
        except Exception as error:
            self._note_unsent(error, sending)
        finally:
            with suppress(PeeweeException):
                close_databases()

    def _note_unsent(self, error: Exception, *sendings: _Sending) -> None:
        """Schedule the next attempt to send ticks, and log the first error."""
        first = [each for each in sendings if each.unsent_at is None]
        for each in sendings:
            each.again_at = time.monotonic() + _AGAIN_S
        for each in first:
            each.unsent_at = time.monotonic()
        if first:
            logger.error("Ticks could not be checked; retrying", error=error_line(classify_error(error)))
            pings.send(INSTALLATION, failed=True)
        close_databases()  # after a failover, a connection may lead to a standby

    def _send(self, sending: _Sending, now: datetime, after_each: Callable[[], None]) -> None:
        """Send the latest tick of each worker of a database unless it was sent."""
        last, errors = ticks.last_sent(), list[Exception]()
        for sweep in sending.sweeps:
            if self._stopping.is_set():
                return
            if last.get(sweep.name) == self._crons[sweep.name].latest(now):
                continue
            try:
                self._send_latest(sweep, now, sending.unsent_at)
                after_each()
            except Exception as error:  # an application's check of its setup may raise anything
                errors.append(error)
                if is_unavailable(error):
                    break  # wait only once for a database that does not answer
        if errors:
            self._note_unsent(errors[0], sending)
            return
        if sending.unsent_at is not None:
            logger.info("Ticks are sent again")
        sending.minute, sending.unsent_at = now.replace(second=0, microsecond=0), None
        if all(each.unsent_at is None for each in self._sendings.values()):
            pings.send(INSTALLATION, failed=False)

    def _send_latest(self, sweep: Sweep, now: datetime, unsent_at: float | None) -> None:
        name, cron = sweep.name, self._crons[sweep.name]
        if not self._is_set_up(sweep):
            ticks.remember(name, cron.latest(now))  # its schedule begins once it is set up
            return
        # By the database's clock, like the ticks.
        unsent_since = None if unsent_at is None else now - timedelta(seconds=time.monotonic() - unsent_at)
        sent = ticks.send(name, cron, now, place=sweep.database, catch_up=self._catch_up, unsent_since=unsent_since)
        if sent is None:
            return
        if sent.missed:
            telemetry.report_ticks_missed(name, sent.tick, sent.missed, sent.missed_reason)
        if sent.reason is not None:
            telemetry.report_tick_skipped(name, sent.tick, sent.reason)
        if sent.is_sent:
            telemetry.report_tick_sent(name)

    def _start_due(self) -> None:
        """Start due ticks in the free threads."""
        free = self._threads - len(self._busy)
        if free <= 0 or self._stopping.is_set():
            return
        # In this order, because a run that ends gets into the second one before it leaves the first one.
        running = [each.tick.message_id for each in tuple(self._busy)]
        running += [tick.message_id for tick, *_ in tuple(self._ended)]
        for tick in ticks.take(self._worker.id, self._sweeps, free, running):
            delivery = _Delivery(tick)
            self._busy.add(delivery)
            threading.Thread(target=self._deliver, args=(delivery,), name=f"run {tick.worker}", daemon=True).start()

    def _deliver(self, delivery: _Delivery) -> None:
        """Run the sweep of a tick; retry it like a message of a worker process."""
        tick, sweep = delivery.tick, self._sweeps[delivery.tick.worker]
        again_in: timedelta | None = None
        failed = False
        try:
            current_message.set(MessageContext(tick.message_id, "schedule", tick.tick, delivery.stopping, sweep.name))
            delivery.inside = Inside()
            run_interruptibly(delivery.inside.call, lambda: raise_for_retry(sweep, run_sweep(sweep)))
        except Requeue as requeued:
            again_in = timedelta(milliseconds=requeued.delay or 0)
        except Shutdown:
            again_in = timedelta()
        except BaseException as error:
            failed, again_in = True, self._delay_before_retry(sweep, tick, error)
        finally:
            current_message.set(None)
            with suppress(PeeweeException):
                close_databases()
            self._ended.append((tick, again_in, failed))
            self._busy.discard(delivery)
            self._changed.set()

    def _delay_before_retry(self, sweep: Sweep, tick: TakenTick, error: BaseException) -> timedelta | None:
        options = {"periodic": self._crons[sweep.name], **sweep.actor}
        try:
            delay = next_delay(options, tick.retries, error)
        except Exception as wrong:  # such as in the application's `retry_when`
            delay, error = None, wrong
        if delay is not None:
            telemetry.RETRIES.add(sweep.name)
            return delay
        try:
            with database.using(sweep.database):
                ticks.record_failed(sweep.name, tick.tick, tick.message_id, error_line(error))
        except Exception:
            return delay_before(tick.retries)  # the tick has no outcome yet
        logger.error("Tick failed, no retries left", worker=sweep.name, tick=tick.tick, error=error_line(error))
        return None

    def _write_ends(self) -> None:
        while self._ended:
            tick, again_in, failed = self._ended[0]
            ticks.end(self._worker.id, tick, again_in, failed=failed)
            self._ended.popleft()

    def _interrupt_late(self) -> None:
        for delivery in tuple(self._busy):
            limit = time_limit_of(self._sweeps[delivery.tick.worker])
            if time.monotonic() - delivery.began > limit.total_seconds():
                delivery.interrupt(TimeLimitExceeded)

    def _end_runs(self) -> None:
        for delivery in tuple(self._busy):
            delivery.stopping.set()
        self._wait(self._grace_s)
        for delivery in tuple(self._busy):
            delivery.interrupt(Shutdown)
        self._wait(_INTERRUPTED_S)
        for _ in range(_ATTEMPTS_AT_END):
            try:
                self._write_ends()
                return
            except (HousekeepingError, PeeweeException) as error:
                # Their ticks run again once the heartbeats of this process are too old, and find their work done.
                logger.warning("Results of ticks could not be stored", error=error_line(error))
                close_databases()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._busy and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)
            self._changed.clear()
