"""``housekeeping actions``: list what operators have changed."""

from __future__ import annotations

import json
from typing import Final

import click

from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.sanitize import in_one_line
from housekeeping.presentation.formatting import format_time
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.action_log import LoggedAction, logged_actions

_WIDTH: Final = 60  # characters of a user or a target; --json has the whole of it


@click.command()
@click.option("--target", help="Only actions on this worker, lease, key, message or alert.")
@click.option("--user", help="Only actions of this user.")
@click.option("--before", type=int, metavar="ID", help="Continue the list after the action with this ID.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Maximum number of actions."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def actions(target: str | None, user: str | None, before: int | None, limit: int, as_json: bool) -> None:
    """List what operators have changed, newest first: time, user, action, target and result.

    The log has every pause, narrow, resume, purge, restore, acknowledgment, release of a lease or key, and requeue or
    deletion of a dead letter, from the dashboard and from the command line. It has the runs that were sent, and those
    with --force or --confirm; "housekeeping runs" lists every run. USER is user@machine on the command line. Entries
    are kept for a year, in the database "main".
    """
    schema.use_database(load_settings())
    schema.require()
    # One more than shown tells whether there are older ones.
    found = logged_actions(limit + 1, before=before, target=target, user=user)
    shown, more = found[:limit], len(found) > limit
    if as_json:
        click.echo(json.dumps({"actions": [each.as_json() for each in shown], "more": more}))
        return
    rows = table("TIME (UTC)", "USER", "ACTION", "TARGET", "RESULT")
    for each in shown:
        rows.add_row(*_cells(each))
    print_table(rows, empty="no actions")
    if more:
        say(f"older ones: --before {shown[-1].action_id}")


def _cells(action: LoggedAction) -> list[str]:
    user, target = (in_one_line(text, _WIDTH) for text in (action.user, action.target))
    return [format_time(action.at), user, action.action, target, action.result_in_words]
