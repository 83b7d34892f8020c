"""``housekeeping acknowledge``: say that active alerts are known."""

from __future__ import annotations

import json

import click

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import progress, say
from housekeeping.cli.status_report import read_status
from housekeeping.core.errors import WrongArgument
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.ledger.acknowledgments import acknowledge as acknowledge_alerts
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action


@click.command()
@click.argument("alert")
@click.argument("worker", required=False, shell_complete=complete_worker)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def acknowledge(alert: str, worker: str | None, as_json: bool) -> None:
    """Acknowledge the active alerts named ALERT, of all workers or of WORKER.

    The alerts stay active. "housekeeping status" shows them with the operator's name, the dashboard below the others.
    An acknowledgment ends after a day. It does not apply to an alert that begins later.

    \b
    housekeeping acknowledge overdue
    housekeeping acknowledge backlog ci.stuck_builds.drop_canceling
    """
    settings, sweeps = load_workers()
    if worker is not None:
        find_worker(sweeps, worker)
    with progress("reading"):
        active = read_status(settings, sweeps, worker).active_alerts()
    found = sorted({name for name, each in active if each.name == alert and worker in (None, name)})
    if not found:
        known = ", ".join(sorted({each.name for _, each in active})) or "none"
        raise WrongArgument(f"no alert {alert!r} is active{f' of {worker}' if worker else ''}; active alerts: {known}")
    user = command_line_user()
    with record_action("acknowledge", alert, user) as outcome:
        acknowledge_alerts([(name, alert) for name in found], user)
        outcome.result = f"{alert} acknowledged for {', '.join(name or 'the installation' for name in found)}"
    if as_json:
        click.echo(json.dumps({"alert": alert, "workers": found, "user": user}))
    else:
        say(outcome.result)
