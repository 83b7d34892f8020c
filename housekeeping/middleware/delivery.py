"""Delivery of a message: its running mark, its deduplication key and its lease, taken and freed in one round trip each.

`Admission` asks Redis once whether a message runs, and once more at its end. A completed message is not executed
again, and no message runs twice at the same time. An actor with an exclusive lease has one run at a time, across all
processes and machines. `complete_in` records the completion in the transaction of the message's effect.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Middleware, get_encoder
from dramatiq.middleware import MiddlewareError
from dramatiq.results import ResultMissing

from housekeeping.brokers.dead_letters import LIFE
from housekeeping.brokers.dramatiq_internals import (
    InvalidOption,
    Requeue,
    Skip,
    SkipDelivery,
    fail_message_on_error,
)
from housekeeping.brokers.redis import WITH_ACKNOWLEDGMENT, ReliableRedisBroker, dispatch_source
from housekeeping.core.errors import HousekeepingError, RedisUnavailable
from housekeeping.core.interrupts import LostLease, interrupter
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.logs import typed_error_line
from housekeeping.core.redis import (
    GIVEN,
    fill,
    milliseconds,
    named,
    read_scripts,
    register_freeing_script,
    retry_on_outage,
    text,
    translate_redis_errors,
)
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database
from housekeeping.leases import renewal
from housekeeping.leases.lease import (
    Connection,
    DatabaseNotConfigured,
    ExclusiveLease,
    current_lease,
    fetch_row,
    refuse_outside_of_transaction,
)
from housekeeping.leases.renewal import SHORTEST_TTL, RedisLeaseStore, elapsed, renewals, safe_until
from housekeeping.ledger.leases import holder_of
from housekeeping.ledger.schema import Completion
from housekeeping.middleware import keys as scripts
from housekeeping.middleware.deduplication import Deduplication, Delivery, Part, idempotency_option, text_option
from housekeeping.middleware.keys import (
    DEDUP_STATE,
    RETRIED,
    RETRY_WAITS,
    SECOND_DELIVERY,
    UnusableArguments,
    bind_call,
    check_key,
    has_dependents,
    key_value,
    short_digest,
)
from housekeeping.middleware.retries import result_of, retry_until_available

logger = named_logger(__name__)

_EXAMPLE: Final = '{"key": "reports/nightly", "ttl": timedelta(minutes=10), "if_held": "skip"}'

_LEASE_OPTIONS: Final = {"key", "ttl", "if_held", "fenced", "database"}

_RETRY_MARGIN: Final = timedelta(seconds=1)  # between the end of a held lease and the next attempt


DEFAULT_TTL: Final = timedelta(hours=24)  # docs/reference/actor-options.md
#: How long the mark of a running message outlives its process. Less than the broker's heartbeat timeout (60 s), so that
#: a redelivery after a kill finds it expired.
RUNNING_TTL: Final = timedelta(seconds=30)
_RUNNING_DELAY: Final = timedelta(seconds=5)  # before a second delivery checks again

#: What the script returns before the id of a completed message.
_COMPLETED: Final = "completed:"
#: How long the end of a message is tried again: as long as a completion lives by default.
_FINISH_WITHIN: Final = DEFAULT_TTL
#: The scripts of the file beside this module, by name.
_LUA: Final = read_scripts(__file__)
_BEGIN: Final = _LUA["begin"]
_END: Final = _LUA["finish"]


#: Record a completion, unless there is one that has not expired; a second transaction waits for the first one's end.
_COMPLETE: Final = """
INSERT INTO {table} AS earlier (name, message_id, expires_at, result)
VALUES (%s, %s, clock_timestamp() + %s * interval '1 second', %s)
ON CONFLICT (name) DO UPDATE
SET message_id = excluded.message_id, expires_at = excluded.expires_at, result = excluded.result
WHERE earlier.expires_at <= clock_timestamp()
RETURNING 1
"""


class AlreadyCompleted(BaseException):
    """Ends the transaction and the run of a message that is done already.

    No `Exception`, because an actor's ``except Exception`` would let the transaction commit its effect again.

    Attributes:
      message_id: The message that was completed.
      result: Its result; None if it was not given.
    """

    def __init__(self, message_id: str, result: Any) -> None:
        super().__init__(message_id)
        self.message_id = message_id
        self.result = result


#: Delivery whose actor runs. Unlike the thread's own state, an async actor's coroutine sees it, too.
_running: Final[ContextVar[Delivery | None]] = ContextVar("running", default=None)


def complete_in(connection: Connection | None = None, *, result: Any = None) -> None:
    """Let the open transaction commit only if the message is not done yet, and then record that it is; call it first.

    ::

        @dramatiq.actor(idempotent=True)
        def charge(order_id: int) -> None:
            with database.atomic():
                housekeeping.complete_in()
                write_charge(order_id)

    Effect and completion commit together. A later delivery, or a second message with the same ``idempotency_key``, has
    its transaction rolled back here and ends as done. One that runs at the same time waits here for this transaction.

    Parameters:
      connection: The application's own connection, of any driver with ``%s`` parameters, to a database with the
        library's schema; by default the library's own.
      result: What the actor will return, for a delivery that finds the message done. Give it if the result is used.

    Raises:
      HousekeepingError: Outside of a transaction, or of a message of an actor with ``idempotent=True``; or without a
        database in the settings.

    Note: A transaction that the application repeats after its commit was in doubt ends the run as well.
    """
    delivery = _running.get()
    if delivery is None or not delivery.marks:
        raise HousekeepingError("complete_in() was called outside of a message of an actor with idempotent=True")
    if database.obj is None:
        raise DatabaseNotConfigured("complete_in() needs a database (HOUSEKEEPING_DATABASE_URL)")
    table = f'"{Completion._meta.schema}".completions'
    encoded = None if result is None else get_encoder().encode(result)
    row = (delivery.name, delivery.completed_by, delivery.ttl.total_seconds(), encoded)
    # Before the statement, which would commit by itself: the effect would never happen.
    refuse_outside_of_transaction("complete_in()", connection)
    while fetch_row(connection, _COMPLETE.format(table=table), row) is None:
        query = f"SELECT message_id, result FROM {table} WHERE name = %s"  # noqa: S608
        found = fetch_row(connection, query, (delivery.name,))
        if found is not None:  # else it has just expired and was deleted
            message_id, stored = found
            raise AlreadyCompleted(message_id, None if stored is None else get_encoder().decode(bytes(stored)))


class Admission(Middleware):
    """Middleware that decides whether a delivered message runs, and ends it.

    An idempotent actor executes a message once, however often the broker delivers it. Messages with the same
    ``idempotency_key`` are executed once as well::

        @dramatiq.actor(idempotent=True, idempotency={"ttl": timedelta(days=7)})
        def charge(order_id: int) -> None: ...

        charge.send_with_options(args=(7,), idempotency_key="order-7")

    The completion is written after the actor has returned. If the process is killed in between, the message is executed
    once more, unless the actor calls `complete_in`. The same happens if a process is suspended for longer than its
    running mark lives (30 s). If another delivery is running when it wakes, `LostLease` ends its own run, or keeps it
    from starting.

    An actor with an exclusive lease has one run per key at a time. The TTL is how long the lease outlives a killed
    process::

        @dramatiq.actor(exclusive_lease={"key": "reports/nightly", "ttl": timedelta(minutes=10)})
        def publish() -> None: ...

    If the lease is held, the message is dropped. With ``"if_held": "retry"``, or if its own killed attempt holds the
    lease, it is requeued until the lease expires, and no retry is used up. The key may be a callable that takes the
    call's arguments. The lease is renewed while the run is alive.

    A run that loses its lease is ended by `LostLease`, which is raised only inside the actor. The message is retried
    like any failed one. With ``"fenced": True`` the actor may call `housekeeping.fence`, so that writes to the database
    are fenced off as well.

    Redis is asked once before a run and once at its end, together with the acknowledgment if the queues are on the same
    Redis; not at all for an actor without these options.
    """

    def __init__(self, client: redis.Redis, namespace: str, deduplication: Deduplication) -> None:
        self._client = client
        self._prefix = namespace
        self._deduplication = deduplication
        self._leases = RedisLeaseStore(client, namespace)
        self._marks = RedisLeaseStore(client, namespace, kind="running")
        self._begin: Any = client.register_script(GIVEN + _BEGIN)
        begin = {"begin": _BEGIN, "start": scripts.START, "obtain": renewal._OBTAIN}
        self._admit: Any = register_freeing_script(client, GIVEN + fill(_LUA["admit"], parts=_LUA["parts"], **begin))
        self._dismiss: Any = self._script_of_end(client, dispatch="")
        self._acknowledges = False

    def end_with_acknowledgment(self, broker: ReliableRedisBroker) -> None:
        """End each message together with its acknowledgment, because the broker's queues are on the same Redis."""
        self._dismiss = self._script_of_end(broker.client, dispatch_source(broker))
        self._acknowledges = True

    @staticmethod
    def _script_of_end(client: redis.Redis, dispatch: str) -> Any:
        end = {"give_back": renewal._RELEASE, "release": scripts.RELEASE, "finish": _END, "dispatch": dispatch}
        return register_freeing_script(client, GIVEN + fill(_LUA["dismiss"], parts=_LUA["parts"], **end))

    @property
    def actor_options(self) -> set[str]:
        return {"idempotent", "idempotency", "exclusive_lease"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        _check_idempotency(actor)
        _check_lease(actor)
        if _is_protected(actor):
            actor.fn = self._guarded(actor.fn)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        actor = broker.actors.get(message.actor_name)
        # Only a new message is refused: its sender gets the error. One that is due or retried has no sender.
        new = DEDUP_STATE not in message.options
        if new and actor is not None and "idempotency_key" in message.options and not actor.options.get("idempotent"):
            raise InvalidOption(f"{actor.actor_name}: idempotency_key needs an actor with idempotent=True")
        delivery = self._deduplication.thread.delivery
        if delivery is not None and delivery.message_id == message.message_id:
            delivery.enqueued_as = _retry_number(message)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        actor = broker.get_actor(message.actor_name)
        self._deduplication.prepare(actor, message)
        if not _is_protected(actor):
            return
        with fail_message_on_error():
            # Remembered before Redis is asked: if its answer is lost, the end frees what was taken.
            delivery = self._deduplication.thread.delivery = _delivery(message)
            parts = {
                "mark": self._mark(delivery, actor, message),
                "key": self._deduplication.start(delivery, actor, message),
                "lease": self._lease(delivery, actor, message),
            }
            shares_key = has_dependents(message)
            # Repeated after a lost answer: otherwise an acquired lease would stay unused until its ttl expires.
            answer = retry_on_outage(lambda: self._ask(self._admit, parts, shares_key=shares_key), tries=2, pause_s=0)
            granted = delivery.token, "ours", delivery.lease_token, 0
            state, key_state, holder, left_ms = granted if answer == 1 else answer
            delivery.answered = True
            if parts["mark"] and (refusal := self._mark_refusal(delivery, text(state), message)):
                delivery.marks, delivery.begun, delivery.lease = [], False, None
                if not _ends_as_done(broker, message, delivery, refusal):
                    raise refusal
                return
            if parts["key"] and (refusal := self._deduplication.refusal(delivery, text(key_state), message)):
                delivery.lease = None
                raise refusal
            if parts["lease"] and (refusal := self._lease_refusal(delivery, text(holder), left_ms, actor)):
                raise refusal

    def _mark(self, delivery: Delivery, actor: Actor[..., Any], message: MessageProxy) -> Part | None:
        """Return keys and arguments for the script that begins the delivery; None if the actor is not idempotent."""
        if not actor.options.get("idempotent"):
            return None
        delivery.name, delivery.completed_by = _name(message), message.message_id
        delivery.ttl = (actor.options.get("idempotency") or {}).get("ttl", DEFAULT_TTL)
        delivery.sure_until = safe_until(delivery.since, RUNNING_TTL.total_seconds())
        # Retries are counted by the message's id, not by the application's key. A requeued dead letter counts from 0.
        life = f"{message.actor_name}:{message.message_id}:{text_option(message, LIFE) or ''}"
        names = (f"done:{delivery.name}", f"running:{delivery.name}", f"retried:{life}")
        delivery.marks = [f"{self._prefix}:{name}" for name in names]
        return delivery.marks, _beginning(delivery)

    def _mark_refusal(self, delivery: Delivery, state: str, message: MessageProxy) -> MiddlewareError | None:
        """Start to renew the running mark if the message may run, else return the error that drops or requeues it."""
        if state == delivery.token:
            delivery.renewals.append(
                renewals.start(
                    f"mark of {delivery.name}",
                    lambda: delivery.renew(lambda: self._renew_mark(delivery)),
                    RUNNING_TTL,
                    delivery.since,
                    interrupter(LostLease),
                    recoverable=True,
                )
            )
            return None
        if state.startswith(_COMPLETED):
            by = state.removeprefix(_COMPLETED)
            _log_done(by)
            return SkipDelivery("already_done", duplicate_of=None if by == message.message_id else by)
        if state == "retried":
            # A failed attempt was delivered again. If it ran again, it would be retried twice.
            message.options[DEDUP_STATE] = RETRIED
            logger.info("Delivery dropped, because its retry is waiting", job_status=RETRY_WAITS)
            return SkipDelivery(RETRY_WAITS)
        if state.startswith(f"{message.message_id}:"):
            message.options[DEDUP_STATE] = SECOND_DELIVERY
        return Requeue(f"{delivery.name} is running elsewhere", _RUNNING_DELAY)

    def _renew_mark(self, delivery: Delivery) -> bool:
        """Renew the running mark; return whether this delivery may continue.

        A mark that Redis lost is written again if no other delivery runs. After the mark has expired, another one may
        also have completed the message.
        """
        began_at = elapsed()
        if began_at <= delivery.sure_until:
            holder = self._marks.obtain(delivery.name, delivery.token, RUNNING_TTL)
        else:
            with translate_redis_errors():
                holder = text(self._begin(keys=delivery.marks, args=[named(**_beginning(delivery))]))
        mine = holder == delivery.token
        delivery.sure_until = safe_until(began_at, RUNNING_TTL.total_seconds()) if mine else 0.0
        return mine

    def _lease(self, delivery: Delivery, actor: Actor[..., Any], message: MessageProxy) -> Part | None:
        """Return keys and arguments for the script that acquires the message's lease; None if it needs none."""
        option = actor.options.get("exclusive_lease")
        if option is None:
            return None
        key = option["key"]
        if not isinstance(key, str):
            key = str(key_value(actor, bind_call(actor, message.args, message.kwargs), key))
        fenced, name = option.get("fenced", False), option.get("database", MAIN)
        lease = ExclusiveLease(key, option["ttl"], self._leases, fenced=fenced, database=name)
        delivery.lease_token, delivery.lease = lease.request(), lease
        return [self._leases.name(key)], {"token": delivery.lease_token, "ttl": milliseconds(option["ttl"])}

    def _lease_refusal(
        self, delivery: Delivery, holder: str, left_ms: int, actor: Actor[..., Any]
    ) -> MiddlewareError | None:
        """Start to renew the lease if the message got it, else return the error that drops or requeues the message."""
        lease, token = delivery.lease, delivery.lease_token
        assert lease is not None
        if lease.answered(token, holder):
            delivery.leased = True
            current_lease.set(lease)
            lease.start_renewal(interrupting=True)
            return None
        delivery.lease = None
        other = holder_of(holder)
        held_for = other.held_for or timedelta()
        logger.info(
            "Lease is held elsewhere",
            lease=lease.key,
            held_for_s=round(held_for.total_seconds(), 1),
            reason="lease_held",
        )
        # Held by its own killed attempt, or one that seems killed: dropping the message would lose its work.
        if actor.options["exclusive_lease"].get("if_held") == "retry" or other.message_id == delivery.message_id:
            left = timedelta(milliseconds=max(left_ms, 0))
            return Requeue(f"lease {lease.key!r} is held", min(left + _RETRY_MARGIN, lease.ttl))
        return Skip("lease_held")

    def has_completed(self, message: Message[Any]) -> bool:
        """Return whether Redis has this message's own completion.

        Raises:
          RedisUnavailable: Redis did not answer.
        """
        with translate_redis_errors():
            found = self._client.get(f"{self._prefix}:done:{_name(message)}")
        return found is not None and text(found) == message.message_id

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the actor's function, which does not start once its delivery has lost its running mark or lease."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            delivery = self._deduplication.thread.delivery
            if delivery is None:
                return function(*args, **kwargs)  # called directly, not by a worker
            if delivery.instead is not None:
                return delivery.instead()
            self._check_held(delivery)
            before = _running.set(delivery)
            try:
                return function(*args, **kwargs)
            except AlreadyCompleted as earlier:
                delivery.completed_by = earlier.message_id
                _log_done(earlier.message_id)
                # The rest of its end is still to be done: its followers, its result and its completion in Redis.
                return earlier.result
            finally:
                _running.reset(before)

        return run

    def _check_held(self, delivery: Delivery) -> None:
        if delivery.lease is not None and delivery.lease.lost:
            raise LostLease
        if delivery.marks and elapsed() > delivery.sure_until:
            with fail_message_on_error():
                may_continue = delivery.renew(lambda: self._renew_mark(delivery))
            if not may_continue:
                raise Requeue(f"{delivery.name} was taken over while this process was stopped", _RUNNING_DELAY)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._end(broker, message, completed=exception is None and not message.failed)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._end(broker, message, completed=False)

    def _end(self, broker: Broker, message: MessageProxy, *, completed: bool) -> None:
        """Release lease and key, and record the end of the delivery; together with its acknowledgment if possible.

        If the process dies before, the message runs again.
        """
        actor = broker.get_actor(message.actor_name)
        if not _is_protected(actor):
            return
        delivery = self._deduplication.thread.end_delivery()
        if delivery is None or delivery.message_id != message.message_id:
            delivery = _delivery(message)  # another middleware ended it before it began
        lease = delivery.lease
        lost = delivery.leased and lease is not None and lease.lost
        parts: dict[str, Part | None] = {"lease": None, "key": None, "mark": None}
        if lease is not None:
            current_lease.set(None)
            # Without an answer, Redis may have granted it.
            token = lease.give_up() if delivery.leased else delivery.lease_token
            parts["lease"] = None if token is None else ([self._leases.name(lease.key)], {"token": token})
        if delivery.marks:
            parts["mark"] = delivery.marks, _ending(delivery, completed=completed, failed=message.failed)
        try:
            release = self._deduplication.release_step(delivery, actor, message)
        except UnusableArguments as error:
            logger.warning("Key stays until its ttl is over", error=str(error))
            release = None
        if release is not None:
            parts["key"] = [self._deduplication.keys.prefix + release.key], release.arguments
        if not any(parts.values()):
            return
        owes_rerun = delivery.owes_rerun
        rerun: Message[Any] | None = None
        tries = 0
        held = True

        def end(acknowledgment: Part | None = None) -> None:
            nonlocal rerun, tries, held
            tries += 1
            recorded = False
            if rerun is None:
                whole = {**parts, "ack": acknowledgment}
                answer = self._ask(self._dismiss, whole, owes_rerun=owes_rerun)
                was_held, left, recorded = (1, 0, True) if answer == 1 else answer
                held = held and bool(was_held or tries > 1)  # a try without an answer may have released it
                # A run that lost its key cannot know whether a duplicate arrived before. One run too many is harmless.
                if left == 1 or (left == 2 and owes_rerun):
                    rerun = actor.message_with_options(
                        args=message.args, kwargs=message.kwargs, **idempotency_option(message)
                    )
            if rerun is not None:
                self._deduplication.send_rerun(broker, rerun, delivery)
            if not recorded:
                self._ask(self._dismiss, {"mark": parts["mark"], "ack": acknowledgment})
            if delivery.leased and lease is not None and (lost or not held):
                lease.count_loss(delivery.lease_token, lost=True)
                logger.warning("Lease was lost before its run ended", lease=lease.key, reason="lost_lease")

        if self._acknowledges and not message.failed:
            vars(message)[WITH_ACKNOWLEDGMENT] = functools.partial(self._acknowledge, end)
        elif owes_rerun:
            # A duplicate may have asked for a rerun.
            _when_available(end)
        else:
            try:
                retry_on_outage(end)
            except RedisUnavailable as error:
                logger.warning("End of a message could not be recorded; retrying", error=str(error))
                # Without it, the keys would stop the worker's next messages until they expire.
                name = f"the end of message {message.message_id}"
                renewals.finish_later(name, lambda: retry_on_outage(end, tries=1), _FINISH_WITHIN)

    def _acknowledge(self, end: Callable[[Part | None], None], acknowledgment: Part | None) -> None:
        """End a message together with its acknowledgment, when Redis answers; then the broker's answers as well."""
        try:
            _when_available(lambda: end(acknowledgment))
        except Exception as error:
            # Redis rejects one of its keys, or another middleware refuses the rerun. What is left expires.
            logger.error("End of a message could not be recorded", error=typed_error_line(error))
            self._ask(self._dismiss, {"ack": acknowledgment})

    def _ask(self, script: Any, parts: dict[str, Part | None], **flags: bool) -> Any:
        """Run the start or end script, with its parts in the order of their keys. The scripts are safe to repeat."""
        needed = {name: part for name, part in parts.items() if part is not None}
        keys = [key for its_keys, _ in needed.values() for key in its_keys]
        arguments = {name: its_arguments for name, (_, its_arguments) in needed.items()}
        return script(keys=keys, args=[named(**arguments, **flags)])


def _when_available(end: Callable[[], None]) -> None:
    """Record the end of a message as soon as Redis answers. This thread gets no other message before that."""
    retry_until_available(end, "End of a message could not be recorded; retrying")


def _ends_as_done(broker: Broker, message: MessageProxy, delivery: Delivery, refusal: MiddlewareError) -> bool:
    """Return whether a message that others wait for ends as done, because another one has done its work."""
    done_by = refusal.duplicate_of if isinstance(refusal, SkipDelivery) else None
    if done_by is None or not has_dependents(message):
        return False
    try:
        result = result_of(broker, message, done_by)
    except ResultMissing:
        if "pipe_target" in message.options:
            return False  # the next message of the pipe needs the result
        result = None
    delivery.instead = lambda: result
    return True


def _is_protected(actor: Actor[..., Any]) -> bool:
    return bool(actor.options.get("idempotent")) or "exclusive_lease" in actor.options


def _delivery(message: MessageProxy) -> Delivery:
    # As unique as a UUID, and made in a quarter of the time.
    token = f"{message.message_id}:{os.urandom(16).hex()}"
    return Delivery(message.message_id, token, _retry_number(message), elapsed())


def _beginning(delivery: Delivery) -> dict[str, Any]:
    """Return the arguments of the script that begins a delivery."""
    return {"token": delivery.token, "ttl": milliseconds(RUNNING_TTL), "retry": delivery.retries}


def _ending(delivery: Delivery, *, completed: bool, failed: bool) -> dict[str, Any]:
    """Return the arguments of the script that ends a delivery."""
    # Not the number in the message: Dramatiq also counts a retry that it does not make, and callbacks see that.
    retry = 0 if completed or failed else delivery.enqueued_as
    done = {"completed_by": delivery.completed_by} if completed else {}
    return {"token": delivery.token, "ttl": milliseconds(delivery.ttl), "retry": retry, **done}


def _name(message: Message[Any] | MessageProxy) -> str:
    """Return the actor and message id, or the application's idempotency key instead of the id."""
    key = message.options.get("idempotency_key")
    # A digest, because an application's key may contain the separator.
    what = message.message_id if key is None else short_digest(str(key))
    return f"{message.actor_name}:{what}"


def _log_done(by: str) -> None:
    logger.info("Message was completed before", job_status="already_done", completed_by=by)


def _retry_number(message: Message[Any] | MessageProxy) -> int:
    retries = message.options.get("retries", 0)
    return retries if isinstance(retries, int) else 0


def _check_idempotency(actor: Actor[..., Any]) -> None:
    name, idempotent, option = (
        actor.actor_name,
        actor.options.get("idempotent", False),
        actor.options.get("idempotency"),
    )
    if not isinstance(idempotent, bool):
        raise InvalidOption(f"{name}: idempotent is {idempotent!r}; it should be True or False")
    if option is None:
        return
    ttl = option.get("ttl") if isinstance(option, dict) and set(option) == {"ttl"} else None
    if not isinstance(ttl, timedelta) or ttl < SHORTEST_TTL:
        raise InvalidOption(
            f"{name}: idempotency is {option!r}; "
            'it should be such as {"ttl": timedelta(hours=24)}, of at least 3 seconds'
        )
    if not idempotent:
        raise InvalidOption(f"{name}: idempotency needs idempotent=True beside it")


def _check_lease(actor: Actor[..., Any]) -> None:
    name, option = actor.actor_name, actor.options.get("exclusive_lease")
    if option is None:
        return
    if not isinstance(option, dict) or not {"key", "ttl"} <= set(option) <= _LEASE_OPTIONS:
        raise InvalidOption(f"{name}: exclusive_lease is {option!r}; it should be such as {_EXAMPLE}")
    if option.get("if_held", "skip") not in ("skip", "retry"):
        raise InvalidOption(f'{name}: if_held is {option["if_held"]!r}; it should be "skip" or "retry"')
    if not isinstance(option.get("fenced", False), bool):
        raise InvalidOption(f"{name}: fenced is {option['fenced']!r}; it should be True or False")
    if not isinstance(option.get("database", MAIN), str):
        raise InvalidOption(f"{name}: database is {option['database']!r}; it should be the name of a database")
    if not isinstance(option["ttl"], timedelta) or option["ttl"] < SHORTEST_TTL:
        raise InvalidOption(
            f"{name}: exclusive_lease ttl is {option['ttl']!r}; it should be a timedelta of at least 3 seconds"
        )
    if callable(option["key"]):
        check_key(actor, "exclusive_lease", option["key"])
    elif not isinstance(option["key"], str) or not option["key"]:
        raise InvalidOption(
            f"{name}: exclusive_lease key is {option['key']!r}; it should be a text or a callable of the arguments"
        )
