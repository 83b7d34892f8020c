"""``housekeeping deadletters``: list, show and requeue messages that failed for good."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

import click

from housekeeping.brokers.dead_letters import DeadLetter, DeadLetterStore, dead_letters_of, found, requeue
from housekeeping.brokers.dead_letters.formatting import arguments, body, bounded
from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import out, progress
from housekeeping.cli.tables import print_table, table
from housekeeping.core.sanitize import in_one_line, printable
from housekeeping.core.wording import format_duration
from housekeeping.installation import broker_without_database
from housekeeping.presentation.formatting import describe_requeue
from housekeeping.workers import configured_sweeps

_ARGUMENTS_WIDTH: Final = 60  # characters of a line in the list
_ERROR_WIDTH: Final = 200


@click.group("deadletters")
def dead_letters() -> None:
    """List, show and requeue dead letters: messages that failed their last retry or could not be read.

    The broker keeps them for a week. For an actor with a schedule it keeps the last ten.
    """


@dead_letters.command("list", short_help="List dead letters, newest first.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Maximum number of dead letters."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_letters(limit: int, as_json: bool) -> None:
    """List the dead letters of all queues, newest first.

    An unreadable message is listed by its broker id, with the reason instead of the error.
    """
    store = _store()
    with progress("reading dead letters"):
        total, letters = sum(store.counts().values()), store.newest(limit)
    if as_json:
        click.echo(json.dumps({"total": total, "dead_letters": [_as_json(letter) for letter in letters]}))
        return
    now = datetime.now(UTC)
    rows = table("ID", "ACTOR", "QUEUE", ">DIED", ">RETRIES", "ARGUMENTS", "ERROR")
    for letter in letters:
        rows.add_row(
            in_one_line(letter.id, _ARGUMENTS_WIDTH),
            in_one_line(letter.message.actor_name, _ARGUMENTS_WIDTH) if letter.message else "(unreadable)",
            in_one_line(letter.queue, _ARGUMENTS_WIDTH),
            "-" if letter.died_at is None else f"{format_duration((now - letter.died_at).total_seconds())} ago",
            str(letter.retries),
            in_one_line(arguments(letter), _ARGUMENTS_WIDTH),
            in_one_line(bounded(letter.error) or "-", _ERROR_WIDTH),
        )
    print_table(rows)
    if total > len(letters):
        out.print(f"the newest {len(letters):,} of {total:,}; --limit shows more")


@dead_letters.command("show", short_help="Show one dead letter in full.")
@click.argument("message_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_letter(message_id: str, as_json: bool) -> None:
    """Show one dead letter in full: arguments, options and traceback. Passwords are masked.

    ID is a message id, or the broker id of an unreadable message.
    """
    with progress("reading dead letters"):
        [letter] = found(_store(), [message_id])
    message = letter.message
    fields = _as_json(letter)
    if message is not None:
        fields["message_timestamp"] = message.message_timestamp
    fields |= body(letter)
    if as_json:
        click.echo(json.dumps(fields, default=str))
        return
    for name, value in fields.items():
        if name not in ("arguments", "error"):
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            click.echo(f"{name}:{chr(10) if chr(10) in text else ' '}{printable(text)}")


@dead_letters.command("requeue", short_help="Send dead letters again.")
@click.argument("message_ids", metavar="ID...", nargs=-1, required=True)
def requeue_letters(message_ids: tuple[str, ...]) -> None:
    """Send dead letters again, with all their retries.

    A message keeps its id and its idempotency key. A duplicate of a live message stays a dead letter. If one of the
    ids is unknown, nothing is sent.
    """
    with progress("requeueing"):
        results = requeue(_store(), message_ids)
    for result in results:
        click.echo(f"{in_one_line(result.id, _ARGUMENTS_WIDTH)}: {describe_requeue(result)}")
    if any(result.outcome == "refused" for result in results):
        raise SystemExit(1)


def _store() -> DeadLetterStore:
    """Return the store of the ready-made application. Its broker knows the actor options that requeueing applies."""
    settings = load_settings()
    return dead_letters_of(broker_without_database(settings, configured_sweeps(settings)))


def _as_json(letter: DeadLetter) -> dict[str, Any]:
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
