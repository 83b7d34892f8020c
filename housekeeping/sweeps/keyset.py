"""Stale rows of a table in keyset order: after a position, in groups with limits of their own, and not on hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial, reduce
from operator import and_
from typing import Any, Final, Self, TypeVar

from peewee import (
    OP,
    SQL,
    Alias,
    Context,
    DataError,
    DateTimeField,
    EnclosedNodeList,
    Expression,
    Field,
    FieldAlias,
    Function,
    IntegerField,
    Model,
    ModelSelect,
    Negated,
    NodeList,
    PostgresqlDatabase,
    ProgrammingError,
    Query,
    Select,
    Tuple,
    Value,
    WrappedNode,
    fn,
)

from housekeeping.core.logs import logger as named_logger
from housekeeping.core.logs import typed_error_line
from housekeeping.database.catalog import key_of, of_any_length, table_if_visible
from housekeeping.database.connection import database
from housekeeping.database.queries import CompiledQuery, EstimatedParameter, Parameter, QueryCache
from housekeeping.sweeps.conditions import bare
from housekeeping.sweeps.stage import Batch, Position

logger = named_logger(__name__)

Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a table's rows.

    Attributes:
      source: The table of the groups: a model or its alias.
      key: Its column that identifies a group.
      column: The column of the rows that names their group.
      condition: Condition of the stale rows, on columns of both tables.
    """

    source: Any
    key: Any
    column: Field
    condition: Any

    @classmethod
    def of(cls, order: Sequence[Any], predicate: Any) -> Self | None:
        """Return the groups that a predicate names; None if it has another form.

        It is a condition, or several joined by ``&``, of which one is an EXISTS of a query on the table of the groups.
        That compares a unique column of this table with the first column of the order.
        """
        parts = list(conditions_of(predicate))
        for number, part in enumerate(parts):
            query = exists_of(part)
            (source,) = query._from_list if query is not None and len(query._from_list) == 1 else (None,)
            if query is None or len(order) < 2 or getattr(source, "model", source) is order[0].model:
                continue
            for condition in conditions_of(query._where):
                key = _compared_with(condition, order[0], source)
                if key is not None:
                    others = (*parts[:number], *parts[number + 1 :])
                    return cls(source, key, order[0], reduce(and_, (query._where, *others)))
        return None

    @property
    def table_name(self) -> str:
        """Name of the table of the groups, without its schema."""
        name: str = getattr(self.source, "model", self.source)._meta.table_name
        return name

    def select(
        self,
        rows: ModelSelect[Any],
        columns: Sequence[Any],
        limit: int | None,
        *,
        order: Sequence[Any] = (),
        of_each: int | None = None,
        since: Any = None,
    ) -> Select:
        """Return columns of the stale rows among those of a query, as the columns ``c0``, ``c1`` and so on.

        Parameters:
          limit: The most rows; None only with `of_each`.
          order: Columns that order the rows of one group; the groups are in the order of their key. The query ends at
            the group that has enough rows. Without an order the rows are in any order.
          of_each: The most rows of one group. Default: the limit. Without a limit of each group, PostgreSQL could join
            the tables in another way.
          since: Key of the first group; None for all.
        """
        names = [f"c{number}" for number in range(len(columns) + len(order))]
        named = [Alias(column, name) for column, name in zip((*columns, *order), names, strict=True)]
        rows = rows.order_by(*order) if order else rows
        found = rows.select(*named).where(self.condition).limit(of_each or limit).alias("found")
        returned = [found.c[name] for name in names]
        query = Select((self.source, NodeList((SQL("LATERAL"), found))), returned[: len(columns)]).limit(limit)
        if since is not None:
            query = query.where(self.key >= since)
        return query.order_by(self.key, *returned[len(columns) :]) if order else query


def exists_of(condition: Any) -> Any:
    """Return the subquery of an EXISTS that is true if and only if a row meets its WHERE; None for other conditions."""
    condition = bare(condition)
    if not isinstance(condition, Function) or (condition.name or "").upper() != "EXISTS":
        return None
    query: Any = condition.arguments[0] if condition.arguments else None
    if not issubclass(type(query), Select) or query._where is None or query._group_by or query._having:
        return None
    if query._limit is not None or query._offset is not None or query._cte_list:
        return None
    # An aggregate would always return a row.
    return query if all(isinstance(each, Field | FieldAlias) for each in query._returning) else None


