"""At most one live message for the same work: duplicates are dropped where they are sent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware
from dramatiq.errors import BrokerConnectionError

from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.redis_client import insist
from housekeeping.foundation.renewal import Kept, elapsed, renewals
from housekeeping.foundation.steering import PutBack, Skip, SkipEnqueue, StoreUnavailable, failing_the_message
from housekeeping.middleware.arguments import UnusableArguments, digest
from housekeeping.middleware.deduplication_keys import DeduplicationKeys, State
from housekeeping.middleware.deduplication_options import (
    CLAIMED,
    SECOND_DELIVERY,
    STANDING,
    WHEN_DUE,
    Terms,
    awaited_by,
    check_options,
    never_drop,
    terms_of,
    waited_for,
)

logger = named_logger(__name__)

#: A key whose message never reached the queue (the process died in between) blocks nothing for longer.
RESERVED_FOR: Final = timedelta(seconds=5)
_TURN: Final = timedelta(seconds=5)  # how long a message waits that finds its key in use by a running one


@dataclass(slots=True)
class _Run:
    """The delivery that this thread is at work on."""

    message_id: str
    key: str
    token: str
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class _Reservation:
    message_id: str
    key: str
    ttl: timedelta


class _OfThread(threading.local):
    """What a thread knows of the message in its hands, from one hook to the next."""

    def __init__(self) -> None:
        self.run: _Run | None = None
        self.reservation: _Reservation | None = None
        self.requeued: deque[str] = deque(maxlen=16)  # put back, retried or due; of many, the last ones
        self.awaited: frozenset[str] = frozenset()


class Deduplication(Middleware):
    """Middleware that keeps at most one message of a key alive.

    An idempotent actor opts in to more than the default, ``until_executing``::

        @dramatiq.actor(idempotent=True, deduplicate="until_executed", deduplication={"ttl": timedelta(hours=6)})
        def sweep(project_id: int) -> None: ...

    ``until_executing``: at most one waits to start. ``until_executed``: at most one waits, runs, or waits for a
    retry. A dropped message is returned to its sender marked with ``options["duplicate_of"]``. With
    ``"if_deduplicated": "reschedule_once"`` a duplicate that arrives while the holder runs makes one more run.
    A key belongs to a message; nobody else frees or renews it.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self.keys = DeduplicationKeys(client, namespace)
        self._thread = _OfThread()

    @property
    def actor_options(self) -> set[str]:
        return {"deduplicate", "deduplication"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        check_options(actor)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        terms = terms_of(actor) if actor else None
        if actor is None or terms is None:
            return
        if message.message_id in self._thread.awaited:
            never_drop(message)
        run = self._run_of(message)
        ttl = terms.ttl + timedelta(milliseconds=delay or 0)
        if STANDING in message.options or run is not None:
            with _letting_pass(message):
                self._go_on(key_of(actor, message, terms), message, terms, run, delay, ttl)
            self._thread.requeued.append(message.message_id)
        elif delay is not None and not terms.including_scheduled:
            message.options[STANDING] = WHEN_DUE
        else:
            key = key_of(actor, message, terms)
            if self._claim(key, message, terms, "reserved", RESERVED_FOR):
                self._thread.reservation = _Reservation(message.message_id, key, ttl)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        reservation, self._thread.reservation = self._thread.reservation, None
        if reservation is not None and reservation.message_id == message.message_id:
            try:
                self.keys.confirm(reservation.key, message.message_id, reservation.ttl)
            except RedisUnavailable as error:
                logger.warning("Key may be free before its message has ended", key=reservation.key, error=str(error))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self._forget_run()  # what an interrupted hook may have left
        self._thread.requeued.clear()
        self._thread.awaited = awaited_by(message)
        actor = broker.get_actor(message.actor_name)
        terms = terms_of(actor)
        if terms is None:
            return
        with failing_the_message():
            # Known before it is asked for: should the answer get lost, the message's retry holds on to the key.
            run = _Run(message.message_id, key_of(actor, message, terms), uuid4().hex)
            self._thread.run, since = run, elapsed()
            state = self.keys.start(run.key, run.message_id, run.token, terms.ttl if terms.until_executed else None)
            if state == "ours" and terms.until_executed:
                run.kept = renewals.keep(
                    f"key {run.key}", lambda: self.keys.renew(run.key, run.token, terms.ttl), terms.ttl, since
                )
        if state == "ours" or waited_for(message):
            return
        self._forget_run()
        if state == "waiting":
            logger.info("Message yields to the one that waits with its key", job_status="deduplicated")
            raise Skip("deduplicated")
        raise PutBack(f"{message.message_id} waits for the run that holds its key", _TURN)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Free the key, however the message ended, unless it was enqueued again and holds the key on."""
        run = self._run_of(message)
        self._forget_run()
        requeued = message.message_id in self._thread.requeued
        self._thread.requeued.clear()
        actor = broker.get_actor(message.actor_name)
        terms = terms_of(actor)
        if terms is None or requeued or (run is not None and not terms.until_executed):
            return
        token = run.token if run is not None else ""
        try:
            key = run.key if run is not None else key_of(actor, message, terms)
            if insist(lambda: self.keys.release(key, message.message_id, token)):
                # Not acknowledged yet, nor recorded as completed: should the process die here, it runs once more.
                insist(lambda: _send_again(actor, message))
        except (RedisUnavailable, UnusableArguments) as error:
            logger.warning("Key stays until its ttl is over", error=str(error))

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self.after_process_message(broker, message)

    def _go_on(
        self, key: str, message: Message[Any], terms: Terms, run: _Run | None, delay: int | None, ttl: timedelta
    ) -> None:
        """What becomes of the key of a message that the broker has had before: put back, retried, or due."""
        standing = message.options.get(STANDING)
        if run is None and standing == WHEN_DUE and delay is None:
            self._claim(key, message, terms, "waiting", ttl)
        elif terms.until_executed:
            if run is not None or delay is not None:
                self.keys.hold_on(key, message.message_id, run.token if run else "", ttl)
                message.options[STANDING] = CLAIMED
        elif run is not None and delay is None:
            self._claim(key, message, terms, "waiting", ttl)
        elif delay is not None and (run is not None or standing != SECOND_DELIVERY):
            if run is None:
                self.keys.release(key, message.message_id, "")
            message.options[STANDING] = WHEN_DUE

    def _claim(self, key: str, message: Message[Any], terms: Terms, state: State, ttl: timedelta) -> bool:
        with failing_the_message():
            holder = self.keys.claim(key, message.message_id, state, ttl, again=terms.reschedule_once)
        if holder and not waited_for(message):
            raise SkipEnqueue("deduplicated", duplicate_of=holder)
        message.options[STANDING] = CLAIMED
        return not holder

    def _forget_run(self) -> None:
        run, self._thread.run = self._thread.run, None
        if run is not None and run.kept is not None:
            renewals.stop(run.kept)

    def _run_of(self, message: Message[Any] | MessageProxy) -> _Run | None:
        run = self._thread.run
        return run if run is not None and run.message_id == message.message_id else None


@contextmanager
def _letting_pass(message: Message[Any]) -> Iterator[None]:
    """Let a message that the broker has had before go on without its key, should that not be had.

    Where it starts the key is asked for again. An error here would lose it: Dramatiq acknowledges the
    message of a retry that it could not enqueue.
    """
    try:
        yield
    except SkipEnqueue:
        raise
    except Exception as error:
        logger.warning("Message goes on without its key", message_id=message.message_id, error=str(error))


def _send_again(actor: Actor[..., Any], message: MessageProxy) -> None:
    try:
        actor.send(*message.args, **message.kwargs)
    except (StoreUnavailable, BrokerConnectionError) as error:
        raise RedisUnavailable(str(error)) from error


def key_of(actor: Actor[..., Any], message: Message[Any] | MessageProxy, terms: Terms) -> str:
    return f"{actor.actor_name}:{digest(actor, message.args, message.kwargs, terms.key)}"
