"""``housekeeping deadletters``"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

import click

from housekeeping.brokers.dead_letters import DeadLetter, DeadLetterStore, dead_letters_of, found, requeue
from housekeeping.brokers.dead_letters.formatting import arguments, body, bounded
from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import out, print_table, progress, table
from housekeeping.core.sanitize import in_one_line, printable
from housekeeping.installation import broker_beside
from housekeeping.presentation.descriptions import describe_requeue
from housekeeping.presentation.formatting import format_duration
from housekeeping.workers import configured_sweeps

_ARGUMENTS_WIDTH: Final = 60  # characters of a line in the list
_ERROR_WIDTH: Final = 200


@click.group("deadletters", short_help="List, show and requeue messages that were given up.")
def dead_letters() -> None:
    """Messages that were given up: after their last retry, or because nothing could read them.

    The broker keeps them for a week; of an actor with a schedule, the last ten.
    """


@dead_letters.command("list", short_help="List dead letters, the newest first.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many at most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def list_letters(limit: int, as_json: bool) -> None:
    """List dead letters of all queues, the newest first.

    One that nothing can read is listed by its broker's id, with the reason in place of the error.
    """
    store = _store()
    with progress("asking the broker"):
        total, letters = sum(store.counts().values()), store.newest(limit)
    if as_json:
        click.echo(json.dumps({"total": total, "dead_letters": [_facts(letter) for letter in letters]}))
        return
    now = datetime.now(UTC)
    shown = table("ID", "ACTOR", "QUEUE", ">DIED", ">RETRIES", "ARGUMENTS", "ERROR")
    for letter in letters:
        shown.add_row(
            in_one_line(letter.id, _ARGUMENTS_WIDTH),
            in_one_line(letter.message.actor_name, _ARGUMENTS_WIDTH) if letter.message else "(unreadable)",
            in_one_line(letter.queue, _ARGUMENTS_WIDTH),
            "-" if letter.died_at is None else f"{format_duration((now - letter.died_at).total_seconds())} ago",
            str(letter.retries),
            in_one_line(arguments(letter), _ARGUMENTS_WIDTH),
            in_one_line(bounded(letter.error) or "-", _ERROR_WIDTH),
        )
    print_table(shown)
    if total > len(letters):
        out.print(f"the newest {len(letters):,} of {total:,}; more with --limit")


@dead_letters.command("show", short_help="Show one dead letter whole.")
@click.argument("message_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def show_letter(message_id: str, as_json: bool) -> None:
    """Show one dead letter whole: arguments, options, traceback; passwords are masked.

    ID is a message id, or the broker's id of one that nothing can read.
    """
    with progress("asking the broker"):
        [letter] = found(_store(), [message_id])
    message = letter.message
    facts = _facts(letter)
    if message is not None:
        facts["message_timestamp"] = message.message_timestamp
    facts |= body(letter)
    if as_json:
        click.echo(json.dumps(facts, default=str))
        return
    for name, value in facts.items():
        if name not in ("arguments", "error"):
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            click.echo(f"{name}:{chr(10) if chr(10) in text else ' '}{printable(text)}")


@dead_letters.command("requeue", short_help="Send dead letters once more.")
@click.argument("message_ids", metavar="ID...", nargs=-1, required=True)
def requeue_letters(message_ids: tuple[str, ...]) -> None:
    """Send dead letters once more, as new: their retries begin again.

    A message keeps its id and its idempotency key. One that is a duplicate of a live message stays where it is, and so
    does everything when one of the ids is unknown.
    """
    with progress("asking the broker"):
        results = requeue(_store(), message_ids)
    for result in results:
        click.echo(f"{in_one_line(result.id, _ARGUMENTS_WIDTH)}: {describe_requeue(result)}")
    if any(result.outcome == "refused" for result in results):
        raise SystemExit(1)


def _store() -> DeadLetterStore:
    """Of the ready-made application, whose workers' options a requeued message has to meet; needs no database."""
    settings = load_settings()
    return dead_letters_of(broker_beside(settings, configured_sweeps(settings)))


def _facts(letter: DeadLetter) -> dict[str, Any]:
    message = letter.message
    return {
        "message_id": None if message is None else message.message_id,
        "broker_id": letter.broker_id,
        "actor": None if message is None else message.actor_name,
        "queue": letter.queue,
        "died_at": None if letter.died_at is None else letter.died_at.isoformat(timespec="milliseconds"),
        "retries": letter.retries,
        "arguments": in_one_line(arguments(letter), _ARGUMENTS_WIDTH),
        "error": in_one_line(bounded(letter.error) or "", _ERROR_WIDTH) or None,
        "unreadable": letter.unreadable or None,
    }
