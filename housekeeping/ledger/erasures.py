"""Erasures of persons and tenants in the ledger of the database ``main``, and the HMACs that stand for their keys."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import Value, fn
from pydantic import SecretStr

from housekeeping.core.errors import SettingsError
from housekeeping.core.logs import counted
from housekeeping.core.settings import MAIN
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.ledger.runs import SILENCE
from housekeeping.ledger.schema import NOW, Erasure, Rejection, Run


def keyed_digest(secret: SecretStr, purpose: str, text: str) -> str:
    """Return the HMAC-SHA256 of a text in hexadecimal.

    Parameters:
      secret: The setting ``HOUSEKEEPING_ERASURE_KEY``. Of several secrets the first one is used.
      purpose: What the digest is for, such as ``key``; so that one of another purpose is never the same.
    """
    message = json.dumps([purpose, text]).encode()
    return hmac.new(each_secret(secret)[0].get_secret_value().encode(), message, hashlib.sha256).hexdigest()


def each_secret(setting: SecretStr) -> list[SecretStr]:
    """Return the secrets in the setting: the current one, and former ones after commas."""
    return [SecretStr(each) for each in setting.get_secret_value().split(",")]


def key_hmac(secret: SecretStr, subject: str, key: Sequence[str]) -> str:
    """Return the pseudonym of a subject in receipts, lists, pages and the log: an HMAC, and a mark of its secret.

    Parameters:
      subject: Name of the `Subject`.
      key: Values of its primary key, as PostgreSQL writes them (``column::text``).
    """
    return f"{keyed_digest(secret, 'key', json.dumps([subject, *key]))}.{mark_of(secret)}"


#: Written instead of the mark of a secret that is lost.
LOST: Final = "lost"


def mark_of(secret: SecretStr) -> str:
    """Return the mark at the end of a secret's HMACs. It reveals nothing about the secret."""
    return keyed_digest(secret, "secret", "")[:8]


def _of_unknown_secret(setting: SecretStr) -> Any:
    marks = [*map(mark_of, each_secret(setting)), LOST]
    return fn.SPLIT_PART(Erasure.key_hmac, ".", 2).not_in(marks)


def require_known_secrets(setting: SecretStr) -> None:
    """Raise SettingsError if the ledger has erasures with a secret that the setting lacks.

    With another secret, an erasure after a restore would not find the subjects that these have erased.
    """
    with database.using(MAIN), translate_postgres_errors():
        number = Erasure.select().where(_of_unknown_secret(setting)).count()
    if number:
        raise SettingsError(
            f"HOUSEKEEPING_ERASURE_KEY lacks the secret of {counted(number, 'earlier erasure')}; write it after a "
            "comma behind the current one, or, if it is lost: housekeeping erase --rekey"
        )


def give_up_unknown_secrets(setting: SecretStr) -> int:
    """Mark the erasures whose secret the setting lacks as lost, so that new ones are possible. Return their number."""
    with database.using(MAIN), translate_postgres_errors():
        lost: Any = fn.SPLIT_PART(Erasure.key_hmac, ".", 1).concat(f".{LOST}")
        return int(Erasure.update(key_hmac=lost).where(_of_unknown_secret(setting)).execute())


@dataclass(frozen=True, slots=True)
class LateErasures:
    """Erasures that were requested too long ago and are not done, also by a later erasure of the same subject.

    Attributes:
      oldest_id, oldest_at, oldest_state: The oldest of them; None without any.
    """

    number: int = 0
    oldest_id: int | None = None
    oldest_at: datetime | None = None
    oldest_state: str | None = None


def late_erasures(limit: timedelta, now: datetime) -> LateErasures:
    """Return the erasures that were requested longer ago than the limit; the current database must be ``main``.

    Refused erasures do not count: a declaration or a hold has decided against them.
    """
    later: Any = Erasure.alias()
    done = later.select().where(
        later.subject == Erasure.subject,
        later.key_hmac == Erasure.key_hmac,
        later.id > Erasure.id,
        later.state == "done",
    )
    late: Any = (
        Erasure.select(fn.COUNT(Erasure.id).over(), Erasure.id, Erasure.requested_at, Erasure.state)
        .where(
            Erasure.state.not_in(("done", "refused")),
            Erasure.requested_at < now - limit,
            ~fn.EXISTS(done),
        )
        .order_by(Erasure.requested_at, Erasure.id)
        .limit(1)
    )
    return next((LateErasures(*row) for row in late.tuples()), LateErasures())