def conditions_of(condition: Any) -> Iterator[Any]:
    """Yield the conditions that AND joins, in order."""
    condition = bare(condition)
    if isinstance(condition, Expression) and condition.op == OP.AND:
        yield from conditions_of(condition.lhs)
        yield from conditions_of(condition.rhs)
    else:
        yield condition


def _compared_with(condition: Any, column: Field, source: Any) -> Any:
    """Return the unique column of the groups' table that the condition compares with the column; None without one."""
    if not isinstance(condition, Expression) or condition.op != OP.EQ:
        return None
    sides = bare(condition.lhs), bare(condition.rhs)
    for key, other in (sides, sides[::-1]):
        of_source = isinstance(key, Field | FieldAlias) and getattr(key, "source", key.model) is source
        if of_source and other is column:
            model = getattr(source, "model", source)
            return key if table_if_visible(model).is_unique([key.column_name]) else None
    return None


#: Returns the condition of the rows that must stay, or a query that finds a row for each of them, given the time.
Hold = Callable[[datetime], Any]

_offline: Final = PostgresqlDatabase(None)


@dataclass(frozen=True, slots=True)
class ExceptHeld:
    """Predicate of the stale rows that are not on hold.

    Attributes:
      stale: The predicate of all stale rows.
      model: The table of the rows.
    """

    stale: Callable[[datetime], Any]
    hold: Hold
    model: type[Model] | None

    def __call__(self, now: datetime) -> Expression:
        processed: Expression = self.stale(now) & is_not_held(self.condition(now))
        return processed

    def condition(self, now: datetime) -> Any:
        """Return the condition of the rows on hold, stale or not."""
        return held_condition(self.hold, self.model, now)


def held_condition(hold: Hold, model: type[Model] | None, now: datetime) -> Any:
    """Return the condition of the rows on hold.

    A query becomes an EXISTS. So does a condition on columns of other tables, such as
    ``LegalHold.user_id == Session.user_id``.

    Parameters:
      model: The table of the rows.
    """
    return _in_sql(hold(now), model)


class OnTable(WrappedNode):
    """Condition on the columns of one model, applied to the rows of another table that has these columns, too.

    Parameters:
      declared: The model whose columns the condition names.
      model: The table of the rows.
    """

    def __init__(self, condition: Any, declared: type[Model], model: type[Model]) -> None:
        super().__init__(condition)
        self._declared: Any = declared
        self._model: Any = model

    def __sql__(self, ctx: Context) -> Any:
        context: Any = ctx
        table = self._model._meta.table
        context.alias_manager[self._declared._meta.table] = table._alias or context.alias_manager[table]
        return context.sql(self.node)

    def is_not_held(self) -> OnTable:
        """Return the condition that a row of the table is not on hold."""
        return OnTable(is_not_held(self.node), self._declared, self._model)


def hold_of_another_table(hold: Hold, declared: type[Model], model: type[Model]) -> Hold:
    """Return a hold on the columns of `declared` as a hold of the rows of `model`."""
    return lambda now: OnTable(held_condition(hold, declared, now), declared, model)


def _in_sql(condition: Any, model: type[Model] | None) -> Any:
    condition = bare(condition)
    if isinstance(condition, Query):
        return fn.EXISTS(condition)
    if _is_join(condition, OP.OR):
        # Each side by itself: an EXISTS around both would hold nothing while the other table is empty.
        return Expression(_in_sql(condition.lhs, model), OP.OR, _in_sql(condition.rhs, model))
    others = _other_models(condition, model)
    return fn.EXISTS(Select(others, [SQL("1")]).where(condition)) if others else condition


def is_not_held(condition: Any) -> Any:
    """Return the condition that a row is not on hold. A hold that is NULL for a row does not hold it."""
    condition = bare(condition)
    if _is_join(condition, OP.OR):
        return is_not_held(condition.lhs) & is_not_held(condition.rhs)
    if isinstance(condition, OnTable):
        return condition.is_not_held()
    if isinstance(condition, Function) and (condition.name or "").upper() == "EXISTS":
        return ~condition
    return is_not_true(condition)


def is_true(condition: Any) -> Expression:
    """Return the condition that another one is true, in a form that PostgreSQL turns into no join."""
    return Expression(EnclosedNodeList([condition]), OP.IS, SQL("TRUE"))


def is_not_true(condition: Any) -> Expression:
    """Return the condition that another one is false or NULL. IS binds more than NOT and OR, hence the parentheses."""
    return Expression(EnclosedNodeList([condition]), OP.IS_NOT, SQL("TRUE"))


