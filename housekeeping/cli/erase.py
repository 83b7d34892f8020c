"""``housekeeping erase``, ``export``, ``erasures``, ``receipt``: erase persons and tenants, and what was erased."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from housekeeping.cli.main import load_settings, load_workers
from housekeeping.cli.output import (
    ProgressLine,
    confirm,
    json_option,
    notify,
    page_options,
    print_as_json,
    print_page,
    print_table,
    progress,
    read_times,
    say,
    table,
    time_options,
    wants_json,
)
from housekeeping.cli.run import run_with_progress
from housekeeping.core import telemetry
from housekeeping.core.errors import (
    DeclarationError,
    ErasureInterrupted,
    HousekeepingError,
    Refused,
    UnknownSubject,
    WrongArgument,
)
from housekeeping.core.logs import counted, error_line, format_duration, in_one_line
from housekeeping.core.settings import Settings
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.erasures import identify, require_storable, subjects_of, work
from housekeeping.erasures.found_rows import Replay, erased_by_receipts, erased_since, look_for
from housekeeping.erasures.found_rows import export as export_lines
from housekeeping.erasures.stages import without_identity
from housekeeping.insight.erasures import (
    ErasurePlan,
    ErasureRecord,
    ReceiptChanged,
    all_erasures,
    find_erasure,
    plan_erasure,
    read_erasures,
    verified,
)
from housekeeping.insight.wording import format_time, parse_since
from housekeeping.ledger import erasures, schema
from housekeeping.ledger.operators import command_line_user, record_action
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.subjects import Subject

_HMAC: Final = 12  # characters of an HMAC in questions and lists; --json and the receipt have all of it
_HIDDEN: Final = "***"
_RECEIPTS: Final = "bring the receipts back from where they were saved, and pass them: --receipts FILE"


def take_key(key: str) -> str:
    """Return the key of a subject, and remove it from the arguments of this process, which others can list.

    ``-`` reads it from the terminal without showing it, or from stdin.
    """
    if key == "-":
        given: str = click.prompt("Key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
        return given.rstrip("\n")
    for arguments in (sys.argv, sys.orig_argv):  # reports of errors may have them
        arguments[:] = [_HIDDEN if each == key else each for each in arguments]
    try:
        # The 48th and the 49th value, counted from the first; the second one is a name in parentheses.
        values = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # not on Linux
        return key
    begin, end = int(values[45]), int(values[46])
    memory, text, place = ctypes.string_at(begin, end - begin), os.fsencode(key), 0
    while text and (place := memory.find(b"\0" + text + b"\0", place)) >= 0:
        ctypes.memset(begin + place + 1, ord("*"), len(text))
        place += 1
    return key


class _Command:
    """A command with its options, and the settings, sweeps and subjects of the installation."""

    def __init__(
        self, *, dry_run: bool = False, yes: bool = False, confirmed: bool = False, requester: str | None = None
    ) -> None:
        self.dry_run, self.yes, self.confirmed = dry_run, yes, confirmed
        self.requester = requester or command_line_user()
        self.settings, sweeps = load_workers()
        self.sweeps: Mapping[str, Sweep] = sweeps
        self.subjects: Mapping[str, Subject] = subjects_of(self.settings)
        self.secret = self.settings.require_erasure_key()
        telemetry.report_to_sentry(self.settings.sentry_dsn)

    def find(self, kind: str, key: str) -> tuple[Subject, list[str], str]:
        """Return a subject with the values of its primary key and its HMAC."""
        texts, digest = identify(self.subjects, self.settings, kind, key)
        return self.subjects[kind], texts, digest

    def execute(self, subject: Subject, key: list[str], digest: str, reason: str | None) -> ErasureRecord:
        """Execute an erasure in the foreground, and return how it ended, or that it has not."""
        with record_action("erase", f"{subject.name} {digest}", command_line_user()) as outcome:
            number = erasures.request(
                subject.name, key, digest, requester=self.requester, reason=reason, confirmed=self.confirmed
            )

            def execute(line: ProgressLine, stopping: threading.Event) -> None:
                line(f"erasure {number}")
                try:
                    work.execute(number, self.settings, self.subjects, self.sweeps.values(), stopping)
                except ErasureInterrupted as error:
                    notify(f"erasure {number} has not ended: {error}; the same command or a worker continues it")

            run_with_progress(f"erasure {number}", execute, continued_by="the same command, or a worker,")
            record = find_erasure(str(number))
            outcome.result = f"erasure {number} {record.state}"
        if not wants_json():
            text = f"erasure {number} is {record.state}"
            say(f"{text}; its receipt: housekeeping receipt {number}" if record.has_ended else text)
        return record


@click.command()
@click.argument("kind", required=False)
@click.argument("key", required=False)
@click.option("--dry-run", is_flag=True, help="Show what would be erased and kept, and change nothing.")
@click.option("--reason", metavar="TEXT", help="Why, for the receipt. It must not identify the subject.")
@click.option("--requester", metavar="TEXT", help="Who requested it, for the receipt. Default: the operator.")
@click.option("--yes", is_flag=True, help="Do not ask for a confirmation.")
@click.option("--confirm", "confirmed", is_flag=True, help="Allow the erasure to change much of a table.")
@click.option("--replay-since", "since", metavar="TIME", help="Erase subjects again that were erased since then.")
@click.option(
    "--receipts",
    "file",
    metavar="FILE",
    type=click.File("rb"),
    help="For --replay-since: file of saved receipts.",
)
@click.option("--rekey", is_flag=True, help="Give up lost secrets of earlier erasures.")
@json_option("Print the result object, and nothing else, on stdout.")
def erase(
    kind: str | None,
    key: str | None,
    dry_run: bool,
    reason: str | None,
    requester: str | None,
    yes: bool,
    confirmed: bool,
    since: str | None,
    file: BinaryIO | None,
    rekey: bool,
) -> None:
    """Erase the person or tenant of this KIND with this KEY, as its Subject declares for each table.

    Shows the decision and the number of rows for each table, then asks for a confirmation. KEY is the primary key
    ("4711,7" if it has two columns), or the value of the subject's column "by". "-" prompts for it. The command removes
    the key from the list of processes; output and log show its HMAC instead. "housekeeping receipt ID" prints the
    receipt, with the reason and the requester. The action log has the operator, which is the user of the command.

    The erasure is refused before any change if a table that refers to the subject has no decision, if a row is on hold,
    or if over 20 % of a table, and at least 1,000 rows, would be changed. --confirm allows that; it does not replace
    --yes.

    Ctrl-C ends the erasure after its current batch. The same command, or a worker, continues it.

    After the restore of a backup, --replay-since compares the HMAC of every row of the subjects' tables with those of
    the erasures that ended since TIME, and erases these subjects again. If the database "main" was restored, too, its
    list lacks the latest erasures: pass the receipts that "housekeeping erasures --receipts" printed.

    While the setting lacks the secret of an earlier erasure, new ones are refused. --rekey ends this if it is lost.

    \b
    housekeeping erase person 4711 --dry-run
    housekeeping erase person 4711 --reason "ticket 12" --requester "privacy form"
    housekeeping erase --replay-since 2026-05-01T03:00

    Exit status: 0 if it is done; 1 if it is incomplete, failed or not confirmed, or a replay finds no erasures; 2 if it
    was refused, the kind or key is unknown, or a secret is missing.
    """
    given = None if key is None else take_key(key)
    if (given is None) == (since is None and not rekey) or (since is not None and rekey):
        raise WrongArgument("name the subject: housekeeping erase KIND KEY; or pass --replay-since or --rekey")
    if file is not None and since is None:
        raise WrongArgument("--receipts needs --replay-since")
    if wants_json() and not (yes or dry_run):
        raise WrongArgument("--json does not ask for a confirmation; add --yes, or --dry-run")
    here = _Command(dry_run=dry_run, yes=yes, confirmed=confirmed, requester=requester)
    with translate_postgres_errors():
        if rekey:
            _rekey(here)
            return
        if since is not None:
            erasures.require_known_secrets(here.secret)
            without_identity(_replay, here, parse_since(since, database_now()), file)
            return
        assert kind is not None and given is not None
        require_storable(reason, requester)
        for name, text in (("reason", reason), ("requester", requester)):
            if re.search(rf"(?<!\w){re.escape(given)}(?!\w)", text or ""):
                raise WrongArgument(
                    f"the {name} contains the key, which must not be in the receipt; write a ticket number"
                )
        without_identity(_erase_one, here, kind, given, reason)


def _erase_one(here: _Command, kind: str, key: str, reason: str | None) -> None:
    subject, texts, digest = here.find(kind, key)
    refusal: str | None = None
    try:
        with progress(f"{kind}: counting"):
            planned = plan_erasure(work.Erasing(subject, texts, [], here.sweeps.values()), digest)
    except DeclarationError as error:
        if here.dry_run:
            raise
        refusal = error_line(error)
    else:
        if not wants_json() or here.dry_run:
            _show(planned, confirmed=here.confirmed or not here.dry_run)
        held = None if planned.held is None else f"on hold: {planned.held}"
        if here.dry_run:
            if held is not None:
                raise Refused(held)
            return
        refusal = held or (None if here.confirmed else planned.unconfirmed)
        if not here.yes and refusal is None:
            touched = [each for each in planned.links if each.rows and each.decision != "keep"]
            tables = counted(len({(each.database, each.table) for each in touched}), "table")
            rows = f"{counted(sum(each.rows for each in touched), 'row')} in {tables}"
            confirm(f"Erase {kind} {digest[:_HMAC]}: {rows}?", "nothing was erased")
    # A refusal is recorded, too.
    record = here.execute(subject, texts, digest, reason)
    print_as_json(record)
    if record.state == "refused":
        raise Refused(f"erasure {record.id} was refused, nothing was changed: {record.error}")
    if record.state != "done":
        raise _NotDone(f"erasure {record.id} is {record.state}" + (f": {record.error}" * bool(record.error)))


def _show(planned: ErasurePlan, *, confirmed: bool) -> None:
    if print_as_json(planned):
        return
    say(f"{planned.subject} {planned.key_hmac}", style="bold")
    tree = table("TABLE", "DECISION", ">ROWS", "LINK", "KEPT BECAUSE")
    for each in planned.links:
        name = f"{'  ' * each.depth}{each.table}"
        tree.add_row(name, each.decision, f"{each.rows:,}", each.link or "-", each.reason or "-")
    print_table(tree)
    for name, lines in (("objects", planned.objects), ("call", planned.calls), ("not reached", planned.outside)):
        for line in lines:
            say(f"{name}: {line}")
    if planned.held is not None:
        say(f"on hold: {planned.held}", style="bold red")
    if planned.unconfirmed is not None and not confirmed:
        say(planned.unconfirmed, style="bold red")


class _NotDone(HousekeepingError):
    """An erasure has ended as incomplete or failed, or has not ended."""


def _replay(here: _Command, since: datetime, file: BinaryIO | None) -> None:
    receipts, unusable = _read_receipts(here, file)
    with progress("comparing"):
        saved = list(erased_by_receipts(receipts, since))
        earlier = [*saved, *erased_since(since)]
        found = look_for(earlier, here.subjects, here.secret)
    if not saved:
        given = "no receipts were given" if file is None else "the file has no receipts"
        notify(f'{given} of erasures since then. If the database "main" was restored, too, {_RECEIPTS}')
    if earlier and not wants_json():
        _show_replay(found, len(earlier))
    records: list[ErasureRecord] = []
    if found.back and not here.dry_run:
        if not here.yes:
            confirm(f"Erase {counted(len(found.back), 'subject')} again?", "nothing was erased")
        # The restored database would give numbers again that saved receipts have.
        erasures.continue_after(max((each["id"] for each in receipts), default=0))
        for subject, key, before in found.back:
            again = f"again after a restore; erased before as {before.erasure_id}"
            records.append(here.execute(subject, key, before.key_hmac, again))
    back = [{"subject": each.subject, "key_hmac": each.key_hmac, "id": each.erasure_id} for _, _, each in found.back]
    left_out = {"lost": found.lost, "undeclared": found.undeclared, "unusable_lines": unusable}
    print_as_json({"back": back, "erasures": records, **left_out})
    if not earlier:
        raise _NotDone(f"no erasures since then were found, so no subject was looked for; {_RECEIPTS}")
    if any(each.state == "refused" for each in records):
        raise Refused("an erasure was refused: housekeeping erasures")
    if not found.is_whole or any(each.state != "done" for each in records):
        raise _NotDone("not all subjects could be found and erased: housekeeping erasures")
    if unusable:
        raise _NotDone(f"{counted(len(unusable), 'line')} of the file could not be used; the rest was")


def _read_receipts(here: _Command, file: BinaryIO | None) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the receipts in a file, and the numbers of the lines that have none, which are reported."""
    receipts, unusable = list[dict[str, Any]](), list[int]()
    for number, line in enumerate(file or (), start=1):
        try:
            receipts += [verified(line, here.secret)] if line.strip() else []
        except ReceiptChanged as error:
            notify(f"line {number}: {error}")
            unusable.append(number)
    return receipts, unusable


