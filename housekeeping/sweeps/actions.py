"""Actions on the stale rows of a batch, and the archive that takes deleted rows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from peewee import (
    CTE,
    OP,
    SQL,
    AutoField,
    BigAutoField,
    BigIntegerField,
    Column,
    CompositeKey,
    Expression,
    Field,
    ForeignKeyField,
    IntegerField,
    Model,
    ModelBase,
    ModelInsert,
    Select,
    Value,
    fn,
)

from housekeeping.core.errors import DeclarationError
from housekeeping.database.catalog import column_names, foreign_keys_to, key_of, quoted_name
from housekeeping.database.connection import BaseModel, database
from housekeeping.database.queries import STATEMENT_TIME, StatementTime, UtcDateTimeField, all_as_stored
from housekeeping.database.state_machines import StateMachine
from housekeeping.sweeps.stage import Batch, Stage
from housekeeping.sweeps.table_stage import ARCHIVED_ROWS, TableStage, Write, archiving_part
from housekeeping.sweeps.values import Decision, Reference, declared

if TYPE_CHECKING:
    from housekeeping.sweeps.dependents import Graph

#: Columns that an archive has besides those of its table.
ARCHIVED_AT: Final = "archived_at"
ARCHIVED_BY_RUN: Final = "archived_by_run"
#: Names of the counts of dependents, and of parents that stay because of one that is kept.
DELETED_DEPENDENTS: Final = "deleted_dependents"
CLEARED_DEPENDENTS: Final = "cleared_dependents"
BLOCKED: Final = "blocked"
OF_DEPENDENTS: Final = (DELETED_DEPENDENTS, CLEARED_DEPENDENTS, BLOCKED)
ADDED: Final = (ARCHIVED_AT, ARCHIVED_BY_RUN)
#: Further column of an archive that has rows of which a cascade has cleared some columns: their names, else NULL.
CLEARED_COLUMNS: Final = "cleared_columns"

_TABLE: Final = re.compile(r'(?:([^\s."]+)\.)?([^\s."]+)')
COLUMNS_NOW: Final = (
    "(SELECT array_agg(attname::text ORDER BY attnum) FROM pg_catalog.pg_attribute "
    "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped)"
)


def archive_model(source: type[Model], archive_to: str | type[Model]) -> type[Any]:
    """Return the model of an archive, with the key of its rows; one model for each archive of a table.

    Parameters:
      archive_to: The table's name, with its schema or without, or any peewee model of it.

    Raises:
      DeclarationError: The text is no name of a table, or the source has a column that the archive adds.
    """
    if isinstance(archive_to, str):
        return _model(source, *parsed_name(archive_to))
    meta: Any = archive_to._meta
    return _model(source, meta.schema, meta.table_name)


def archive_in(schema: str, source: type[Model], *, of_cleared: bool) -> type[Any]:
    """Return the model of a table's archive in a schema of archives.

    Parameters:
      of_cleared: Whether it also takes rows of which only some columns are cleared.
    """
    meta: Any = source._meta
    return _model(source, schema, meta.table_name, of_cleared=of_cleared)


def takes_cleared(archive: type[Model]) -> bool:
    """Return whether an archive also takes rows of which only some columns were cleared."""
    return bool(getattr(archive._meta, "of_cleared", False))


def parsed_name(table: str) -> tuple[str | None, str]:
    """Return schema and name of a table.

    Raises:
      DeclarationError: The text is no name of a table.
    """
    match = _TABLE.fullmatch(table)
    if match is None:
        raise DeclarationError(f'archive_to is {table!r}; write the name of a table: "archive.sessions"')
    return match[1], match[2]


@cache
def _model(source: type[Model], schema: str | None, table: str, *, of_cleared: bool = False) -> type[Any]:
    key = key_of(source)
    if taken := [each.column_name for each in key if each.column_name in ADDED]:
        raise DeclarationError(f"{source.__name__} has the key column {taken[0]}, a name that its archive uses itself")
    fields: dict[str, Any] = {
        ARCHIVED_BY_RUN: BigIntegerField(),
        ARCHIVED_AT: UtcDateTimeField(),
        **{each.name: _plain(each) for each in key},
    }
    key_fields = CompositeKey(*fields)
    names = {
        "schema": schema,
        "table_name": table,
        "primary_key": key_fields,
        "is_built": True,
        "of_cleared": of_cleared,
    }
    namespace = {**fields, "Meta": type("Meta", (), names), "__module__": __name__}
    model: Any = ModelBase(f"{source.__name__}Archive", (BaseModel,), namespace)
    return cast(type[Any], model)


def _plain(field: Field) -> Field:
    """Return a field for the same values, without a sequence or a reference of its own."""
    name = field.column_name
    while isinstance(field, ForeignKeyField):
        field = field.rel_field
    if isinstance(field, AutoField):
        return BigIntegerField(column_name=name) if isinstance(field, BigAutoField) else IntegerField(column_name=name)
    plain = copy.copy(field)
    plain.primary_key = plain.unique = plain.index = False
    plain.column_name = name
    return plain


def columns_of_table(model: type[Model]) -> tuple[str, ...]:
    """Return all columns that the table has now. If it does not exist, return those of its model."""
    return column_names(model) or declared_columns(model)


def declared_columns(model: type[Model]) -> tuple[str, ...]:
    """Return the columns of the model."""
    meta: Any = model._meta
    return tuple(meta.columns)


def moved(
    stage: TableStage, archive: type[Model], chosen: Expression, columns: Sequence[str], run_id: int | None
) -> tuple[list[CTE], Expression]:
    """Return the CTEs that delete rows and insert them into the archive, and the condition without which a batch fails.

    It fails if the archive did not take all rows, and if the table has other columns than these: a column that was
    added while the run was in progress would be lost.
    """
    source: Any = stage.model
    delete = source.delete().where(chosen).returning(*(Column(source._meta.table, name) for name in columns))
    deleted = delete.cte("deleted")
    values = [Column(deleted, name) for name in columns]
    added = [SQL("statement_timestamp()"), Value(run_id).cast("bigint")]
    archived = inserted(archive, (*columns, *ADDED), Select((deleted,), [*values, *added])).cte("archived")
    count = SQL("count(*)")
    is_whole = Expression(Select((archived,), [count]), OP.EQ, Select((deleted,), [count]))
    now = SQL(COLUMNS_NOW, (quoted_name(source),))
    is_same = Expression(now, OP.EQ, fn.STRING_TO_ARRAY("\n".join(columns), "\n"))
    return [deleted, archived], Expression(is_whole, OP.AND, is_same)


def inserted(model: type[Model], columns: Sequence[str], rows: Select) -> Any:
    """Return the statement that inserts rows into a table, also into columns that its model does not declare."""
    meta: Any = model._meta
    return ModelInsert(model, rows, [Column(meta.table, name) for name in columns]).returning(SQL("1"))


def allowed_by(action: Any) -> Expression | None:
    """Return the condition for the stale rows that the action can change; None if it can change all of them."""
    if isinstance(action, Transition):
        allowed: Expression = action.machine.field.in_(action.machine.sources(action.event))
        return allowed
    return allowed_by(action.then) if hasattr(action, "then") else None


@declared
class Delete:
    """Delete the rows, or move them to an archive.

    ::

        action=Delete(archive_to="archive.sessions", archive_keep=timedelta(days=90))

    Attributes:
      rows_counted_as: The name of the count of deleted rows.
      archive_to: Table that takes the rows, by its name or as a peewee model. The same statement deletes and inserts
        them. The archive has the table's columns, ``archived_at`` and ``archived_by_run``. With `dependents`, the name
        of a schema: its table of the same name takes the rows of each table.
      archive_keep: How long rows stay in the archive. The sweep ``<name>.archive`` then deletes them. None keeps them
        for ever.
      dependents: Whether to delete the rows that depend on the deleted ones first, at any depth, in bounded
        transactions. True: their foreign keys decide. A mapping adds to that and overrides it: ``"table"`` or
        ``"table.column"`` -> ``delete``, ``clear`` (the column gets NULL, or its default) or ``keep`` (a row with such
        a dependent stays). None leaves dependents to PostgreSQL.
      references: Links to dependents that have no foreign key.
    """

    rows_counted_as: str = "deleted_rows"
    archive_to: str | type[Model] | None = None
    archive_keep: timedelta | None = None
    dependents: Literal[True] | Mapping[str, Decision] | None = None
    references: Sequence[Reference] = ()
    #: The columns to move, once they were read from the table.
    _columns: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.references and self.dependents is None:
            raise DeclarationError("Delete: references without dependents; write dependents=True, or a mapping")
        if isinstance(self.archive_to, str):
            parsed_name(self.archive_to)
        if self.dependents is not None and self.archive_to is not None:
            if not isinstance(self.archive_to, str) or "." in self.archive_to:
                raise DeclarationError(
                    "Delete: with dependents, archive_to names a schema, which has an archive of each table; write "
                    'archive_to="archive"'
                )
            if self.archive_keep is not None:
                raise DeclarationError(
                    "Delete: archive_keep with dependents; delete from the archives by a sweep of your own"
                )
        if self.archive_keep is not None and self.archive_to is None:
            raise DeclarationError('Delete: archive_keep without an archive; write archive_to="archive.sessions"')
        if self.archive_keep is not None and self.archive_keep <= timedelta():
            raise DeclarationError(
                f"Delete: archive_keep is {self.archive_keep!r}, so no row would stay in the archive; write how long "
                "rows stay there, such as timedelta(days=90)"
            )

    @property
    def counted_as(self) -> Sequence[str]:
        archived = () if self.archive_to is None else (ARCHIVED_ROWS,)
        return (self.rows_counted_as, *archived, *(() if self.dependents is None else OF_DEPENDENTS))

    def read_graph(self, model: type[Model], *, checks_rights: bool = True) -> Graph:
        """Return `read_graph` of the dependents of the rows that are deleted from a table, in the current database."""
        from housekeeping.sweeps.dependents import Graph, read_graph

        name = quoted_name(model)
        # Most tables have no dependents, which one statement tells.
        if self.dependents is None and not self.references and not foreign_keys_to(name, deep=True):
            return Graph(name, (), database.selected, 0, model)
        archives = self.archive_to is not None
        return read_graph(model, self.dependents, self.references, archives=archives, checks_rights=checks_rights)

    def on_real_columns(self, model: type[Model]) -> Self:
        """Return the action that moves all columns which the table has now.

        Raises:
          peewee.PeeweeException: If the database cannot be read.
        """
        if self.archive_to is None:
            return self
        real = copy.copy(self)
        object.__setattr__(real, "_columns", columns_of_table(model))
        return real

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        if self.archive_to is None:
            delete: Any = table.model.delete().where(chosen).returning(*table.key)
            return Write([delete.cte("deleted")], self.counted_as[:1])
        columns = self._columns or declared_columns(table.model)
        archive = archive_model(table.model, self.archive_to)
        ctes, is_whole = moved(table, archive, chosen, columns, batch.run_id)
        return Write(ctes, self.counted_as[:2], requires=is_whole)


def delete_of(stage: Any) -> Delete | None:
    """Return the deletion of a stage, also the one after a `Call`; None if it deletes no rows of a table."""
    action = getattr(stage, "action", None)
    change = getattr(action, "then", action)
    return change if isinstance(change, Delete) else None


def is_bounded(stage: Stage) -> bool:
    """Return whether a stage deletes dependents itself, in separate transactions."""
    delete = delete_of(stage)
    return delete is not None and delete.dependents is not None


def graph_of(stage: Stage) -> Graph | None:
    """Return the graph of the dependents of the rows that a stage deletes; None if it deletes no rows of a table.

    Raises:
      DependentsRefused: Its `Delete` cannot delete them like this.
      peewee.PeeweeException: If the database cannot be read.
    """
    delete = delete_of(stage)
    if not isinstance(stage, TableStage) or delete is None:
        return None
    known: Graph | None = getattr(stage, "graph", None)
    return known or delete.read_graph(stage.model)


def archiving(action: Any) -> Delete | None:
    """Return the part of an action that moves rows to an archive; None if it does not."""
    part = archiving_part(action)
    return part if isinstance(part, Delete) else None


@declared
class Transition:
    """Fire an event of the table's state machine on the rows. The machine defines the allowed sources and the target.

    Attributes:
      rows_counted_as: The name of the count of changed rows.
      changes: Returns further columns to set, with their values, given the time of the change. The time is an SQL
        expression, not a `datetime`: use it unchanged or add a `timedelta`.
    """

    machine: StateMachine
    event: str
    rows_counted_as: str = "moved_rows"
    changes: Callable[[StatementTime], Mapping[Any, Any]] = lambda now: {}

    def __post_init__(self) -> None:
        events = self.machine.events
        if self.event not in events:
            raise DeclarationError(
                f"Transition: the machine has no event {self.event!r}; write {' or '.join(map(repr, events))}"
            )

    @property
    def counted_as(self) -> Sequence[str]:
        return (self.rows_counted_as,)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        state = self.machine.field
        changes = all_as_stored(table.model, self.changes(STATEMENT_TIME))
        update: Any = (
            table.model.update({state: self.machine.target(self.event), **changes})
            # COALESCE keeps PostgreSQL from using this condition for an index (see `table_stage.changes`).
            .where(chosen & fn.COALESCE(state.in_(self.machine.sources(self.event)), False))
            .returning(*table.key)
        )
        return Write([update.cte("moved")], self.counted_as)
