"""Subjects that were erased and are back, such as after the restore of a backup; found by their HMACs.

The ledger has no keys of erased subjects. So the keys of all rows of the subject's table are read page by page, and
the HMAC of each is compared with those of the erasures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from pydantic import SecretStr

from housekeeping.core.settings import MAIN
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.erasures.stages import typed_key
from housekeeping.ledger.erasures import each_secret, key_hmac, mark_of
from housekeeping.ledger.schema import Erasure
from housekeeping.sweeps.subjects import Subject

_PAGE: Final = 5000  # keys that are read at once
#: States of erasures that may have erased something.
_ERASED: Final = ("done", "incomplete", "failed")


class Erased(NamedTuple):
    """An earlier erasure."""

    subject: str
    key_hmac: str
    erasure_id: int


@dataclass(slots=True)
class Replay:
    """Earlier erasures, and which of their subjects exist.

    Attributes:
      back: Subject, values of its primary key, and the earlier erasure.
      lost: Number of erasures that cannot be looked for, because their secret is unknown.
      undeclared: Number of erasures of kinds that are not declared any more, by kind.
    """

    back: list[tuple[Subject, list[str], Erased]] = field(default_factory=list)
    lost: int = 0
    undeclared: dict[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all subjects could be looked for."""
        return not (self.lost or self.undeclared)


def erased_since(since: datetime) -> Iterator[Erased]:
    """Yield the erasures in the ledger that ended at this time or later, and were not refused."""
    with database.using(MAIN), translate_postgres_errors():
        rows: Any = Erasure.select(Erasure.subject, Erasure.key_hmac, Erasure.id)
        ended = rows.where(Erasure.ended_at >= since, Erasure.state.in_(_ERASED)).order_by(Erasure.id)
        yield from (Erased(*row) for row in ended.tuples())


def erased_by_receipts(receipts: Iterable[Mapping[str, Any]], since: datetime) -> Iterator[Erased]:
    """Yield the erasures of verified receipts that ended at this time or later, and were not refused."""
    for each in receipts:
        if each["state"] in _ERASED and datetime.fromisoformat(each["ended_at"]) >= since:
            yield Erased(each["subject"], each["key_hmac"], each["id"])


def look_for(erased: Iterable[Erased], subjects: Mapping[str, Subject], secret: SecretStr) -> Replay:
    """Return which subjects of earlier erasures exist.

    Parameters:
      secret: The setting ``HOUSEKEEPING_ERASURE_KEY``.

    Raises:
      peewee.PeeweeException: A database does not answer.
    """
    found, secrets = Replay(), {mark_of(each): each for each in each_secret(secret)}
    wanted: dict[str, dict[str, Erased]] = {}
    for each in erased:
        if each.key_hmac.rpartition(".")[2] not in secrets:
            found.lost += 1
        elif each.subject not in subjects:
            found.undeclared[each.subject] = found.undeclared.get(each.subject, 0) + 1
        else:
            wanted.setdefault(each.subject, {})[each.key_hmac] = each
    for name, erasures in wanted.items():
        marks = {each.rpartition(".")[2] for each in erasures}
        used = [secrets[each] for each in marks]
        for key in _keys(subjects[name]):
            same = next((digest for each in used if (digest := key_hmac(each, name, key)) in erasures), None)
            if same is not None:
                found.back.append((subjects[name], key, erasures[same]))
    return found


def _keys(subject: Subject) -> Iterator[list[str]]:
    """Yield the primary key of each row of the subject's table, as PostgreSQL writes its values."""
    with database.using(subject.database):
        model = subject.model
        key = typed_key(model)
        own, texts = ", ".join(key), ", ".join(f"{each}::text" for each in key)
        given = ", ".join(f"%s::text::{kind}" for kind in key.values())
        sql = f"SELECT {texts} FROM {quoted_name(model)}"  # noqa: S608
        last: list[str] = []
        while True:
            after = f" WHERE ({own}) > ({given})" if last else ""
            page: Any = database.execute_sql(f"{sql}{after} ORDER BY {own} LIMIT {_PAGE}", last).fetchall()
            yield from (list(row) for row in page)
            if len(page) < _PAGE:
                return
            last = list(page[-1])
