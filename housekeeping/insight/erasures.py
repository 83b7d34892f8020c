"""Erasures as operators read them: their list, and receipts that are signed and checked with the secret of erasures.

A receipt says what was erased, when and on whose request, what is kept and why, and what was asked at the end. Instead
of the subject's key it has an HMAC.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import SecretStr

from housekeeping.core.errors import Refused, WrongArgument
from housekeeping.core.logs import counted
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.erasures.found_rows import decision_of, found_rows
from housekeeping.erasures.graph import TableName
from housekeeping.erasures.work import COUNTED, Erasing, name_of
from housekeeping.insight.wording import as_json
from housekeeping.ledger.erasures import each_secret, keyed_digest
from housekeeping.ledger.schema import Erasure, newest

#: Version of the form of receipts.
_FORM: Final = 1
_SIGNATURE: Final = "signature"
_PAGE: Final = 1000  # erasures that are read at once


@dataclass(frozen=True, slots=True)
class ErasureRecord:
    """One erasure; the attributes are those of the `Erasure` of the ledger, without what identifies the subject."""

    id: int
    subject: str
    state: str
    key_hmac: str
    requester: str
    reason: str | None
    requested_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    counts: dict[str, Any]
    kept: dict[str, str]
    proof: dict[str, Any] | None
    outside: list[str]
    error: str | None

    @classmethod
    def of(cls, row: Any) -> ErasureRecord:
        """Return the record of a row of the ledger."""
        values = {name: getattr(row, name) for name in cls.__slots__}
        if row.ended_at is None:
            values["proof"] = None  # so far, it has only the kept rows
        return cls(**values)

    @property
    def has_ended(self) -> bool:
        """Whether there is a receipt."""
        return self.ended_at is not None

    @property
    def took_s(self) -> float | None:
        """Seconds from the request to the end; None if it has not ended."""
        return None if self.ended_at is None else (self.ended_at - self.requested_at).total_seconds()

    @property
    def proof_in_words(self) -> str:
        """What was found when every table was asked again at the end."""
        if self.proof is None:
            return "-"
        checked, kept = self.proof.get("left", {}), {name: rows for name, rows in self.kept_rows.items() if rows != 0}
        left = {table: rows for table, rows in checked.items() if rows}
        if left:
            text = f"left: {', '.join(f'{table} {rows:,}' for table, rows in left.items())}"
        else:
            text = f"nothing is left in {counted(len({*checked, *self.kept_rows} - kept.keys()), 'table')}"
        shown = [
            f"{'rows' if rows is None else _at_least(rows, 'row')} of {table} ({self.kept.get(table, '-')})"
            for table, rows in kept.items()
        ]
        return f"{text}; kept: {', '.join(shown)}" if shown else text

    @property
    def kept_rows(self) -> dict[str, int | None]:
        """Number of rows that stayed as they were, counted before the first change; None if it is unknown."""
        return {} if self.proof is None else self.proof["kept"]

    def counts_in_words(self, table: str) -> str:
        """Counts of a table for display: ``deleted 12, anonymised 3``."""
        counts, kept = self.counts.get(table), self.kept_rows.get(table, 0)
        shown = [f"{name} {number:,}" for name, number in (counts or {}).items() if number]
        shown += ["kept, number unknown"] if kept is None else [f"kept {_at_least(kept)}"] if kept else []
        return ", ".join(shown) or "-"

    def receipt(self, secret: SecretStr) -> dict[str, Any]:
        """Return the receipt, signed.

        Raises:
          WrongArgument: The erasure has not ended.
        """
        if not self.has_ended:
            raise WrongArgument(f"erasure {self.id} is {self.state}; there is a receipt once it has ended")
        content: dict[str, Any] = {"receipt": _FORM, **as_json(self)}
        content = json.loads(json.dumps(content, default=str))
        return {**content, _SIGNATURE: _sign(secret, content)}


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """What an erasure would do with the rows that one link leads to.

    Attributes:
      depth: Number of links from the subject's row to these.
      link: Name of the link; None for the subject's row.
      decision: ``delete``, ``anonymise`` or ``keep``.
      reason: Why rows are kept; None if they are deleted.
      rows: Number of rows that no earlier link leads to.
    """

    depth: int
    database: str
    table: str
    link: str | None
    decision: str
    reason: str | None
    rows: int


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """What an erasure would do now.

    Attributes:
      links: The tree of tables: each link below that of its parent.
      objects: Location and form of the key of the subject's objects.
      calls: Names of the functions of other systems.
      outside: What the erasure does not reach.
      held: Which sweep holds a row of the subject, so that the erasure would be refused; None if none does.
      unconfirmed: Which table it would change much of, so that it needs a confirmation; None if it needs none.
    """

    subject: str
    key_hmac: str
    links: Sequence[PlannedLink]
    objects: Sequence[str]
    calls: Sequence[str]
    outside: Sequence[str]
    held: str | None
    unconfirmed: str | None


def plan_erasure(erasing: Erasing, digest: str) -> ErasurePlan:
    """Return what an erasure would do, with the number of rows by link.

    Parameters:
      digest: The subject's HMAC.

    Raises:
      peewee.PeeweeException: A database does not answer, or the role may not create temporary tables.
    """
    reach = erasing.reach
    held = erasing.holding()
    with found_rows(reach, erasing.found) as found:
        numbers = dict(found.numbers)
    links = [PlannedLink(0, *reach.root, None, "delete", None, numbers[None])]
    visited = set[TableName]()

    def visit(table: TableName, depth: int) -> None:
        visited.add(table)
        for number, each in enumerate(reach.branches):
            if each.parent == table:
                name, decision = each.link.name, decision_of(each)
                links.append(PlannedLink(depth, *each.table, name, decision, each.reason, numbers[number]))
                if each.table not in visited:
                    visit(each.table, depth + 1)

    visit(reach.root, 1)
    subject = erasing.subject
    objects = [f"{each.location}: {each.key}" for each in subject.objects]
    calls = [name_of(each.function) for each in subject.also]
    unconfirmed = erasing.unconfirmed()
    return ErasurePlan(subject.name, digest, links, objects, calls, erasing.outside, held, unconfirmed)


def read_erasures(
    limit: int,
    *,
    before: int | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    subject: str | None = None,
) -> list[ErasureRecord]:
    """Return the newest erasures, newest first.

    Parameters:
      before: Only older ones than the one with this id.
      since, until: Only those that were requested at the first time or later, and before the second one.
      subject: Only those of this kind.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    with database.using(MAIN), translate_postgres_errors():
        given = (before, Erasure.id < before), (subject, Erasure.subject == subject)
        times = (since, Erasure.requested_at >= since), (until, Erasure.requested_at < until)
        return [*map(ErasureRecord.of, newest(Erasure.select(), [Erasure.id], limit, *given, *times))]


