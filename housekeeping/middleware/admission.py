"""Admission of messages: takes running mark, deduplication key and lease in one round trip, frees them in another."""

from __future__ import annotations

from typing import Any, Final

import redis
from dramatiq import Broker, Message, MessageProxy, Middleware

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.middleware_errors import fail_message_on_error
from housekeeping.core.redis.client import register_freeing_script, retry_redis, text
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.leases import store
from housekeeping.leases.renewal_threads import renewals
from housekeeping.middleware import idempotency as idempotency_scripts
from housekeeping.middleware.call_keys import UnusableArguments
from housekeeping.middleware.deduplication import scripts
from housekeeping.middleware.deduplication.ending import Ending
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.deduplication.options import has_dependents
from housekeeping.middleware.deduplication.steps import idempotency_option
from housekeeping.middleware.exclusive_lease import ExclusiveLeases
from housekeeping.middleware.idempotency import Idempotency

logger = named_logger(__name__)

#: Both scripts run up to three parts. ARGV[1] to ARGV[3] say how many arguments each part has, 0 for a part that this
#: message does not need. ARGV[4] is a flag. Then come the arguments of each part. KEYS are those of each part.
_PARTS: Final = """
local keys, args = 0, 4
local function part(number, script, its_keys)
    local its_args = tonumber(ARGV[number])
    if its_args == 0 then return nil end
    local answer = script({unpack(KEYS, keys + 1, keys + its_keys)}, {unpack(ARGV, args + 1, args + its_args)})
    keys, args = keys + its_keys, args + its_args
    return answer
end
"""
#: Begin a run. ARGV[4]: whether the message runs even if another one has its key. Returns the answers of the parts, up
#: to the first that refuses, and the time in ms until the lease expires.
_ADMIT: Final = (
    _PARTS
    + """
local function begin(KEYS, ARGV) %(begin)s end
local function start(KEYS, ARGV) %(start)s end
local function obtain(KEYS, ARGV) %(obtain)s end
local token = ARGV[5]
local mark = part(1, begin, 3)
if mark and mark ~= token then return {mark, "", "", 0} end
local key = part(2, start, 1)
if key and key ~= "ours" and ARGV[4] == "0" then return {mark or "", key, "", 0} end
local holder = part(3, obtain, 1)
return {mark or "", key or "", holder or "", holder and redis.call("pttl", KEYS[keys]) or 0}
"""
)
#: End a run. ARGV[4]: whether a run that lost its key is followed by another one. Returns whether the lease was held,
#: the answer of the key's release, and whether the completion was recorded. A wanted rerun is enqueued before that.
_DISMISS: Final = (
    _PARTS
    + """
local function give_back(KEYS, ARGV) %(give_back)s end
local function release(KEYS, ARGV) %(release)s end
local function finish(KEYS, ARGV) %(finish)s end
local held = part(1, give_back, 1) or 1
local left = part(2, release, 1) or 0
if left == 1 or (left == 2 and ARGV[4] == "1") then return {held, left, 0} end
part(3, finish, 3)
return {held, left, 1}
"""
)
#: How long the end of a message is tried again: as long as a completion lives by default.
_FINISH_WITHIN: Final = idempotency_scripts.DEFAULT_TTL
#: Keys and arguments of a part that is not needed.
_NOTHING: Final[tuple[list[str], list[Any]]] = ([], [])


