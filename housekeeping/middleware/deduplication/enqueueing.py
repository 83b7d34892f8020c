"""A message and its key together: into the queue and taken by one script, so that no crash comes between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from redis.client import Pipeline
from redis.connection import ConnectionPool

from housekeeping.middleware.deduplication import scripts as scripts
from housekeeping.middleware.deduplication.keys import DeduplicationKeys, KeyStep, Kind, text

#: Messages a script: bounds what is on Lua's stack at a time, far below the 8000 it has room for.
AT_ONCE: Final = 250
_STEPS: Final[tuple[Kind, ...]] = ("claim", "retain", "release")


class EnqueueingWithKeys:
    """Enqueues on a Redis broker whose queues share a Redis with the keys.

    The broker's own script does the enqueueing, as part of ours. It is the broker's client that sends it.
    """

    def __init__(self, broker: RedisBroker, keys: DeduplicationKeys) -> None:
        self._namespace = broker.namespace
        self._prefix = keys.prefix
        dispatch: Any = broker.scripts["dispatch"].script
        texts = {"claim": scripts.CLAIM, "retain": scripts.RETAIN, "release": scripts.RELEASE}
        self._scripts: dict[Kind, Any] = {
            kind: broker.client.register_script(scripts.with_enqueueing(texts[kind], text(dispatch))) for kind in _STEPS
        }
        self._many: Any = broker.client.register_script(scripts.with_enqueueing_many(text(dispatch)))

    def enqueue(self, step: KeyStep, dispatched: list[Any], pipeline: Pipeline | None = None) -> Any:
        """Take the step, and put the message into the queue unless another holds its key; one round trip.

        Repeated with the same arguments, it changes nothing.

        Returns:
          Who holds the key when the message was not enqueued (its own id: it is in the queue already), or an
          empty text; in a pipeline the answer comes with the others'.
        """
        arguments = step.arguments()
        return self._scripts[step.kind](
            keys=[self._prefix + step.key, self._namespace],
            args=[int(step.once), len(arguments), *arguments, *dispatched],
            client=pipeline,
        )

    def enqueue_many(
        self, steps: Sequence[KeyStep], dispatched: list[Any], bodies: Sequence[bytes], pipeline: Pipeline
    ) -> Any:
        """The same for new messages of one queue, as one command in the pipeline, which answers for each.

        Parameters:
          steps: Claims that differ in key and message id alone, see `alike`; at most `AT_ONCE`. The messages' copies
            have the messages' ids.
          dispatched: What the first is enqueued with; the others likewise.
          bodies: All of theirs.
        """
        _, *shared = steps[0].arguments()
        keys, args = [self._namespace], [int(steps[0].once), len(shared), *shared, *dispatched[:-2]]
        for step, body in zip(steps, bodies, strict=True):
            keys.append(self._prefix + step.key)
            args += (step.message_id, body)
        return self._many(keys=keys, args=args, client=pipeline)


def alike(step: KeyStep) -> tuple[object, ...] | None:
    """What is equal for claims that can be taken together; None when it is no claim."""
    return (step.once, step.ttl, step.more) if step.kind == "claim" else None


def dispatch_arguments(
    broker: RedisBroker, queue_name: str, message: Message[Any] | tuple[str, bytes], *, maintenance: bool = True
) -> list[Any]:
    """What the broker's `do_enqueue` gives to its script.

    Parameters:
      message: Or the id in Redis of its copy, and its body.
      maintenance: Whether the broker may look for messages of dead workers by the way.
    """
    asked: Any = broker
    copy_id, body = message if isinstance(message, tuple) else (message.options["redis_message_id"], message.encode())
    return [
        "enqueue",
        current_millis(),
        queue_name,
        asked.broker_id,
        asked.heartbeat_timeout,
        asked.dead_message_ttl,
        asked._should_do_maintenance("enqueue") if maintenance else 0,
        asked._max_unpack_size(),
        copy_id,
        body,
    ]


def share_redis(broker: object, keys: DeduplicationKeys) -> bool:
    """Whether the broker's queues are surely in the same database of the same server as the keys.

    A broker whose class enqueues in its own way is left to do so.
    """
    if not isinstance(broker, RedisBroker) or hasattr(type(broker), "do_enqueue"):
        return False
    if type(broker).enqueue is not RedisBroker.enqueue:
        return False
    theirs = broker.client
    return theirs is keys.client or (_place(theirs) is not None and _place(theirs) == _place(keys.client))


def _place(client: redis.Redis) -> tuple[object, ...] | None:
    """Where the client's commands go, as far as its settings tell; None when they do not, as with sentinels."""
    pool = client.connection_pool
    if not isinstance(pool, ConnectionPool) or type(pool).__name__.startswith("Sentinel"):
        return None
    given = pool.connection_kwargs
    if given.get("path"):
        return (given["path"], given.get("db") or 0)
    return (given.get("host") or "localhost", given.get("port") or 6379, given.get("db") or 0)
