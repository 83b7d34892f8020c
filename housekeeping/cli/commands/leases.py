"""``housekeeping leases``"""

from __future__ import annotations

import json
from typing import Final

import click
import redis

from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import out, print_table, table
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.redis_client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.settings import Settings
from housekeeping.installation import use_database
from housekeeping.presentation.formatting import format_duration
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases, release_lease

_KEY_WIDTH: Final = 1000  # characters; --json has the whole of it


@click.group(short_help="Show who holds which lease, and take one from its holder.")
def leases() -> None:
    """Leases keep two runs of one key from being at work at the same time.

    A lease frees itself when its holder dies: a sweep's after a minute without a sign of life, another one when its
    ttl is over. Only a holder that lives and hangs has to be helped along.
    """


@leases.command("list", short_help="Show who holds which lease.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def list_leases(as_json: bool) -> None:
    """Show every lease that is held: by whom, for how long, until when, at which epoch, in which run.

    FREE IN is the time until it ends by itself unless its holder renews it; "lost" means that Redis has it no more
    although its run has not ended, so that the next one may begin. SILENT is how long ago the run last gave a sign
    of life: over a minute, and the next run takes its place.
    """
    client, namespace = _servers()
    try:
        held, unreachable = held_leases(client, namespace), None
    except RedisUnavailable as error:
        held, unreachable = held_leases(None, namespace), str(error)
    if as_json:
        click.echo(json.dumps({"leases": [each.as_json() for each in held], "redis": unreachable or "ok"}))
        return
    if unreachable:
        out.print(f"{unreachable}; what follows is what the database knows", style="yellow", soft_wrap=True)
    if not held:
        out.print("no run that holds a lease is open" if unreachable else "no lease is held")
        return
    shown = table("KEY", "HOLDER", ">HELD FOR", ">FREE IN", ">EPOCH", ">RUN", ">SILENT")
    for each in held:
        shown.add_row(
            in_one_line(each.key, _KEY_WIDTH),
            _holder(each),
            _length(each.held_for_s),
            ("?" if unreachable else "lost") if each.remaining_s is None else format_duration(each.remaining_s),
            *("-" if number is None else str(number) for number in (each.epoch, each.run_id)),
            _length(each.silent_for_s),
        )
    print_table(shown)


@leases.command("release", short_help="Take a lease from its holder.")
@click.argument("key")
def release(key: str) -> None:
    """Take the lease KEY from whoever holds it, so that the next run may begin.

    The holder's epoch is made an old one first: should it still live, or only sleep, it commits nothing more in the
    database, and its run ends as lost_lease, to be gone on from by the next one. What it does elsewhere (files, git,
    other servers) it may go on doing until it notices, after a third of the lease's ttl at the latest.
    """
    client, namespace = _servers()
    was = release_lease(client, namespace, key)
    out.print(f"released: {in_one_line(key, _KEY_WIDTH)}, held by {_holder(was)}", soft_wrap=True)
    if was.epoch is None:
        click.echo(
            "housekeeping: its holder has no epoch, so nothing keeps it from writing on until it notices", err=True
        )


def _servers() -> tuple[redis.Redis, str]:
    """Redis; and the database where there is one."""
    settings: Settings = load_settings()
    client = redis_client(settings.require_redis_url())
    if settings.database_url is not None:
        use_database(settings)
        schema.require()
    return client, settings.namespace


def _holder(lease: HeldLease) -> str:
    return in_one_line(lease.holder, _KEY_WIDTH)


def _length(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
