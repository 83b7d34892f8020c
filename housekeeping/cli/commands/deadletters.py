"""``housekeeping deadletters``: list, show, requeue and delete messages that failed for good."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import click

from housekeeping.brokers.dead_letters import DeadLetter, DeadLetterStore, dead_letters_of, found
from housekeeping.brokers.dead_letters.bulk import Action, BulkResult, apply, describe_choice
from housekeeping.brokers.dead_letters.formatting import arguments, body, bounded
from housekeeping.brokers.dead_letters.models import readable
from housekeeping.brokers.dead_letters.search import LetterFilter, Position, matching, search
from housekeeping.cli.confirmation import confirm
from housekeeping.cli.context import load_settings, use_database_if_set
from housekeeping.cli.formatting import progress, say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.errors import HousekeepingError, WrongArgument
from housekeeping.core.sanitize import in_one_line, printable
from housekeeping.core.wording import counted, format_duration
from housekeeping.installation import broker_without_database
from housekeeping.presentation.formatting import describe_requeue
from housekeeping.presentation.time_parsing import parse_since
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.workers import configured_sweeps

_ARGUMENTS_WIDTH: Final = 60  # characters of a line in the list
_ERROR_WIDTH: Final = 200
_KEPT: Final = 20  # dead letters that stay, named one by one

Command = TypeVar("Command", bound=Callable[..., Any])


def _filters(command: Command) -> Command:
    """Add the options that choose dead letters."""
    for option in (
        click.option("--until", metavar="TIME", help="Only those that died until this time."),
        click.option(
            "--since",
            metavar="TIME",
            help="Only those that died since this time: 2h, 3d, 03:00 or 2026-11-20T03:00 (UTC).",
        ),
        click.option("--error", metavar="TEXT", help="Only those whose error contains this text."),
        click.option("--actor", metavar="NAME", help="Only those of this actor."),
        click.option("--queue", metavar="NAME", help="Only those of this queue."),
    ):
        command = option(command)
    return command


def _choice(command: Command) -> Command:
    """Add the arguments and options of a change: IDs, filters, or all."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--yes", is_flag=True, help="Do not ask for a confirmation."),
        click.option("--all", "everything", is_flag=True, help="All dead letters of all queues."),
        _filters,
        click.argument("message_ids", metavar="[ID...]", nargs=-1),
    ):
        command = option(command)
    return command


def _filter(given: dict[str, str | None]) -> LetterFilter:
    now = datetime.now(UTC)
    since, until = (None if (text := given[name]) is None else parse_since(text, now) for name in ("since", "until"))
    return LetterFilter(given["queue"], given["actor"], given["error"], since, until)


@click.group("deadletters")
def dead_letters() -> None:
    """List, show, requeue and delete dead letters: messages that failed their last retry or could not be read.

    The broker keeps them for a week. For an actor with a schedule it keeps the last ten.
    """