class Admission(Middleware):
    """Middleware that lets a message run if `Idempotency`, `Deduplication` and `ExclusiveLeases` all agree.

    It asks Redis once before the run and once after it; not at all for an actor without these options. The three
    middleware provide the arguments and interpret the answers.
    """

    def __init__(
        self, client: redis.Redis, idempotency: Idempotency, deduplication: Deduplication, leases: ExclusiveLeases
    ) -> None:
        self._idempotency = idempotency
        self._deduplication = deduplication
        self._leases = leases
        begin = {"begin": idempotency_scripts._BEGIN, "start": scripts.START, "obtain": store._OBTAIN}
        end = {"give_back": store._RELEASE, "release": scripts.RELEASE, "finish": idempotency_scripts._END}
        self._admit: Any = register_freeing_script(client, _ADMIT % begin)
        self._dismiss: Any = register_freeing_script(client, _DISMISS % end)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        actor = broker.get_actor(message.actor_name)
        self._leases.forget()  # an interrupted hook may have left one
        if not actor.options.get("idempotent") and "exclusive_lease" not in actor.options:
            self._idempotency.prepare(actor, message)
            self._deduplication.prepare(actor, message)
            return
        with fail_message_on_error():
            # All three are remembered before Redis is asked: if its answer is lost, the end frees what was taken.
            mark = self._idempotency.prepare(actor, message)
            key = self._deduplication.prepare(actor, message)
            lease = self._leases.prepare(actor, message)
            parts = (mark or _NOTHING, key or _NOTHING, lease or _NOTHING)
            # Repeated after a lost answer: otherwise an acquired lease would stay unused until its ttl expires.
            answer = retry_redis(lambda: self._ask(self._admit, parts, has_dependents(message)), tries=2, pause_s=0)
            state, key_state, holder, left_ms = answer
            if mark is not None and (refusal := self._idempotency.refusal(text(state), message)):
                self._deduplication.forget()
                self._leases.forget()
                raise refusal
            if key is not None and (refusal := self._deduplication.refusal(text(key_state), message)):
                self._leases.forget()
                raise refusal
            if lease is not None and (refusal := self._leases.refusal(text(holder), left_ms, actor, message)):
                raise refusal

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._end(broker, message, completed=exception is None and not message.failed)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._end(broker, message, completed=False)

    def _end(self, broker: Broker, message: MessageProxy, *, completed: bool) -> None:
        """Release lease and key, and record the end of the delivery.

        The message is not yet acknowledged. If the process dies here, it runs again.
        """
        actor = broker.get_actor(message.actor_name)
        lease = self._leases.end()
        finish = self._idempotency.end(actor, message, completed=completed)
        try:
            ending = self._deduplication.end(actor, message)
        except UnusableArguments as error:
            logger.warning("Key stays until its ttl is over", error=str(error))
            ending = None
        if lease is None and finish is None and ending is None:
            return
        rerun: Message[Any] | None = None
        tries = 0
        held, recorded = True, False

        def end() -> None:
            nonlocal rerun, tries, held, recorded
            if rerun is None:
                tries += 1
                parts = (lease or _NOTHING, ending.release() if ending else _NOTHING, finish or _NOTHING)
                was_held, left, recorded = self._ask(self._dismiss, parts, ending is not None and ending.owes_rerun)
                held = held and bool(was_held or tries > 1)  # a try without an answer may have released it
                if ending is None or not self._rerun_wanted(ending, left):
                    return
                rerun = actor.message_with_options(
                    args=message.args, kwargs=message.kwargs, **idempotency_option(message)
                )
            assert ending is not None
            self._deduplication.send_rerun(broker, rerun, ending)
            if not recorded and finish is not None:
                self._ask(self._dismiss, (_NOTHING, _NOTHING, finish), False)
                recorded = True

        while True:
            try:
                retry_redis(end)
                break
            except RedisUnavailable as error:
                if ending is None or not ending.owes_rerun:
                    self._leases.ended(held=True)
                    logger.warning("End of a message could not be recorded, tried again", error=str(error))
                    # Without it, the keys would stop the worker's next messages until they expire.
                    name = f"the end of message {message.message_id}"
                    renewals.finish_later(name, lambda: retry_redis(end, tries=1), _FINISH_WITHIN)
                    return
                # Without Redis this thread gets no other message, and a duplicate may have asked for a rerun.
                logger.warning("Key could not be released, tried again", key=ending.delivery.key, error=str(error))
        self._leases.ended(held=held)

    def _rerun_wanted(self, ending: Ending, left: int) -> bool:
        if ending.start_unanswered:
            # The start may not have happened. Then the key is still that of a waiting message.
            keys, args = ending.release(as_waiting=True)
            _, left, _ = self._ask(self._dismiss, (_NOTHING, (keys, args), _NOTHING), False)
        # A run that lost its key cannot know whether a duplicate arrived before. One run too many is harmless.
        return left == 1 or (left == 2 and ending.owes_rerun)

    def _ask(self, script: Any, parts: tuple[tuple[list[str], list[Any]], ...], flag: bool) -> list[Any]:
        """Run the start or end script. Each part has its own keys and arguments. The scripts are safe to repeat."""
        keys = [key for its_keys, _ in parts for key in its_keys]
        args = (
            [len(its_args) for _, its_args in parts] + [int(flag)] + [arg for _, its_args in parts for arg in its_args]
        )
        answer: list[Any] = script(keys=keys, args=args)
        return answer