def request(
    subject: str, key: Sequence[str], digest: str, *, requester: str, reason: str | None, confirmed: bool = False
) -> int:
    """Record that a subject is to be erased. Return the number of its erasure: that of one that has not ended, if any.

    Parameters:
      key: Values of the subject's primary key, as PostgreSQL writes them.
      digest: Its `key_hmac`.
      confirmed: Whether an operator has confirmed that it may change much of a table.

    Raises:
      peewee.PeeweeException: The database ``main`` does not answer.
    """
    row = {
        "subject": subject,
        "key": list(key),
        "key_hmac": digest,
        "requester": requester,
        "reason": reason,
        "confirmed": confirmed,
    }
    unfinished = (Erasure.subject == subject) & (Erasure.key_hmac == digest) & Erasure.ended_at.is_null()
    with database.using(MAIN):
        while True:
            # First, because an INSERT uses up a number even if it inserts nothing. Auditors ask about gaps.
            number = Erasure.select(Erasure.id).where(unfinished).scalar()
            if number is not None:
                if confirmed:
                    note(number, confirmed=True)
                return int(number)
            inserted = Erasure.insert(**row, requested_at=NOW).on_conflict_ignore().returning(Erasure.id).tuples()
            for (number,) in inserted.execute():
                return int(number)
            # It was requested meanwhile.


#: An identity column gives numbers in each insert, also if it is rolled back. It needs no right on its sequence.
_DRAW: Final = """
INSERT INTO {} (subject, state, key_hmac, requester, kept, counts, outside, requested_at, ended_at)
SELECT '', 'done', '', '', '{{}}', '{{}}', '[]', now(), now() FROM generate_series(1, %s) RETURNING id
"""


def continue_after(number: int) -> None:
    """Let the next erasures have numbers after this one, which the receipt of an erasure that is lost here has."""
    with database.using(MAIN), database.atomic() as transaction:
        latest = Erasure.select(fn.MAX(Erasure.id)).scalar() or 0
        if latest < number:
            sql = _DRAW.format(quoted_name(Erasure))
            ((drawn,),) = database.execute_sql(sql, (1,)).fetchall()
            database.execute_sql(sql, (number - drawn,))
            transaction.rollback()


def erased_as(subject: str, digests: Sequence[str]) -> str | None:
    """Return the HMAC of the last erasure that may have erased this subject, given its `key_hmac` by each secret.

    One that has not ended, or was incomplete, may have deleted the subject's row, too.
    """
    same = (Erasure.subject == subject) & Erasure.key_hmac.in_(digests) & (Erasure.state != "refused")
    with database.using(MAIN):
        found: str | None = Erasure.select(Erasure.key_hmac).where(same).order_by(Erasure.id.desc()).limit(1).scalar()
        return found


def begin(number: int) -> Erasure | None:
    """Record that an erasure is running, and return it; None if it has ended, or there is none."""
    started = {"state": "running", "started_at": fn.COALESCE(Erasure.started_at, NOW)}
    with database.using(MAIN):
        Erasure.update(**started).where((Erasure.id == number) & Erasure.ended_at.is_null()).execute()
        return Erasure.get_or_none((Erasure.id == number) & Erasure.ended_at.is_null())


def note(number: int, **values: Any) -> None:
    """Write values of an erasure that has not ended."""
    with database.using(MAIN):
        Erasure.update(**values).where((Erasure.id == number) & Erasure.ended_at.is_null()).execute()


def note_found(number: int, before: Any, found: Any, **values: Any) -> bool:
    """Write the versions of the subject's row, and values, if it has those of `before`; return whether it had."""
    same = Erasure.found.is_null() if before is None else Erasure.found == before
    with database.using(MAIN):
        update = Erasure.update(found=found, **values)
        return bool(update.where((Erasure.id == number) & Erasure.ended_at.is_null() & same).execute())


def count(number: int, name: str, kind: str, by: int) -> None:
    """Increase a count of an erasure that has not ended. Several processes may do so at the same time."""
    before = fn.COALESCE(fn.JSONB_EXTRACT_PATH_TEXT(Erasure.counts, name, kind).cast("bigint"), 0)
    keys = [Value(each, converter=str).cast("text") for each in (name, kind)]  # not as JSON, as values of a JSON column
    added = fn.JSONB_BUILD_OBJECT(keys[0], fn.JSONB_BUILD_OBJECT(keys[1], before + Value(by, converter=int)))
    note(number, counts=Erasure.counts.concat(added))


def counts_of(number: int) -> dict[str, Any]:
    """Return the counts of an erasure apart from those of its runs."""
    with database.using(MAIN):
        found: dict[str, Any] | None = Erasure.select(Erasure.counts).where(Erasure.id == number).scalar()
        return found or {}