def needs_no_row(condition: Any, model: type[Model] | None) -> bool:
    """Return whether a part of a hold needs no row of another table that the hold names outside of subqueries.

    The other table is in the hold's EXISTS, so that part would hold nothing while the table is empty.
    """
    condition = bare(condition)
    if _is_join(condition, OP.OR):
        return needs_no_row(condition.lhs, model) or needs_no_row(condition.rhs, model)
    return bool(_other_models(condition, model)) and _has_lone_side(condition, model, (OP.OR,))


def _has_lone_side(node: Any, model: type[Model] | None, joins: tuple[str, ...]) -> bool:
    node = bare(node)
    if isinstance(node, Negated):
        return _has_lone_side(node.node, model, (OP.AND, OP.OR))
    if not isinstance(node, Expression):
        return False
    sides = (node.lhs, node.rhs)
    if node.op in joins and len({frozenset(_other_models(side, model)) for side in sides}) > 1:
        return True
    return any(_has_lone_side(side, model, joins) for side in sides)


def _is_join(condition: Any, join: str) -> bool:
    return isinstance(condition, Expression) and condition.op == join


class _OuterColumns(Context):
    """Compiler that records the columns outside of subqueries."""

    def __init__(self) -> None:
        super().__init__(**_offline.get_context_options())
        self.columns: list[Field | FieldAlias] = []

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Query | OnTable):
            return self
        if isinstance(obj, Field | FieldAlias):
            self.columns.append(obj)
        return super().sql(obj)


def outer_columns(condition: Any) -> list[Field | FieldAlias]:
    """Return the columns of a condition outside of its subqueries."""
    outer = _OuterColumns()
    outer.sql(condition)
    return outer.columns


def _other_models(condition: Any, model: type[Model] | None) -> list[Any]:
    # The model of an aliased column is the alias.
    models = dict.fromkeys(column.model for column in outer_columns(condition))
    return [each for each in models if each is not model]


#: Tells whether a column can be NULL in the stale rows.
MayBeNull = Callable[[Field], bool]

#: A comparison with NULL is not true, so a row that one of these matches has a value.
_COMPARISONS: Final = frozenset((OP.EQ, OP.NE, OP.LT, OP.LTE, OP.GT, OP.GTE, OP.IN, OP.BETWEEN, OP.LIKE, OP.ILIKE))


def comes_after(order: Sequence[Any], position: Position, may_be_null: MayBeNull) -> Expression:
    """Return the condition that a row comes after the position.

    It holds only for rows whose first order column is NULL as in the position, or is not NULL as in the position.
    """
    first, *others = order
    after: Expression
    if len(position) < len(order):  # before the NULLs; without ==, which placeholders overload
        after = first.is_null()
        return after
    values = literals(position)
    begin = _estimated(first, values[0])
    if not any(may_be_null(column) for column in others):
        after = Tuple(*order) > Tuple(begin, *values[1:])
        if position[0] is None:
            after = first.is_null() & (Tuple(*others) > Tuple(*values[1:]))
        return after
    # A row comparison is not defined for NULL, so the further columns are compared one by one.
    later: Any = None
    for column, value in reversed(list(zip(others, values[1:], strict=True))):
        same = column.is_null() if value is None else column == value
        later = same & later if later is not None else None
        if value is not None:
            greater = column > value
            if may_be_null(column):
                greater |= column.is_null()
            later = greater if later is None else greater | later
    # Not `first > value` again: PostgreSQL would expect that it leaves out many rows once more.
    after = first.is_null() & later if position[0] is None else (first >= begin) & ((first != values[0]) | later)
    return after


def _estimated(column: Any, value: Any) -> Any:
    """Return a placeholder for a value of the column as an `EstimatedParameter`, if its type is known."""
    kind = table_if_visible(column.model).columns.get(column.column_name)
    if not isinstance(value, Parameter) or kind is None:
        return value
    return EstimatedParameter(value.number, of_any_length(kind))


def comes_until(
    order: Sequence[Any], position: Position, may_be_null: MayBeNull, *, newest_first: bool = False
) -> Expression:
    """Return the condition that a row does not come after the position."""
    if newest_first:
        reached: Expression = Tuple(*order) >= Tuple(*literals(position))
        return reached
    after: Any = comes_after(order, position, may_be_null)
    value = literals(position)[0]
    until: Expression = ~after if value is None else (order[0] <= value) & ~after
    return until


