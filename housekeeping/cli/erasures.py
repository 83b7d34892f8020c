"""``housekeeping erasures`` and ``receipt``: list erasures, print their signed receipts, and verify a receipt."""

from __future__ import annotations

import json
from typing import Any, BinaryIO, Final

import click

from housekeeping.cli.main import load_settings
from housekeeping.cli.output import (
    json_option,
    page_options,
    print_as_json,
    print_page,
    print_table,
    read_id,
    read_times,
    say,
    table,
    time_options,
)
from housekeeping.core.errors import WrongArgument
from housekeeping.core.logs import counted, format_duration, in_one_line
from housekeeping.core.settings import Settings
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.insight.erasures import (
    ErasureRecord,
    all_erasures,
    find_erasure,
    read_erasures,
    verified,
)
from housekeeping.insight.wording import format_time
from housekeeping.ledger import schema

_HMAC: Final = 12  # characters in lists; --json and the receipt have all of it
_WIDTH: Final = 60  # characters of a reason or an error in the list
_LARGEST: Final = 10_000_000  # bytes of a receipt


def load_ledger() -> Settings:
    """Return the settings after checking the schema of the database ``main``."""
    settings = load_settings()
    schema.use_database(settings)
    schema.require()
    return settings


@click.command()
@click.option("--subject", metavar="KIND", help="Only erasures of this kind of subject.")
@click.option("--receipts", is_flag=True, help="Print the receipts, one JSON object per line.")
@time_options("were requested")
@page_options()
def erasures(subject: str | None, receipts: bool, before: str | None, limit: int, **times: str | None) -> None:
    """List erasures, newest first: state, kind, HMAC of the key, times, reason and error.

    STATE is "requested" until a worker starts it, then "running". It ends as "done", "incomplete" if rows are left,
    "failed", or "refused" if nothing was changed. The HMAC identifies the subject, whose key is not stored.

    --receipts prints the receipt of every erasure that has ended. Save them outside of the database. After a restore of
    the database, "housekeeping erase --replay-since TIME --receipts FILE" repeats the erasures after the backup.
    """
    settings = load_ledger()
    place = read_id(before, "an erasure; housekeeping erasures lists them")
    with translate_postgres_errors():
        since, until = read_times(times, database_now())
    if receipts:
        secret = settings.require_erasure_key()
        for each in all_erasures(since, until, subject):
            if each.has_ended:
                click.echo(json.dumps(each.receipt(secret)))
        return
    found = read_erasures(limit + 1, before=place, since=since, until=until, subject=subject)
    print_page("erasures", found, limit, _COLUMNS, _cells, "no erasures")


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
        _print(found)


def _print(found: ErasureRecord) -> None:
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
