"""``housekeeping enqueue``, ``deadletters``, ``dedup`` and ``leases``: messages, and the keys and leases they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
import redis

from housekeeping.app import broker_without_database
from housekeeping.brokers import dead_letters_of
from housekeeping.brokers.dead_letters import (
    NAME_WIDTH,
    BulkResult,
    DeadLetter,
    DeadLetterStore,
    LetterAction,
    LetterFilter,
    LetterPosition,
    apply,
    body,
    describe_choice,
    found,
    readable,
    search,
)
from housekeeping.cli.main import load_settings, load_workers, use_database_if_set
from housekeeping.cli.output import (
    complete_worker,
    confirm,
    json_option,
    notify,
    options,
    page_options,
    print_as_json,
    print_list,
    progress,
    read_times,
    say,
    time_options,
    wants_json,
)
from housekeeping.core.errors import HousekeepingError, RedisUnavailable, Refused, WrongArgument
from housekeeping.core.logs import counted, format_duration, in_one_line, printable
from housekeeping.core.redis import redis_client
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.engine.guard import with_argument
from housekeeping.insight.causes import LONGEST, Cause, read_causes
from housekeeping.insight.why import reason_to_skip, send_run
from housekeeping.insight.wording import (
    as_json,
    describe_requeue,
    find_worker,
    format_age,
    lost_holder,
    parse_argument,
    parse_since,
)
from housekeeping.leases.renewal import lease_store
from housekeeping.ledger import schema
from housekeeping.ledger.leases import HeldLease, LeaseStore, held_leases, release_lease
from housekeeping.ledger.operators import command_line_user, record_action
from housekeeping.middleware.keys import HeldKey, held_key, held_keys, key_prefix, release_key
from housekeeping.workers import configured_sweeps

_KEPT: Final = 20  # dead letters that stay, named one by one

#: The options that choose dead letters.
_filters: Final = options(
    click.option("--queue", metavar="NAME", help="Only those of this queue."),
    click.option("--actor", metavar="NAME", help="Only those of this actor."),
    click.option("--error", metavar="TEXT", help="Only those whose error contains this text."),
    time_options("died"),
)
#: The arguments and options of a change: IDs, filters, or all.
_choice: Final = options(
    click.argument("message_ids", metavar="[ID...]", nargs=-1),
    _filters,
    click.option("--all", "everything", is_flag=True, help="All dead letters of all queues."),
    click.option("--yes", is_flag=True, help="Do not ask for a confirmation."),
    json_option(),
)


def _filter(queue: str | None, actor: str | None, error: str | None, **times: str | None) -> LetterFilter:
    return LetterFilter(queue, actor, error, *read_times(times, datetime.now(UTC)))


@click.group("deadletters")
def dead_letters() -> None:
    """List, show, requeue and delete dead letters: messages that failed their last retry or could not be read.

    The broker keeps them for a week. For an actor with a schedule it keeps the last ten.
    """


@dead_letters.command("list", short_help="List dead letters, newest first.")
@_filters
@page_options()
def list_letters(limit: int, before: str | None, **conditions: str | None) -> None:
    """List dead letters of all queues, newest first.

    An unreadable message is listed by its broker id, with the reason instead of the error.

    \b
    housekeeping deadletters list --actor charge --error "timed out"
    housekeeping deadletters list --since 3h --until 1h
    """
    sought, place = _filter(**conditions), None if before is None else LetterPosition.parse(before)
    store = _store()
    with progress("reading dead letters"):
        total, page = sum(store.counts().values()), search(store, sought, limit, place)
    older = None if page.older is None else str(page.older)
    empty = "no dead letters match" if total else "no dead letters"
    print_list("dead_letters", page.letters, _COLUMNS, _cells, empty, total=total, older=older)
    if len(page.letters) < total and not wants_json():
        say(f"{len(page.letters):,} shown, {counted(total, 'dead letter')} in total")


_COLUMNS: Final = ("ID", "ACTOR", "QUEUE", ">DIED", ">RETRIES", "ARGUMENTS", "ERROR")


def _cells(letter: DeadLetter) -> list[str]:
    shown, actor = letter.as_json(), letter.message.actor_name if letter.message else "(unreadable)"
    return [
        *(in_one_line(text, NAME_WIDTH) for text in (letter.id, actor, letter.queue)),
        "-" if letter.died_at is None else format_age(letter.died_at, datetime.now(UTC)),
        str(letter.retries),
        shown["arguments"],
        shown["error"] or "-",
    ]


@click.command()
@click.option(
    "--since", metavar="TIME", default="24h", show_default=True, help="Only errors since this time, at most 7d."
)
@json_option()
def errors(since: str) -> None:
    """Show the errors of failed runs, rejected rows and dead letters, each cause once, the latest first.

    Errors that differ only in ids, numbers, paths and quoted values have the same cause. CAUSE is the last error, and
    the innermost one: the error that led to the others. "housekeeping runs ID" shows the LAST RUN that had it.

    \b
    housekeeping errors --since 1h
    """
    settings, sweeps = load_workers()
    now = datetime.now(UTC)
    begin = max(parse_since(since, now), now - LONGEST)
    with progress("reading errors"):
        read = read_causes(tuple(database.by_name()), None if settings.redis_url is None else _store(), begin)
    for each in read.incomplete:
        notify(f"warning: {each}")
    columns = (">ROWS", ">RUNS", ">DEAD LETTERS", ">FIRST", ">LAST", ">LAST RUN", "OF", "CAUSE")
    more = {"since": read.since, "incomplete": read.incomplete}
    print_list("causes", read.causes, columns, lambda cause: _cause_cells(cause, now), "no errors", **more)


def _cause_cells(cause: Cause, now: datetime) -> list[str]:
    numbers = (f"{number:,}" if number else "-" for number in (cause.rows, cause.runs, cause.dead_letters))
    times = (format_age(at, now) for at in (cause.first_at, cause.last_at))
    return [*numbers, *times, cause.last_run or "-", cause.subjects, cause.example]


@dead_letters.command("show", short_help="Show one dead letter in full.")
@click.argument("message_id", metavar="ID")
@json_option()
def show_letter(message_id: str) -> None:
    """Show one dead letter in full: arguments, options and traceback. Passwords are masked.

    ID is a message id, or the broker id of an unreadable message.
    """
    with progress("reading dead letters"):
        [letter] = found(_store(), [message_id])
    fields = {**letter.as_json(), "sent_at": letter.sent_at, **body(letter)}
    if print_as_json(fields):
        return
    for name, value in fields.items():
        if name not in ("arguments", "error") and value is not None:
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
    action: LetterAction, message_ids: tuple[str, ...], everything: bool, yes: bool, **given: str | None
) -> None:
    """Requeue or delete the chosen dead letters. Only a requeue of IDs needs no confirmation."""
    store, sought = _store(), _filter(**given)
    if [bool(message_ids), bool(sought), everything].count(True) != 1:
        raise WrongArgument("choose dead letters by their IDs, by filters such as --actor, or take --all of them")
    asks = not yes and (action == "delete" or not message_ids)
    if asks and wants_json():
        raise WrongArgument("--json does not ask for a confirmation; add --yes")
    with progress("reading dead letters"):
        letters: Sequence[DeadLetter] = (
            found(store, message_ids) if message_ids else search(store, sought).letters[::-1]
        )
    if message_ids and action == "requeue":
        readable(letters)
    number = counted(len(letters), "dead letter")
    if letters and asks:
        confirm(f"{action.capitalize()} {number}?", f"nothing was {action.removesuffix('e')}ed")
    doing = f"{action.removesuffix('e')}ing {number}"
    with progress(doing) as line:
        target = describe_choice(letters, None if message_ids else sought)
        with record_action(action, target, command_line_user()) as outcome:

            def report(text: str) -> None:
                line(f"{doing}: {text}")
                outcome.report(text)

            result = apply(store, action, letters, report)
            outcome.result = str(result)
    _print_result(result, each=bool(message_ids))


def _print_result(result: BulkResult, *, each: bool) -> None:
    """Print the result of each dead letter, or the numbers and the letters that stay. Exit with 1 if one failed."""
    if not print_as_json(result):
        for one in result.results if each else result.kept[:_KEPT]:
            say(f"{in_one_line(one.id, NAME_WIDTH)}: {describe_requeue(one)}")
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
@json_option()
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Maximum number of keys."
)
def list_keys(limit: int) -> None:
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
    columns = ("KEY", "STATE", ">EXPIRES IN", "AGAIN", "MESSAGE")
    print_list("keys", held, columns, _key_cells, "no keys are held", more=more)
    if more and not wants_json():
        say(f"there are more than these {limit:,}; --limit shows more")


def _key_cells(held: HeldKey) -> list[str]:
    key, state, message = (in_one_line(text, _KEY_WIDTH) for text in (held.key, held.state, held.message_id))
    return [key, state, format_duration(held.remaining_s), "yes" if held.again else "-", message]


@dedup.command("release", short_help="Release keys, so that their work can be sent again.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@json_option("Print the keys as JSON.")
def release_keys(keys: tuple[str, ...]) -> None:
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
        results.append({**as_json(released or held), "released": released is not None})
        if not wants_json():
            _print_release(held, released)
    print_as_json({"keys": results})


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


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@json_option()
def enqueue(name: str, argument: str | None) -> None:
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
    if not print_as_json({**as_json(sent), "enqueued": sent.duplicate_of is None, "warning": warning}):
        say(str(sent))
        if sent.duplicate_of is None:
            say(f"its run, once a worker process takes it: housekeeping runs {name}")
    if warning is not None:
        notify(f"warning: {warning}")


@click.group()
def leases() -> None:
    """List and release leases. A lease prevents two runs with the same key at the same time.

    The lease of a dead holder becomes free by itself: the lease of a sweep after a minute without a heartbeat, any
    other when its ttl expires. Release a lease by hand only if its holder hangs.
    """


@leases.command("list", short_help="List held leases and their holders.")
@json_option()
def list_leases() -> None:
    """List every held lease with its holder, age, expiry, epoch and run.

    EXPIRES IN is the time until the lease expires unless its holder renews it. "lost" means that the lease is no
    longer stored although its run has not ended, so the next run may start. HEARTBEAT is the age of the run's last
    heartbeat. After a minute, the next run takes over.
    """
    store = _lease_store()
    try:
        held, unreachable = held_leases(store), None
    except RedisUnavailable as error:
        held, unreachable = held_leases(None), str(error)
    if unreachable and not wants_json():
        say(f"{unreachable}; showing the leases that the database knows", style="yellow")

    def cells(lease: HeldLease) -> list[str]:
        return [
            in_one_line(lease.key, _KEY_WIDTH),
            _holder(lease),
            format_duration(lease.held_for_s),
            ("?" if unreachable else "lost") if lease.remaining_s is None else format_duration(lease.remaining_s),
            *("-" if shown is None else str(shown) for shown in (lease.epoch, lease.run_label)),
            lost_holder(lease) or ("-" if lease.silent_for_s is None else f"{format_duration(lease.silent_for_s)} ago"),
        ]

    columns = ("KEY", "HOLDER", ">HELD FOR", ">EXPIRES IN", ">EPOCH", ">RUN", ">HEARTBEAT")
    empty = "no open run holds a lease" if unreachable else "no leases are held"
    print_list("leases", held, columns, cells, empty, redis=unreachable or "ok")


@leases.command("release", short_help="Release a lease that a hanging process holds.")
@click.argument("key")
@json_option("Print the released lease as JSON.")
def release_held(key: str) -> None:
    """Release the lease KEY, so that the next run can start.

    The holder is fenced off first: if it is still alive, it can no longer commit to the database. Its run ends as
    lost_lease and the next run resumes it. Until the holder notices, at the latest after a third of the lease's ttl, it
    may still change files, git repositories or other servers.
    """
    store = _lease_store()
    with record_action("release_lease", key, command_line_user()) as outcome:
        released = release_lease(store, key)
        outcome.result = f"released, held by {_holder(released)}"
    if not print_as_json(released):
        say(f"released: {in_one_line(key, _KEY_WIDTH)}, held by {_holder(released)}")
    if released.epoch is None:
        notify("its holder has no epoch and cannot be fenced off: it may write until it notices the loss")


def _lease_store() -> LeaseStore:
    """Configure the database, if any, and return the lease store."""
    settings = load_settings()
    store = lease_store(settings)
    use_database_if_set(settings)
    if settings.database_url is not None:
        schema.require_all()
    return store


def _holder(lease: HeldLease) -> str:
    return in_one_line(lease.holder, _KEY_WIDTH)