@dead_letters.command("list", short_help="List dead letters, newest first.")
@_filters
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Maximum number of dead letters."
)
@click.option("--after", metavar="PLACE", help="Continue after this place, which the previous page printed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_letters(limit: int, after: str | None, as_json: bool, **conditions: str | None) -> None:
    """List dead letters of all queues, newest first.

    An unreadable message is listed by its broker id, with the reason instead of the error.

    \b
    housekeeping deadletters list --actor charge --error "timed out"
    housekeeping deadletters list --since 3h --until 1h
    """
    sought, place = _filter(conditions), None if after is None else Position.parse(after)
    store = _store()
    with progress("reading dead letters"):
        total, page = sum(store.counts().values()), search(store, sought, limit, place)
    older = None if page.older is None else str(page.older)
    if as_json:
        letters = [_as_json(letter) for letter in page.letters]
        click.echo(json.dumps({"total": total, "older": older, "dead_letters": letters}))
        return
    now = datetime.now(UTC)
    rows = table("ID", "ACTOR", "QUEUE", ">DIED", ">RETRIES", "ARGUMENTS", "ERROR")
    for letter in page.letters:
        rows.add_row(
            in_one_line(letter.id, _ARGUMENTS_WIDTH),
            in_one_line(letter.message.actor_name, _ARGUMENTS_WIDTH) if letter.message else "(unreadable)",
            in_one_line(letter.queue, _ARGUMENTS_WIDTH),
            "-" if letter.died_at is None else f"{format_duration((now - letter.died_at).total_seconds())} ago",
            str(letter.retries),
            in_one_line(arguments(letter), _ARGUMENTS_WIDTH),
            in_one_line(bounded(letter.error) or "-", _ERROR_WIDTH),
        )
    print_table(rows, empty="no dead letters match" if total else "no dead letters")
    if len(page.letters) < total:
        say(f"{len(page.letters):,} shown, {counted(total, 'dead letter')} in total")
    if older is not None:
        say(f"older ones: --after {shlex.quote(older)}")


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
@_choice
def requeue_letters(**options: Any) -> None:
    """Send dead letters again, with all their retries: those with these IDs, those that match the filters, or all.

    A message keeps its id and its idempotency key. A duplicate of a live message stays a dead letter. If one of the IDs
    is unknown, nothing is sent.

    With filters or --all, the command shows how many it has found and asks for a confirmation. A message that cannot
    be sent stays, and the others are sent.

    \b
    housekeeping deadletters requeue 5f0c2a9e-1f0a-4a43-a7d9-0d7c1f0c2a9e
    housekeeping deadletters requeue --actor charge --error "timed out"

    Exit status: 0 if all were sent or are duplicates; 1 if a message could not be sent, or it was not confirmed; 2 if
    nothing was tried.
    """
    _change("requeue", **options)


@dead_letters.command("delete", short_help="Delete dead letters for good.")
@_choice
def delete_letters(**options: Any) -> None:
    """Delete dead letters for good: those with these IDs, those that match the filters, or all.

    The command shows how many it has found and asks for a confirmation. If one of the IDs is unknown, nothing is
    deleted.

    \b
    housekeeping deadletters delete --actor charge --until 3d

    Exit status: 0 if all were deleted; 1 if the broker stopped answering, or it was not confirmed; 2 if nothing was
    tried.
    """
    _change("delete", **options)


def _change(
    action: Action, message_ids: tuple[str, ...], everything: bool, yes: bool, as_json: bool, **given: str | None
) -> None:
    """Requeue or delete the chosen dead letters. Only a requeue of IDs needs no confirmation."""
    store, sought = _store(), _filter(given)
    if [bool(message_ids), bool(sought), everything].count(True) != 1:
        raise WrongArgument("choose dead letters by their IDs, by filters such as --actor, or take --all of them")
    asks = not yes and (action == "delete" or not message_ids)
    if asks and as_json:
        raise WrongArgument("--json does not ask for a confirmation; add --yes")
    with progress("reading dead letters"):
        letters: Sequence[DeadLetter] = found(store, message_ids) if message_ids else matching(store, sought)
    if message_ids and action == "requeue":
        letters = readable(letters)
    number = counted(len(letters), "dead letter")
    if letters and asks:
        confirm(f"{action.capitalize()} {number}?", f"nothing was {action.removesuffix('e')}ed")
    with progress(f"{action.removesuffix('e')}ing {number}"):
        target = describe_choice(letters, None if message_ids else sought)
        with record_action(action, target, command_line_user()) as outcome:
            result = apply(store, action, letters)
            outcome.result = str(result)
    _print_result(result, as_json, each=bool(message_ids))


def _print_result(result: BulkResult, as_json: bool, *, each: bool) -> None:
    """Print the result of each dead letter, or the numbers and the letters that stay. Exit with 1 if one failed."""
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        for one in result.results if each else result.kept[:_KEPT]:
            say(f"{in_one_line(one.id, _ARGUMENTS_WIDTH)}: {describe_requeue(one)}")
        if not each:
            say(str(result))
    if result.stopped is not None:
        raise HousekeepingError(f"{result.stopped}; {counted(result.left, 'dead letter')} not tried")
    if any(one.outcome == "refused" for one in result.results):
        raise SystemExit(1)


def _store() -> DeadLetterStore:
    """Return the store of the ready-made application. Its broker knows the actor options that requeueing applies."""
    settings = load_settings()
    use_database_if_set(settings)
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
