"""Sending a run to the worker processes, for the command line and the dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dramatiq import Broker, Message
from dramatiq.errors import BrokerConnectionError

from housekeeping.core.errors import BrokerUnavailable, RedisUnavailable
from housekeeping.core.middleware_errors import StoreUnavailable
from housekeeping.core.redis.client import translate_redis_errors
from housekeeping.core.sanitize import error_line
from housekeeping.presentation.formatting import describe_override
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.overrides import override_of


@dataclass(frozen=True, slots=True)
class SentRun:
    """A run that was sent.

    Attributes:
      duplicate_of: The live message for the same work, if this one was dropped as a duplicate.
    """

    worker: str
    queue: str
    message_id: str
    duplicate_of: str | None

    def __str__(self) -> str:
        if self.duplicate_of is None:
            return f"enqueued: message {self.message_id} in queue {self.queue}"
        return f"dropped as a duplicate: message {self.duplicate_of} does the same work and has not ended"


def send_run(broker: Broker, sweep: Sweep, argument: Any = None) -> SentRun:
    """Send a run of the worker as the application does: with the options of its actor, deduplicated.

    Raises:
      RedisUnavailable, BrokerUnavailable: The server does not answer. Nothing was enqueued, or its answer was lost.
    """
    message: Message[Any] = broker.get_actor(sweep.name).message(*([] if sweep.argument_name is None else [argument]))
    try:
        with translate_redis_errors():
            sent = broker.enqueue(message)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except BrokerConnectionError as error:
        raise BrokerUnavailable(f"nothing was enqueued: {error_line(error)}") from error
    return SentRun(sweep.name, sweep.queue, sent.message_id, sent.options.get("duplicate_of"))


def reason_to_skip(sweep: Sweep) -> str | None:
    """Return why a run that is sent now will be skipped, with the remedy; None if it will run.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    if not sweep.enabled:
        return f"{sweep.name} is disabled in HOUSEKEEPING_WORKERS: its run will be skipped"
    problem = sweep.lacks()
    if problem is not None:
        return f"{sweep.name} is not set up ({problem.text}): its run will be skipped"
    override = override_of(sweep.name)
    if override is not None and override.state == "paused":
        return f"{describe_override(override)}: its run will be skipped (housekeeping resume {sweep.name})"
    return None
