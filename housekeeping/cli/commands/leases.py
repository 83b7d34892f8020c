"""``housekeeping leases``: list and release leases."""

from __future__ import annotations

import json
from typing import Final

import click
import redis

from housekeeping.cli.context import load_settings, use_database_if_set
from housekeeping.cli.formatting import notify, say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.redis.client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.wording import format_duration
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases, release_lease

_KEY_WIDTH: Final = 1000  # characters; --json has the whole of it


@click.group()
def leases() -> None:
    """List and release leases. A lease prevents two runs with the same key at the same time.

    The lease of a dead holder becomes free by itself: the lease of a sweep after a minute without a heartbeat, any
    other when its ttl expires. Release a lease by hand only if its holder hangs.
    """


@leases.command("list", short_help="List held leases and their holders.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_leases(as_json: bool) -> None:
    """List every held lease with its holder, age, expiry, epoch and run.

    EXPIRES IN is the time until the lease expires unless its holder renews it. "lost" means that Redis no longer has
    the lease although its run has not ended, so the next run may start. HEARTBEAT is the age of the run's last
    heartbeat. After a minute, the next run takes over.
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
        say(f"{unreachable}; showing the leases that the database knows", style="yellow")
    rows = table("KEY", "HOLDER", ">HELD FOR", ">EXPIRES IN", ">EPOCH", ">RUN", ">HEARTBEAT")
    for each in held:
        rows.add_row(
            in_one_line(each.key, _KEY_WIDTH),
            _holder(each),
            format_duration(each.held_for_s),
            ("?" if unreachable else "lost") if each.remaining_s is None else format_duration(each.remaining_s),
            *("-" if shown is None else str(shown) for shown in (each.epoch, each.run_label)),
            "-" if each.silent_for_s is None else f"{format_duration(each.silent_for_s)} ago",
        )
    print_table(rows, empty="no open run holds a lease" if unreachable else "no leases are held")


@leases.command("release", short_help="Release a lease that a hanging process holds.")
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print the released lease as JSON.")
def release(key: str, as_json: bool) -> None:
    """Release the lease KEY, so that the next run can start.

    The holder is fenced off first: if it is still alive, it can no longer commit to the database. Its run ends as
    lost_lease and the next run resumes it. Until the holder notices, at the latest after a third of the lease's ttl, it
    may still change files, git repositories or other servers.
    """
    client, namespace = _servers()
    with record_action("release_lease", key, command_line_user()) as outcome:
        released = release_lease(client, namespace, key)
        outcome.result = f"released, held by {_holder(released)}"
    if as_json:
        click.echo(json.dumps(released.as_json()))
    else:
        say(f"released: {in_one_line(key, _KEY_WIDTH)}, held by {_holder(released)}")
    if released.epoch is None:
        notify("its holder has no epoch and cannot be fenced off: it may write until it notices the loss")


def _servers() -> tuple[redis.Redis, str]:
    """Return a Redis client and the namespace, after configuring the database if there is one."""
    settings = load_settings()
    client = redis_client(settings.require_redis_url())
    use_database_if_set(settings)
    if settings.database_url is not None:
        schema.require_all()
    return client, settings.namespace


def _holder(lease: HeldLease) -> str:
    return in_one_line(lease.holder, _KEY_WIDTH)