def _show_replay(found: Replay, earlier: int) -> None:
    rows = table("KIND", "HMAC", ">ERASED BEFORE AS")
    for _, _, each in found.back:
        rows.add_row(each.subject, each.key_hmac[:_HMAC], str(each.erasure_id))
    print_table(rows, empty=f"none of the subjects of {counted(earlier, 'erasure')} exists")
    if found.lost:
        say(f"{counted(found.lost, 'erasure')} cannot be repeated: the secret is lost", style="bold red")
    for kind, number in found.undeclared.items():
        say(f"{counted(number, 'erasure')} cannot be repeated: there is no subject {kind!r}", style="bold red")


def _rekey(here: _Command) -> None:
    if not here.yes:
        confirm("Give up the secrets of earlier erasures? A replay cannot find their subjects.", "nothing was changed")
    with record_action("rekey", "erasures", command_line_user()) as outcome:
        number = erasures.give_up_unknown_secrets(here.secret)
        outcome.result = f"{counted(number, 'erasure')} marked as lost"
    if not print_as_json({"lost": number}):
        say(outcome.result)


@click.command()
@click.argument("kind")
@click.argument("key")
@click.option("--to", "path", metavar="FILE", type=click.Path(path_type=Path), help="Write to this file.")
def export(kind: str, key: str, path: Path | None) -> None:
    """Write all rows of the person or tenant of this KIND with this KEY, one JSON object per line.

    These are the rows that "housekeeping erase" would delete, anonymise or keep, table by table, with the subject's row
    first. Other people's rows that refer to them, such as replies, are left out. All rows of a database are read in one
    snapshot. For KEY see "housekeeping erase".

    \b
    {"table": "account", "decision": "delete", "row": {"id": 4711, "email": ...}}

    Numbers, booleans, null, arrays and JSON are written as JSON, composite types as objects. All other values are
    strings: times with a time zone in UTC, bytea in hexadecimal after \\x. Objects of stores follow as
    {"location": ..., "object": ...}. FILE appears when it is complete; only its owner can read it. A
    device or pipe, such as /dev/stdout, is written to as it is.

    Exit status: 0; 1 if a server does not answer; 2 for an unknown kind or key, or a table without a decision.
    """
    given = take_key(key)
    here = _Command()
    with translate_postgres_errors():
        without_identity(_export, here, kind, given, path)