def end(number: int, state: str, error: str | None, *, of_runs: Mapping[str, Any], proof: Any) -> None:
    """Record how an erasure has ended, and remove what identifies its subject.

    Parameters:
      of_runs: Counts by table, which are added.
    """
    counts = Erasure.counts.concat(of_runs)
    note(number, state=state, error=error, ended_at=NOW, key=None, found=None, counts=counts, proof=proof)


def unfinished() -> list[int]:
    """Return the numbers of the erasures that have not ended, oldest first."""
    with database.using(MAIN):
        found: Any = Erasure.select(Erasure.id).where(Erasure.ended_at.is_null()).order_by(Erasure.id).tuples()
        return [number for (number,) in found]


#: Key among the counts of a run: the number of the erasure that it belongs to.
OF_ERASURE: Final = "erasure"


def counts_of_runs(number: int, worker: str, databases: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the counts of all runs of an erasure, from the ledgers of these databases."""
    found: list[Mapping[str, Any]] = []
    for name in databases:
        with database.using(name):
            rows: Any = Run.select(Run.counts).where(_of_erasure(number, worker)).tuples()
            found += [counts for (counts,) in rows]
    return found


def count_ended_runs(number: int, worker: str, of_database: str) -> int:
    """Return how many runs of an erasure in this database have ended, whatever their outcome."""
    with database.using(of_database):
        return int(Run.select().where(_of_erasure(number, worker) & Run.outcome.is_null(False)).count())


def dead_in(number: int, worker: str, of_database: str) -> timedelta | None:
    """Return when the open run of an erasure in this database counts as dead, unless it sends another heartbeat.

    None if there is no open run.
    """
    with database.using(of_database):
        left = fn.MAX(Run.heartbeat_at) + SILENCE - NOW
        found: timedelta | None = Run.select(left).where(_of_erasure(number, worker) & Run.outcome.is_null()).scalar()
        return found


#: Minimum characters of a value that is searched for in the ledger. Most texts contain shorter ones by chance.
_LEAST: Final = 4
#: Runs that one statement searches, so that it takes a fraction of its time limit.
_AT_ONCE: Final = 20_000


def forget_rows(number: int, worker: str, databases: Iterable[str], values: Iterable[str] = ()) -> None:
    """Remove data from the runs of an erasure that may identify rows.

    Parameters:
      values: Values that identify the subject. They are also removed from ended runs of all workers: from cursors,
        errors, and keys of rejected or blocked rows. A run that resumes without a cursor begins at the front.
    """
    # JSON writes quotation marks, backslashes and control characters differently.
    spellings = ({each, json.dumps(each, ensure_ascii=False)[1:-1]} for each in values if len(each) >= _LEAST)
    wanted = [re.escape(each) for both in spellings for each in both]
    pattern = f"(?<![[:alnum:]_])({'|'.join(wanted)})(?![[:alnum:]_])"

    def has_value(*columns: Any) -> Any:
        return fn.CONCAT_WS(" ", *columns).regexp(pattern)

    def masked(column: Any) -> Any:
        return fn.REGEXP_REPLACE(column, pattern, "***", "g")

    for name in databases:
        with database.using(name):
            Run.update(cursor=None, traceback=None).where(_of_erasure(number, worker)).execute()
            if wanted:
                in_strings = fn.REGEXP_REPLACE(Run.counts.cast("text"), f'"({"|".join(wanted)})"', '"***"', "g")
                changed = {
                    "cursor": None,
                    "rejected": None,
                    "counts": in_strings.cast("jsonb"),
                    "error": masked(Run.error),
                    "traceback": masked(Run.traceback),
                }
                details = fn.JSONB_EXTRACT_PATH(Run.counts, "details")
                found = has_value(Run.cursor, Run.rejected, details, Run.error, Run.traceback)
                for page in _pages_of_runs():
                    Run.update(changed).where(page & Run.outcome.is_null(False) & found).execute()
                Rejection.delete().where(has_value(Rejection.subject, Rejection.position, Rejection.sample)).execute()


def _pages_of_runs() -> Iterator[Any]:
    """Yield the conditions of all runs in the current database, page by page."""
    last: int | None = 0
    while last is not None:
        page = Run.select(Run.id).where(Run.id > last).order_by(Run.id).limit(_AT_ONCE)
        first, last = last, page.select_from(fn.MAX(page.c.id)).scalar()
        yield Run.id.between(first + 1, last)


def _of_erasure(number: int, worker: str) -> Any:
    return (Run.worker == worker) & (fn.JSONB_EXTRACT_PATH_TEXT(Run.counts, OF_ERASURE) == str(number))
