"""``housekeeping dedup``: list and release deduplication keys."""

from __future__ import annotations

import json
from typing import Final

import click
import redis

from housekeeping.cli.context import load_settings, use_database_if_set
from housekeeping.cli.formatting import say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.errors import Refused
from housekeeping.core.redis.client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.wording import format_duration
from housekeeping.middleware.deduplication.keys import key_prefix
from housekeeping.middleware.deduplication.listing import HeldKey, held_key, held_keys, release_key
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action

_KEY_WIDTH: Final = 1000  # characters; --json has the whole of it
#: State of a key -> what releasing it means.
_CONSEQUENCES: Final = {
    "waiting": "its message stays in the queue; if another is sent now, one of the two runs",
    "running": "its message keeps running; if another is sent now, both may run at the same time",
    "reserved": "its sender may be about to enqueue a message; if another is sent now, one of the two runs",
}


@click.group()
def dedup() -> None:
    """List and release deduplication keys. A key prevents two live messages for the same work.

    A key consists of the actor's name and the call's arguments. The message releases its key when it ends, or with
    deduplicate="until_executing" when it starts. If the process dies, the key expires after its ttl. Until then, `send`
    marks further messages as duplicates and logs them with job_status "deduplicated".
    """


@dedup.command("list", short_help="List held keys and their messages.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Maximum number of keys."
)
def list_keys(as_json: bool, limit: int) -> None:
    """List every held key with its message, state and remaining time.

    \b
    waiting    the message is queued, delayed, or waits for a retry
    running    the message is being processed; the key is renewed
    reserved   a sender holds the key until its message is queued

    EXPIRES IN is the time until the key expires, unless its message renews it. AGAIN means that one more run follows
    this one because a duplicate arrived ("if_deduplicated": "reschedule_once").
    """
    client, namespace = _redis()
    held, more = held_keys(client, namespace, limit)
    if as_json:
        click.echo(json.dumps({"keys": [each.as_json() for each in held], "more": more}))
        return
    rows = table("KEY", "STATE", ">EXPIRES IN", "AGAIN", "MESSAGE")
    for each in held:
        rows.add_row(
            in_one_line(each.key, _KEY_WIDTH),
            in_one_line(each.state, _KEY_WIDTH),
            format_duration(each.remaining.total_seconds()),
            "yes" if each.again else "-",
            in_one_line(each.message_id, _KEY_WIDTH),
        )
    print_table(rows, empty="no keys are held")
    if more:
        say(f"there are more than these {limit:,}; --limit shows more")


@dedup.command("release", short_help="Release keys, so that their work can be sent again.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the keys as JSON.")
def release(keys: tuple[str, ...], as_json: bool) -> None:
    """Release each KEY, as `housekeeping dedup list` shows it, so that its work can be sent again.

    Use this for a key whose message is gone; without it, the key expires after its ttl. No message is removed. A live
    message continues, and it cannot renew or release the key after another message acquired it. Until it ends, its
    work may be done twice. Idempotent actors tolerate that.

    Name each key in full; patterns are not supported. If one of the keys is not held, none is released.
    """
    client, namespace = _redis()
    names = [key.removeprefix(key_prefix(namespace)) for key in dict.fromkeys(keys)]
    results = []
    for held in [_held(client, namespace, name) for name in names]:
        with record_action("release_key", held.key, command_line_user()) as outcome:
            released = release_key(client, namespace, held.key)
            outcome.result = "already released by its message" if released is None else f"held by {_message(released)}"
        results.append({**(released or held).as_json(), "released": released is not None})
        if not as_json:
            _print_release(held, released)
    if as_json:
        click.echo(json.dumps({"keys": results}))


def _print_release(held: HeldKey, released: HeldKey | None) -> None:
    key, consequence = in_one_line(held.key, _KEY_WIDTH), _CONSEQUENCES.get(held.state, _CONSEQUENCES["waiting"])
    say(f"{key}: {_message(held)}; {consequence}")
    if released is None:
        say(f"{key}: already released by its message")
        return
    again = "; the requested further run follows when its message ends" if released.again else ""
    say(f"released: {key}, held by {_message(released)}{again}")


def _held(client: redis.Redis, namespace: str, key: str) -> HeldKey:
    if any(character in key for character in "*?["):
        raise Refused(f"{key!r} is a pattern; name each key in full, as housekeeping dedup list shows it")
    return held_key(client, namespace, key)


def _message(held: HeldKey) -> str:
    return in_one_line(f"message {held.message_id}, {held.state}", _KEY_WIDTH)


def _redis() -> tuple[redis.Redis, str]:
    settings = load_settings()
    use_database_if_set(settings)
    return redis_client(settings.require_redis_url()), settings.namespace
