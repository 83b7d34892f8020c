"""``housekeeping dedup``"""

from __future__ import annotations

import json
from typing import Final

import click
import redis

from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import out, print_table, table
from housekeeping.core.errors import Refused
from housekeeping.core.redis_client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.middleware.deduplication.keys import key_prefix
from housekeeping.middleware.deduplication.listing import HeldKey, held_key, held_keys, release_key
from housekeeping.presentation.formatting import format_duration

_KEY_WIDTH: Final = 1000  # characters; --json has the whole of it
#: What releasing a key means, by what its message is about to do.
_MEANS: Final = {
    "waiting": "its message stays in the queue; should another be sent now, one of the two runs",
    "running": "its message runs on; should another be sent now, that may run beside it",
    "reserved": "its sender may be about to enqueue a message; should another be sent now, one of the two runs",
}


@click.group(short_help="Show which message holds which deduplication key, and free one.")
def dedup() -> None:
    """A deduplication key keeps two messages for the same work from being live at the same time.

    It is made of the actor's name and of the call's arguments. Its message frees it when it ends, or with
    deduplicate="until_executing" when it starts. That of one that died is free when its ttl is over.
    Messages sent meanwhile come back to their senders marked as duplicates, logged with job_status "deduplicated".
    """


@dedup.command("list", short_help="Show which message holds which key.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Keys at the most.")
def list_keys(as_json: bool, limit: int) -> None:
    """Show every key that is held: by which message, in which state, and for how long yet.

    \b
    waiting    its message is in the queue, delayed, or waits for a retry
    running    its message is at work; the key is renewed
    reserved   a sender has taken it for seconds, before its message is in the queue

    FREE IN is the time until it is free by itself, unless its message gives another sign of life. AGAIN: one more
    run is made after this one, because a duplicate arrived ("if_deduplicated": "reschedule_once").
    """
    client, namespace = _redis()
    held, more = held_keys(client, namespace, limit)
    if as_json:
        click.echo(json.dumps({"keys": [each.as_json() for each in held], "more": more}))
        return
    if not held:
        out.print("no key is held")
        return
    shown = table("KEY", "STATE", ">FREE IN", "AGAIN", "MESSAGE")
    for each in held:
        shown.add_row(
            in_one_line(each.key, _KEY_WIDTH),
            in_one_line(each.state, _KEY_WIDTH),
            format_duration(each.remaining.total_seconds()),
            "yes" if each.again else "-",
            in_one_line(each.message_id, _KEY_WIDTH),
        )
    print_table(shown)
    if more:
        out.print(f"there are more than these {limit:,}; --limit shows more of them", soft_wrap=True)


@dedup.command("release", short_help="Free keys, so that their work can be sent again.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
def release(keys: tuple[str, ...]) -> None:
    """Free each KEY, as `housekeeping dedup list` shows it, so that its work can be sent again at once.

    For a key that stays behind though its message is gone: otherwise it is free when its ttl is over. No message is
    removed, and a message that lives is not harmed: it goes on, and can neither renew nor free the key when another
    message has taken it. But until it has ended, its work may be done twice; idempotent actors bear that.

    Each key is named in full; there are no patterns. When one of them is not held, nothing is freed.
    """
    client, namespace = _redis()
    names = [key.removeprefix(key_prefix(namespace)) for key in dict.fromkeys(keys)]
    for held in [_held(client, namespace, name) for name in names]:
        out.print(
            f"{in_one_line(held.key, _KEY_WIDTH)}: {_what(held)}; {_MEANS.get(held.state, _MEANS['waiting'])}",
            soft_wrap=True,
        )
        was = release_key(client, namespace, held.key)
        if was is None:
            out.print(f"{in_one_line(held.key, _KEY_WIDTH)}: free already, its message ended just now", soft_wrap=True)
            continue
        again = "; the one more run that was asked for is made when it ends" if was.again else ""
        out.print(f"released: {in_one_line(held.key, _KEY_WIDTH)}, held by {_what(was)}{again}", soft_wrap=True)


def _held(client: redis.Redis, namespace: str, key: str) -> HeldKey:
    if any(sign in key for sign in "*?["):
        raise Refused(f"{key!r} looks like a pattern; name each key in full, as housekeeping dedup list shows it")
    return held_key(client, namespace, key)


def _what(held: HeldKey) -> str:
    return in_one_line(f"message {held.message_id}, {held.state}", _KEY_WIDTH)


def _redis() -> tuple[redis.Redis, str]:
    settings = load_settings()
    return redis_client(settings.require_redis_url()), settings.namespace