def _export(here: _Command, kind: str, key: str, path: Path | None) -> None:
    subject, texts, digest = here.find(kind, key)
    with record_action("export", f"{kind} {digest}", command_line_user()) as outcome:
        erasing = work.Erasing(subject, texts, [], needs="export")
        if not erasing.exists:
            raise UnknownSubject(f"the {kind} with this key no longer exists (HMAC {digest[:_HMAC]})")
        lines = export_lines(subject, erasing.reach, erasing.found, here.settings)
        number = _print(lines) if path is None else _write(path, lines)
        outcome.result = counted(number, "row")
    notify(f"{counted(number, 'row')} of {kind} {digest[:_HMAC]}")


def _print(lines: Iterator[str]) -> int:
    number = 0
    for each in lines:
        click.echo(each)
        number += 1
    return number


def _write(path: Path, lines: Iterator[str]) -> int:
    """Write lines to a file that exists once it is complete, or to a device or pipe; return their number."""
    try:
        if path.exists() and not path.is_file():  # never replaced by a file, as root could do with /dev/stdout
            with path.open("w", encoding="utf-8") as other:
                return _copy(lines, other)
        path = Path(os.path.realpath(path))  # a link stays
        # Readable by its owner only.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            try:
                number = _copy(lines, file)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise WrongArgument(f"{path} cannot be written: {error.strerror}") from None
    return number


