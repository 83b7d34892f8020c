"""Declarations of persons and tenants that can be erased, with a decision for each table that reaches them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, field
from typing import Any, Final

from housekeeping.core.errors import DeclarationError
from housekeeping.core.settings import MAIN
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.rows import Call, OfTable
from housekeeping.sweeps.values import Reference, declared

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
#: A column's name between braces.
_PLACE: Final = re.compile(r"\{([^{}]*)\}")


@declared
class Keep:
    """Decision of a `Subject` to keep the rows of a table, whole or without some values.

    Attributes:
      reason: Why they are kept; it is in the receipt.
      anonymise: Values to write into some of their columns.
    """

    reason: str
    _: KW_ONLY
    anonymise: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise DeclarationError("Keep has no reason; write why the rows are kept")


class Anonymise:
    """Decision of a `Subject` to keep the rows of a table, with other values in some of their columns.

    ::

        Anonymise(author_id=None, text="[erased]")

    Parameters:
      values: The new values by column; at least one.
    """

    reason: Final = "anonymised"

    def __init__(self, **values: Any) -> None:
        if not values:
            raise DeclarationError('Anonymise has no columns; write the values: Anonymise(author_id=None, text="")')
        self.anonymise: Final[Mapping[str, Any]] = values

    def __repr__(self) -> str:
        return f"Anonymise({', '.join(f'{name}={value!r}' for name, value in self.anonymise.items())})"


@declared
class Objects:
    """Objects of a store that belong to a subject.

    Attributes:
      location: A location of ``HOUSEKEEPING_OBJECT_STORES``.
      key: Key of an object, or with a ``/`` at its end the prefix of several, with columns of the subject in braces:
        ``users/{id}/``.
    """

    location: str
    key: str

    def __post_init__(self) -> None:
        if not self.columns or "" in self.columns:
            raise DeclarationError(
                f"Objects({self.location!r}): {self.key!r} names no column of the subject, so it would be the same for "
                'all; write "users/{id}/"'
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the subject that the key names."""
        return tuple(_PLACE.findall(self.key))


#: What becomes of the rows of a table.
TableDecision = Delete | Keep | Anonymise


@declared
class Subject(OfTable):
    """Kind of person or tenant that can be erased. Put it into ``SUBJECTS`` of a module of sweeps.

    ::

        person = Subject(
            "person", Account,
            tables={"session": Delete(), "comment": Anonymise(author_id=None, text="[erased]")},
        )
        SUBJECTS = (person,)

    Attributes:
      name: The kind, for commands: ``person``.
      table: The root: table of the subject's row, as in `Rows`. This row is deleted last.
      tables: Decision for each table that reaches the root: ``"table"`` or ``"schema.table"`` for all of its links,
        ``"table.column"`` for one. Rows that are kept lead on to their own dependents, which are decided likewise.
        What depends on rows of one link stays as well if that link is decided by `Keep`, without values for other
        columns than its own.
      references: Links without a foreign key, also from other databases.
      objects: Objects of stores. They are deleted before any row.
      also: Functions for other systems, called with the subject's key as texts. They must be repeatable.
      by: Unique column of the root that can be given instead of the key, such as ``email``. A value that several rows
        have is refused.
      database: Name of the root's database.
    """

    name: str
    table: Any
    _: KW_ONLY
    tables: Mapping[str, TableDecision] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    objects: Sequence[Objects] = ()
    also: Sequence[Call] = ()
    by: str | None = None
    database: str = MAIN

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise DeclarationError(
                f"Subject: {self.name!r} is no name; write a word of small letters, digits and _: 'person'"
            )
        for table, decision in self.tables.items():
            if isinstance(decision, Delete) and decision != Delete():
                raise DeclarationError(
                    f"Subject {self.name!r}: tables[{table!r}] is {decision!r}; an erasure deletes without an archive, "
                    "and decides about dependents itself: write Delete()"
                )
        for call in self.also:
            if call.then is not None:
                raise DeclarationError(f"Subject {self.name!r}: also has a Call with `then`; write Call(function)")
