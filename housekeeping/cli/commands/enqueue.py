"""``housekeeping enqueue``"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click
from dramatiq import Message
from dramatiq.errors import BrokerConnectionError

from housekeeping.cli.context import load_workers
from housekeeping.core.errors import BrokerUnavailable, RedisUnavailable
from housekeeping.core.middleware_errors import StoreUnavailable
from housekeeping.core.redis_client import translate_redis_errors
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.installation import broker_beside
from housekeeping.presentation.descriptions import describe_override
from housekeeping.presentation.workers import find_worker, parse_argument
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.overrides import override_of


@dataclass(frozen=True, slots=True)
class _Sent:
    """What became of the message.

    Attributes:
      enqueued: False for one that was dropped as a duplicate.
      duplicate_of: The message that does its work then.
      warning: Why its run will do nothing; None where it will.
    """

    worker: str
    queue: str
    message_id: str
    enqueued: bool
    duplicate_of: str | None
    warning: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "worker": self.worker,
            "queue": self.queue,
            "message_id": self.message_id,
            "enqueued": self.enqueued,
            "duplicate_of": self.duplicate_of,
            "warning": self.warning,
        }


@click.command(short_help="Send a run to the workers.")
@click.argument("name")
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def enqueue(name: str, argument: str | None, as_json: bool) -> None:
    """Send a run of worker NAME to the worker processes, as the application does. A few workers take an ARGUMENT.

    The message has the options of the worker's actor. Where one for the same work waits already, it is dropped as a
    duplicate, and the other message is named. The run of a paused or disabled worker will be skipped, which a warning
    says. To run a worker here and now: housekeeping run NAME.

    \b
    housekeeping enqueue user_status_cleanup.batch
    housekeeping enqueue batched_git_ref_updates.project_cleanup 2

    Exit status: 0 when the message or its duplicate is in the queue; 1 when Redis or RabbitMQ does not answer.
    """
    settings, sweeps = load_workers()
    sweep = find_worker(sweeps, name)
    about = parse_argument(sweep, argument)
    with translate_postgres_errors():
        warning = _warning(sweep)
    broker = broker_beside(settings, sweeps)
    try:
        message: Message[Any] = broker.get_actor(name).message(*([] if sweep.argument_name is None else [about]))
        with translate_redis_errors():
            sent = broker.enqueue(message)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except BrokerConnectionError as error:
        raise BrokerUnavailable(f"nothing was enqueued: {error_line(error)}") from error
    finally:
        broker.close()
    enqueued, duplicate_of = "duplicate_of" not in sent.options, sent.options.get("duplicate_of")
    result = _Sent(name, sweep.queue, sent.message_id, enqueued, duplicate_of, warning)
    _show(result, as_json)


def _warning(sweep: Sweep) -> str | None:
    if not sweep.enabled:
        return f"{sweep.name} is disabled in HOUSEKEEPING_WORKERS: its run will be skipped"
    problem = sweep.lacks()
    if problem is not None:
        return f"{sweep.name} is not set up ({problem.text}): its run will be skipped"
    switch = override_of(sweep.name)
    if switch is not None and switch.state == "paused":
        return f"{describe_override(switch)}: its run will be skipped (housekeeping resume {sweep.name})"
    return None


def _show(result: _Sent, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.as_json()))
    elif not result.enqueued:
        click.echo(f"dropped as a duplicate: message {result.duplicate_of} does the same work and has not ended")
    else:
        click.echo(f"enqueued: message {result.message_id} in queue {result.queue}")
        click.echo(f"its run, once a worker process takes it: housekeeping runs {result.worker}")
    if result.warning is not None:
        click.echo(f"housekeeping: warning: {result.warning}", err=True)