def has_key(key: Sequence[Field], values: Sequence[Position]) -> Expression:
    """Return the condition that a row has one of these keys."""
    keys = [literals(each) for each in values]
    found: Expression = (
        key[0].in_([value for (value,) in keys]) if len(key) == 1 else Tuple(*key).in_([Tuple(*each) for each in keys])
    )
    return found


def literals(position: Position) -> list[Any]:
    """Return a position's values as parameters of a query, which no column of a model converts."""
    return [v if v is None or isinstance(v, Parameter) else Value(v, converter=False, unpack=False) for v in position]


def readable(column: Any, value: Any) -> Any:
    """Return a value of a position for people: times in ISO 8601, anything else as PostgreSQL writes it."""
    if not isinstance(column, DateTimeField) or not isinstance(value, str):
        return value
    try:
        return column.python_value(datetime.fromisoformat(value)).isoformat()
    except ValueError:
        return value  # infinity, or a year that Python does not have


def may_be_null(column: Field, predicate: Any) -> bool:
    """Return whether a row that matches `predicate` may have NULL in `column`; True if unknown."""
    return is_nullable(column) and not _excludes_null(predicate, column)


def is_nullable(column: Field) -> bool:
    """Return whether the table allows NULL in the column; without a table, whether the model does."""
    table = table_if_visible(column.model)
    return column.column_name not in table.not_null if table.exists else bool(column.null)


def _excludes_null(predicate: Any, column: Field) -> bool:
    predicate = bare(predicate)
    query = exists_of(predicate)
    if query is not None:
        return _excludes_null(query._where, column)
    if not isinstance(predicate, Expression):
        return False
    if predicate.op == OP.AND:
        return _excludes_null(predicate.lhs, column) or _excludes_null(predicate.rhs, column)
    if predicate.op == OP.OR:
        return _excludes_null(predicate.lhs, column) and _excludes_null(predicate.rhs, column)
    if predicate.op == OP.IS_NOT and predicate.rhs is None:
        return bare(predicate.lhs) is column
    return predicate.op in _COMPARISONS and (bare(predicate.lhs) is column or bare(predicate.rhs) is column)


