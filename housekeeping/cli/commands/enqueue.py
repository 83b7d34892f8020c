"""``housekeeping enqueue``: send a run to the worker processes."""

from __future__ import annotations

import json
from typing import Any

import click
from dramatiq import Message
from dramatiq.errors import BrokerConnectionError

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.core.errors import BrokerUnavailable, RedisUnavailable
from housekeeping.core.middleware_errors import StoreUnavailable
from housekeeping.core.redis.client import translate_redis_errors
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.installation import broker_without_database
from housekeeping.presentation.formatting import describe_override
from housekeeping.presentation.workers import find_worker, parse_argument
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.ledger.overrides import override_of


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def enqueue(name: str, argument: str | None, as_json: bool) -> None:
    """Send a run of worker NAME to the worker processes, as the application does. A few workers take an ARGUMENT.

    The message has the options of the worker's actor. If a message for the same work is live, the new one is dropped as
    a duplicate and the live one is named. A warning tells if the run will be skipped because the worker is paused or
    disabled. To run a worker in this process: housekeeping run NAME.

    \b
    housekeeping enqueue user_status_cleanup.batch
    housekeeping enqueue batched_git_ref_updates.project_cleanup 2

    Exit status: 0 when the message or its duplicate is in the queue; 1 when Redis or RabbitMQ does not answer.
    """
    settings, sweeps = load_workers()
    sweep = find_worker(sweeps, name)
    run_argument = parse_argument(sweep, argument)
    with database.using(sweep.database), translate_postgres_errors():
        warning = _warning(sweep)
    broker = broker_without_database(settings, sweeps)
    try:
        message: Message[Any] = broker.get_actor(name).message(*([] if sweep.argument_name is None else [run_argument]))
        with record_action("run", name, command_line_user()) as outcome, translate_redis_errors():
            sent = broker.enqueue(message)
            outcome.result = _result(sent)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except BrokerConnectionError as error:
        raise BrokerUnavailable(f"nothing was enqueued: {error_line(error)}") from error
    finally:
        broker.close()
    duplicate_of = sent.options.get("duplicate_of")
    if as_json:
        result = {"worker": name, "queue": sweep.queue, "message_id": sent.message_id, "enqueued": duplicate_of is None}
        click.echo(json.dumps({**result, "duplicate_of": duplicate_of, "warning": warning}))
    elif duplicate_of is not None:
        click.echo(f"dropped as a duplicate: message {duplicate_of} does the same work and has not ended")
    else:
        click.echo(f"enqueued: message {sent.message_id} in queue {sweep.queue}")
        click.echo(f"its run, once a worker process takes it: housekeeping runs {name}")
    if warning is not None:
        click.echo(f"housekeeping: warning: {warning}", err=True)


def _result(sent: Message[Any]) -> str:
    duplicate_of = sent.options.get("duplicate_of")
    return f"duplicate of message {duplicate_of}" if duplicate_of else f"enqueued as message {sent.message_id}"


def _warning(sweep: Sweep) -> str | None:
    if not sweep.enabled:
        return f"{sweep.name} is disabled in HOUSEKEEPING_WORKERS: its run will be skipped"
    problem = sweep.lacks()
    if problem is not None:
        return f"{sweep.name} is not set up ({problem.text}): its run will be skipped"
    override = override_of(sweep.name)
    if override is not None and override.state == "paused":
        return f"{describe_override(override)}: its run will be skipped (housekeeping resume {sweep.name})"
    return None