def all_erasures(
    since: datetime | None = None, until: datetime | None = None, subject: str | None = None
) -> Iterator[ErasureRecord]:
    """Yield all erasures, newest first, page by page; see `read_erasures`."""
    before = None
    while page := read_erasures(_PAGE, before=before, since=since, until=until, subject=subject):
        yield from page
        before = page[-1].id


def find_erasure(text: str) -> ErasureRecord:
    """Return the erasure with this id, or raise WrongArgument."""
    found: Sequence[Any] = ()
    if text.isdecimal() and len(text) < 19:
        with database.using(MAIN), translate_postgres_errors():
            found = list(Erasure.select().where(Erasure.id == int(text)))
    if not found:
        raise WrongArgument(f"there is no erasure {text!r}; housekeeping erasures lists them")
    return ErasureRecord.of(found[0])


class ReceiptChanged(Refused):
    """A receipt is not as it was signed, or no configured secret has signed it."""

    exit_code = 1


def verified(text: str | bytes, secret: SecretStr) -> dict[str, Any]:
    """Return the receipt that was signed with the secret, or with a former one.

    Raises:
      ReceiptChanged: The text is no receipt, was changed, or was signed with another secret.
    """
    try:
        given = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        given = None
    receipt: dict[str, Any] = given if isinstance(given, dict) else {}
    signature = receipt.get(_SIGNATURE)
    if not isinstance(signature, str) or not signature.isascii():
        raise ReceiptChanged("this is no receipt: it should be what housekeeping receipt ID --json prints")
    signed = {name: value for name, value in receipt.items() if name != _SIGNATURE}
    if not any(hmac.compare_digest(_sign(each, signed), signature) for each in each_secret(secret)):
        raise ReceiptChanged(
            "the receipt was changed after it was signed, or was signed with another HOUSEKEEPING_ERASURE_KEY"
        )
    return receipt


def _at_least(rows: int, unit: str = "") -> str:
    shown = counted(rows, unit) if unit else f"{rows:,}"
    return f"at least {shown}" if rows >= COUNTED else shown


def _sign(secret: SecretStr, content: Any) -> str:
    return keyed_digest(secret, "receipt", json.dumps(content, sort_keys=True, separators=(",", ":")))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Of two values of one key a reader may see the one that was not signed."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found