def _copy(lines: Iterator[str], file: Any) -> int:
    number = 0
    for each in lines:
        file.write(f"{each}\n")
        number += 1
    return number


_WIDTH: Final = 60  # characters of a reason or an error in the list
_LARGEST: Final = 10_000_000  # bytes of a receipt


def load_ledger() -> Settings:
    """Return the settings after checking the schema of the database ``main``."""
    settings = load_settings()
    schema.use_database(settings)
    schema.require()
    return settings


@click.command("erasures")
@click.option("--subject", metavar="KIND", help="Only erasures of this kind of subject.")
@click.option("--receipts", is_flag=True, help="Print the receipts, one JSON object per line.")
@time_options("were requested")
@page_options()
def list_erasures(subject: str | None, receipts: bool, before: str | None, limit: int, **times: str | None) -> None:
    """List erasures, newest first: state, kind, HMAC of the key, times, reason and error.

    STATE is "requested" until a worker starts it, then "running". It ends as "done", "incomplete" if rows are left,
    "failed", or "refused" if nothing was changed. The HMAC identifies the subject, whose key is not stored.

    --receipts prints the receipt of every erasure that has ended. Save them outside of the database. After a restore of
    the database, "housekeeping erase --replay-since TIME --receipts FILE" repeats the erasures after the backup.
    """
    settings = load_ledger()
    with translate_postgres_errors():
        since, until = read_times(times, database_now())
    if receipts:
        secret = settings.require_erasure_key()
        for each in all_erasures(since, until, subject):
            if each.has_ended:
                click.echo(json.dumps(each.receipt(secret)))
        return
    chosen = {"subject": subject, "since": since, "until": until}
    print_page("erasures", read_erasures, _COLUMNS, _cells, before, limit, **chosen)