_NAME: Final = 63 - len("position_of_")  # bytes; PostgreSQL's longest name
#: Keys of the rows that `lock_statement` has locked in this transaction; NULL if it has locked none.
LOCKED_KEYS: Final = SQL("nullif(current_setting('housekeeping.batch', true), '')::bigint[]")
#: The position before the rows whose first order column is NULL; they come last.
BEFORE_NULLS: Final[Position] = (None,)


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Stale rows of a table.

    Attributes:
      stale: The predicate, given the time at which the run began. Run, plan and backlog all use it.
      order: Columns that order the rows, ending with those of the primary key, so that a batch can continue after any
        row. Rows with NULL in one of them come last.
      columns: Further columns to read for events and log lines, by their key in a row. Columns in the model's
        ``optional_fields`` are left out if the table lacks them.
      newest_first: Whether the order is reversed. Only for columns without NULL, and runs that begin at the front.
      hold: Returns the condition of rows that stay although they are stale (see `held_condition`). `stale` then
        excludes them.
    """

    name: str
    stale: Any
    order: tuple[Any, ...]
    batch_size: int = 100
    columns: Mapping[str, Any] = field(default_factory=dict)
    newest_first: bool = False
    hold: Hold | None = None
    statements: QueryCache = field(default_factory=QueryCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Every statement uses `stale`, so none of them can forget the hold. A copy of the stage has it already.
        if self.hold is not None and not isinstance(self.stale, ExceptHeld):
            model = getattr(self.order[0], "model", None) if self.order else None
            object.__setattr__(self, "stale", ExceptHeld(self.stale, self.hold, model))

    @property
    def model(self) -> type[Model]:
        """The model of the table."""
        model: type[Model] = self.order[0].model
        return model

    @property
    def key(self) -> tuple[Field, ...]:
        """Columns that identify a row: the key of the model, or of its table if that is another one (`identify`)."""
        return key_of(self.model)

    def key_values(self, position: Position) -> Position:
        """Return the values of `key` in a position, which has those of `order`."""
        values = {column.column_name: value for column, value in zip(self.order, position, strict=True)}
        return tuple(values[column.column_name] for column in self.key)

    def is_position(self, position: Position) -> bool:
        """Return whether a position can be one of this stage: PostgreSQL can compare it with the `order`.

        Raises:
          peewee.PeeweeException: If the database cannot be read.
        """
        if position == BEFORE_NULLS or len(position) != len(self.order):
            return position == BEFORE_NULLS
        after = self.model.select(SQL("1")).where(Tuple(*self.order) > Tuple(*literals(position)))
        try:
            with database.atomic():
                CompiledQuery(after.limit(0)).rows()
        except (DataError, ProgrammingError):
            return False
        return True

    @property
    def as_text(self) -> list[Any]:
        """Order columns that a position contains as PostgreSQL's text; integer columns need no text.

        The driver cannot return every other value unchanged, for example an infinite time or a year before 1.
        """
        return [column for column in self.order if not isinstance(column, IntegerField)]

    def position_of(self, row: Sequence[Any]) -> Position:
        """Return the position of a result row of the query `rows`."""
        texts = iter(row[len(self.order) + len(self.columns) :])
        as_text = {id(column) for column in self.as_text}
        return tuple(
            next(texts) if id(column) in as_text else value for column, value in zip(self.order, row, strict=False)
        )

    def position_after(self, batch: Batch, last: Position | None, number: int) -> tuple[Position | None, bool]:
        """Return the position after a batch of `number` rows that ends with `last`, and whether none is left."""
        position = last or batch.after
        if number >= self.batch_size:
            return position, False
        beyond = (
            batch.after is None or batch.after[0] is None or (batch.until is not None and batch.until[0] is not None)
        )
        if beyond or not self.first_may_be_null(batch):
            return position, True
        return BEFORE_NULLS, False

    def rows(
        self,
        batch: Batch,
        *,
        is_locked: bool = False,
        with_texts: bool = True,
        locks: bool = True,
    ) -> ModelSelect[Any]:
        """Return the query of a batch's rows: order columns, further columns, then texts for `position_of`.

        Parameters:
          is_locked: Only the rows that `lock_statement` has locked.
          with_texts: Whether the texts are selected; PostgreSQL makes those of a time slowly.
          locks: Whether the caller locks the rows. A row of a group must be locked where it is found, because another
            one takes the place of a row that is skipped.
        """
        query = self._selected(with_texts=with_texts)
        if is_locked:
            return query.where(self.key[0] == fn.ANY(LOCKED_KEYS)).order_by(*self.directed(self.order))
        stale = self.stale(batch.now)
        if batch.only is not None:
            return query.where(stale, self.is_one_of(batch.only)).order_by(*self.directed(self.order))
        places = self._places(batch)
        groups = self.groups(stale)
        if groups is None:
            query = query.where(stale, *places)
        else:
            rows = self.model.select().where(*places) if places else self.model.select()
            since = literals(batch.after)[0] if batch.after is not None else None
            order = self.order[1:]
            rows = self.locking(batch, rows) if locks else rows
            query = query.where(self._has_key(groups.select(rows, self.key, self.batch_size, order=order, since=since)))
        return query.order_by(*self.directed(self.order)).limit(self.batch_size)

    def locking(self, batch: Batch, rows: Any) -> Any:
        """Return a query of rows so that it locks them for the stage's action and skips rows of other sessions."""
        raise NotImplementedError

    def _selected(self, *, with_texts: bool) -> ModelSelect[Any]:
        texts = [column.cast("text").alias(text_of(column)) for column in self.as_text] if with_texts else []
        return self.model.select(*self.order, *self.columns.values(), *texts)

    def groups(self, stale: Any) -> Groups | None:
        """Return the groups of the rows, if the predicate has a limit for each group; None otherwise."""
        return None if self.newest_first else Groups.of(self.order, stale)

    def first_stale(
        self, now: datetime, columns: Sequence[Any], limit: int, stale: Any = None, *, in_order: bool = False
    ) -> Select:
        """Return columns of stale rows, up to the limit, as the columns ``c0``, ``c1`` and so on.

        Parameters:
          stale: Another predicate than that of the stage.
          in_order: Whether they are the first rows in the order of the stage; otherwise any.
        """
        predicate = (self.stale if stale is None else stale)(now)
        groups = self.groups(predicate)
        if groups is None:
            named = (Alias(column, f"c{number}") for number, column in enumerate(columns))
            found = self.model.select(*named).where(predicate).limit(limit)
            return found.order_by(*self.order) if in_order else found
        return groups.select(self.model.select(), columns, limit, order=self.order[1:] if in_order else ())

    def age_column(self, now: datetime) -> Field:
        """Return the column that says how old a row is: the first of the order, after that of a group."""
        column: Field = self.order[0 if self.groups(self.stale(now)) is None else 1]
        return column

    def _places(self, batch: Batch) -> list[Expression]:
        """Return the conditions that a row is within the batch's positions."""
        places = []
        if batch.after is not None and self.newest_first:
            places.append(Tuple(*self.order) < Tuple(*literals(batch.after)))  # an order without NULL
        elif batch.after is not None:
            places.append(comes_after(self.order, batch.after, partial(self._may_be_null, batch.now)))
        if batch.until is not None:
            is_null = partial(self._may_be_null, batch.now)
            places.append(comes_until(self.order, batch.until, is_null, newest_first=self.newest_first))
        return places

    def _has_key(self, keys: Select) -> Expression:
        found: Expression = self.key[0] == fn.ANY(fn.ARRAY(keys)) if len(self.key) == 1 else Tuple(*self.key).in_(keys)
        return found

    def directed(self, columns: Sequence[Any], *, reverse: bool = False) -> list[Any]:
        """Return the columns of the order as an ORDER BY takes them, or in reverse."""
        return [column.desc() for column in columns] if self.newest_first is not reverse else list(columns)

    def run_statement(self, batch: Batch, form: Hashable, make: Callable[[Batch], Query]) -> list[tuple[Any, ...]]:
        """Execute a statement of a batch and return its rows. It is compiled once a run; see `statement`."""
        return self.statement(batch, form, lambda batch: CompiledQuery(make(batch))).rows(*batch.after or ())

    def statement(self, batch: Batch, form: Hashable, make: Callable[[Batch], Q]) -> Q:
        """Return a batch's statement, compiled once per run. Its first parameters are the values of `batch.after`.

        Parameters:
          form: Cache key of the statement, besides the run and the batch's position.
          make: Builds and compiles the statement. The position of its batch consists of placeholders.
        """
        if batch.only is not None:
            return make(batch)
        after = batch.after

        def made() -> Q:
            blank = None if after is None else tuple(v if v is None else Parameter(n) for n, v in enumerate(after))
            return make(replace(batch, after=blank))

        shape = None if after is None else tuple(value is None for value in after)
        return self.statements.get(self.purpose(batch), (form, shape, batch.until), made)

    def purpose(self, batch: Batch) -> Hashable:
        """Return the key under which the compiled statements of this run are cached."""
        return batch.run_id, batch.now

    def describe(self, position: Position) -> dict[str, Any]:
        return {column.name: readable(column, value) for column, value in zip(self.order, position, strict=True)}

    def is_one_of(self, positions: Sequence[Position]) -> Expression:
        """Return the condition that a row is at one of these positions."""
        return has_key(self.key, [self.key_values(position) for position in positions])

    def first_may_be_null(self, batch: Batch) -> bool:
        """Return whether the first order column can be NULL in stale rows; computed once a run."""
        return self.statements.get(
            self.purpose(batch), "first may be null", lambda: self._may_be_null(batch.now, self.order[0])
        )

    def _may_be_null(self, now: datetime, column: Field) -> bool:
        in_key = column.column_name in [each.column_name for each in self.key]
        return not in_key and may_be_null(column, self.stale(now))

    def records(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the driver's rows as dictionaries, each value converted by its column, or unchanged if that raises."""
        columns = (*self.order, *self.columns.values())
        # Column by column: to look up the conversion of each value takes as long as a log line.
        values = zip(columns, zip(*rows, strict=True), strict=False)
        read = zip(*(_read(column, found) for column, found in values), strict=True)
        return [self.record(each) for each in read]

    def record(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """Return a row of the query `rows` as a dictionary, for events and log lines."""
        return dict(zip(self._names, row, strict=False))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return (*(column.name for column in self.order), *self.columns)


def _read(column: Any, values: Sequence[Any]) -> Sequence[Any]:
    try:
        return [column.python_value(each) for each in values]
    except Exception as error:
        logger.warning("Values cannot be read", column=column.column_name, error=typed_error_line(error))
        return [_read_one(column, each) for each in values]


def _read_one(column: Any, value: Any) -> Any:
    try:
        return column.python_value(value)
    except Exception:  # the caller has logged the first one
        return value


def text_of(column: Any) -> str:
    """Return the alias under which a query selects the column as text, for the position of a row."""
    name: str = column.column_name
    # PostgreSQL would shorten a longer alias, and the driver would return it by the shortened name.
    return f"position_of_{name if len(name.encode()) <= _NAME else hashlib.sha256(name.encode()).hexdigest()[:16]}"
