"""``housekeeping enqueue``: send a run to the worker processes."""

from __future__ import annotations

import json

import click

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import notify, say
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.installation import broker_without_database
from housekeeping.presentation.enqueueing import reason_to_skip, send_run
from housekeeping.presentation.workers import find_worker, parse_argument
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.limits.breaker import with_argument


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def enqueue(name: str, argument: str | None, as_json: bool) -> None:
    """Send a run of worker NAME to the worker processes, as the application does. A few workers take an ARGUMENT.

    The message has the options of the worker's actor. If a message for the same work is live, the new one is dropped as
    a duplicate and the live one is named. A warning on stderr says if the run will be skipped, because the worker is
    paused or disabled. To run a worker in this process: housekeeping run NAME.

    \b
    housekeeping enqueue user_status_cleanup.batch
    housekeeping enqueue batched_git_ref_updates.project_cleanup 2

    Exit status: 0 when the message or its duplicate is in the queue; 1 when Redis or RabbitMQ does not answer.
    """
    settings, sweeps = load_workers()
    sweep = find_worker(sweeps, name)
    run_argument = parse_argument(sweep, argument)
    with database.using(sweep.database), translate_postgres_errors():
        warning = reason_to_skip(sweep)
    broker = broker_without_database(settings, sweeps)
    try:
        with record_action("run", with_argument(name, argument), command_line_user()) as outcome:
            sent = send_run(broker, sweep, run_argument)
            outcome.result = str(sent)
    finally:
        broker.close()
    if as_json:
        result = {"worker": name, "queue": sent.queue, "message_id": sent.message_id}
        dropped = {"enqueued": sent.duplicate_of is None, "duplicate_of": sent.duplicate_of}
        click.echo(json.dumps({**result, **dropped, "warning": warning}))
    else:
        say(str(sent))
        if sent.duplicate_of is None:
            say(f"its run, once a worker process takes it: housekeeping runs {name}")
    if warning is not None:
        notify(f"warning: {warning}")