_COLUMNS: Final = (">ID", "STATE", "KIND", "HMAC", "REQUESTED (UTC)", ">TOOK", "REASON, ERROR")


def _cells(erasure: ErasureRecord) -> list[str]:
    return [
        str(erasure.id),
        erasure.state,
        erasure.subject,
        erasure.key_hmac[:_HMAC],
        format_time(erasure.requested_at, "%Y-%m-%d %H:%M"),
        "-" if erasure.took_s is None else format_duration(erasure.took_s),
        "; ".join(in_one_line(each, _WIDTH) for each in (erasure.reason, erasure.error) if each) or "-",
    ]


@click.command()
@click.argument("erasure_id", metavar="[ID]", required=False)
@click.option("--verify", "file", metavar="FILE", type=click.File("rb"), help="Verify a saved receipt; - reads stdin.")
@json_option("Print the receipt as JSON, signed.")
def receipt(erasure_id: str | None, file: BinaryIO | None) -> None:
    """Print the receipt of the erasure with this ID, or verify a saved one.

    A receipt has the kind of the subject and the HMAC of its key, the requester, reason and times, the number of rows
    by table, the tables that are kept and why, the result of the final check, and what the erasure does not reach.
    Nothing else in it identifies the subject. With --json it is signed with HOUSEKEEPING_ERASURE_KEY.

    --verify needs this setting, but no server.

    \b
    housekeeping receipt 12 --json > receipt-12.json
    housekeeping receipt --verify receipt-12.json

    Exit status: 0; 1 if the signature of a saved receipt is not valid; 2 if there is no such receipt.
    """
    if (erasure_id is None) == (file is None):
        raise WrongArgument("name an erasure, or a saved receipt: --verify FILE")
    if file is not None:
        content = verified(file.read(_LARGEST), load_settings().require_erasure_key())
        if not print_as_json(content):
            say(f"the signature of receipt {content['id']} is valid")
        return
    assert erasure_id is not None
    settings = load_ledger()
    found = find_erasure(erasure_id)
    if not print_as_json(found.receipt(settings.require_erasure_key())):
        _print_receipt(found)


def _print_receipt(found: ErasureRecord) -> None:
    say(f"Erasure {found.id}: {found.subject} {found.key_hmac}", style="bold")
    lines: list[tuple[str, Any]] = [
        ("state", f"{found.state}: {found.error}" if found.error else found.state),
        ("requested", f"{format_time(found.requested_at)} UTC by {found.requester}"),
        ("reason", found.reason or "-"),
        ("started", "-" if found.started_at is None else f"{format_time(found.started_at)} UTC"),
        ("ended", f"{format_time(found.ended_at)} UTC"),
        ("proof", found.proof_in_words),
        ("outside", "; ".join(found.outside) or "-"),
    ]
    values = table("", "")
    values.show_header = False
    for name, text in lines:
        values.add_row(name, text)
    print_table(values)
    tables = table("TABLE", "ROWS", "KEPT BECAUSE")
    for name in sorted({*found.counts, *found.kept}):
        tables.add_row(name, found.counts_in_words(name), found.kept.get(name, "-"))
    print_table(tables, empty=f"no {counted(0, 'row')}")
