"""Queries that are compiled to SQL once and executed many times, and the types of times in them.

Each is executed in one round trip. `Recorder` says what a query uses, `explain` how PostgreSQL executes it.

Compiling the statement of a batch takes peewee longer than PostgreSQL needs to execute it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from types import NoneType
from typing import Any, Final, TypeVar

from peewee import (
    SQL,
    Context,
    DateField,
    DateTimeField,
    Delete,
    Expression,
    Field,
    FieldAlias,
    Insert,
    Model,
    ModelAlias,
    Node,
    PeeweeException,
    PostgresqlDatabase,
    Query,
    TimeField,
    Update,
    Value,
    fn,
)
from psycopg2.extensions import AsIs

from housekeeping.core.clock import SYSTEM_CLOCK, ClockSkew
from housekeeping.core.errors import RowNotChanged
from housekeeping.database.catalog import catalog_version, table_if_visible
from housekeeping.database.connection import database
from housekeeping.database.errors import is_of_statement_alone, sqlstate

T = TypeVar("T")


class Parameter(Value):
    """Placeholder for a value that is known only when the query is executed.

    Parameters:
      number: Index of the value. Values are sent unchanged; no column converts them.
    """

    def __init__(self, number: int) -> None:
        super().__init__(_Number(number), converter=False, unpack=False)
        self.number = number


class EstimatedParameter(Value):
    """Placeholder for the same value as a `Parameter`, from which PostgreSQL estimates rows when it plans the query.

    For the position of a batch. With a parameter of a prepared query, PostgreSQL would plan the query again for each
    batch, or plan it for an unknown position: it would expect too few rows, and sort all that are left. So the value is
    sent as a setting, which is read for the estimate when the query is planned, and again at each execution.

    Parameters:
      kind: SQL type of the value.
    """

    def __init__(self, number: int, kind: str) -> None:
        super().__init__(_Number(number, kind), converter=False, unpack=False)


class _Number:
    def __init__(self, number: int, kind: str | None = None) -> None:
        self.number, self.kind = number, kind

    def __repr__(self) -> str:
        return f"${self.number} {self.kind or ''}"


def with_parameters(text: str, number: int) -> Any:
    """Return SQL with so many parameters, which are known only when it is executed, as a `Parameter`."""
    return SQL(text, [_Number(each) for each in range(number)])


#: SQL text and the values of its parameters, some of them a `_Number`.
_Sql = tuple[str, Sequence[Any]]


def _compiled(query: Any) -> _Sql:
    text, values = database.get_sql_context().sql(query).query()
    return text, values


def condition_sql(condition: Any, model: type[Model], alias: str) -> tuple[str, list[Any]]:
    """Return a condition on the columns of a model as SQL about a table with this alias, with its parameters."""
    context: Any = database.get_sql_context()
    meta: Any = model._meta
    context.alias_manager[meta.table] = alias.strip('"')
    with context.scope_normal(subquery=True):  # a query in the condition gets its parentheses
        text, values = context.sql(condition).query()
    return text, list(values)


class _Statement:
    def __init__(self, sql: str, parameters: Sequence[Any]) -> None:
        self._sql, self._parameters = sql, parameters
        self._placeholders = [(index, value) for index, value in enumerate(parameters) if isinstance(value, _Number)]

    def _with(self, value_of: Callable[[_Number], Any]) -> list[Any]:
        """Return the parameters with these values for the placeholders."""
        parameters = list(self._parameters)
        for index, placeholder in self._placeholders:
            parameters[index] = value_of(placeholder)
        return parameters


def _out_of(values: Sequence[Any]) -> Callable[[_Number], Any]:
    return lambda placeholder: values[placeholder.number]


class CompiledQuery(_Statement):
    """SQL text of a query with its parameters, some of them a `Parameter`.

    Attributes:
      query: The query it was compiled from.
    """

    def __init__(self, query: Query) -> None:
        super().__init__(*_compiled(query))
        self.query: Final = query

    def rows(self, *values: Any) -> list[tuple[Any, ...]]:
        """Execute the query with these values for its placeholders; return the driver's rows."""
        rows: list[tuple[Any, ...]] = database.execute_sql(self._sql, self._with(_out_of(values))).fetchall()
        return rows


class QueryCache:
    """Cache of compiled queries for one purpose at a time, such as one run."""

    def __init__(self) -> None:
        self._cached: tuple[Hashable, dict[Hashable, Any]] = (None, {})

    def get(self, purpose: Hashable, form: Hashable, make: Callable[[], T]) -> T:
        """Return the cached query; compile it first if it is missing.

        Parameters:
          purpose: First part of the cache key, such as the current run. A new value empties the cache.
          form: Second part of the cache key: which of the purpose's queries.
          make: Compiles the query.
        """
        cached_purpose, queries = self._cached  # read once, because another thread may replace both
        if cached_purpose != purpose:
            queries = {}
            self._cached = (purpose, queries)
        if form not in queries:
            queries[form] = make()
        query: T = queries[form]
        return query


#: Prepared statements of a connection; the server keeps the plan of each.
_MOST: Final = 20
_numbers: Final = count(1)
#: Name of a setting with the value of an `EstimatedParameter`, without its number.
_SETTING: Final = "housekeeping.value"
#: PostgreSQL's codes for a prepared statement whose table has changed, and for one that is gone.
_OUTDATED: Final = ("0A000", "26000")


class _Part(_Statement):
    """One of the queries of a `PreparedQuery`."""

    def __init__(self, sql: str, parameters: Sequence[Any]) -> None:
        super().__init__(sql, parameters)
        used = [each for _, each in self._placeholders]
        self._numbers = sorted({each.number for each in used if each.kind is None})
        self._settings = sorted({each.number for each in used if each.kind is not None})

    def plain(self, values: Sequence[Any]) -> bytes:
        text: bytes = database.mogrify(self._sql, self._with(_out_of(values)))
        return text

    def prepare(self, name: str) -> bytes:
        def place(each: _Number) -> AsIs:
            if each.kind is None:
                return AsIs(f"${self._numbers.index(each.number) + 1}")
            return AsIs(f"current_setting('{_SETTING}{each.number}')::{each.kind}")

        text: bytes = b"PREPARE %b AS %b" % (name.encode(), database.mogrify(self._sql, self._with(place)))
        return text

    def execute(self, name: str, values: Sequence[Any]) -> bytes:
        given = [str(values[number]) for number in self._settings] + [values[number] for number in self._numbers]
        text = "".join(f"SET LOCAL {_SETTING}{number} = %s; " for number in self._settings) + f"EXECUTE {name}"
        if self._numbers:
            text += f"({', '.join(['%s'] * len(self._numbers))})"
        execution: bytes = database.mogrify(text, given)
        return execution


class PreparedQuery:
    """Queries that are sent together, as one transaction.

    The second execution on a direct connection prepares them. So a run that ends after one batch prepares nothing, and
    later batches need no parsing and planning.

    Attributes:
      queries: The queries, or their SQL with parameters.
    """

    def __init__(self, *queries: Query | _Sql) -> None:
        self.queries: Final = queries
        self._parts = [_Part(*(each if isinstance(each, tuple) else _compiled(each))) for each in queries]
        self._is_used = False
        self._can_prepare = True

    def rows_at_once(self, *values: Any) -> list[tuple[Any, ...]]:
        """Execute the queries in one round trip, in a transaction of their own; return the rows of the last one.

        Raises:
          peewee.PeeweeException: After a lost connection it is unknown whether the queries have taken effect.
        """
        prepared: dict[PreparedQuery, list[str]] | None = database.prepared()
        fetch: Callable[[bytes], list[tuple[Any, ...]]] = database.fetch_at_once
        if prepared is None:
            return fetch(self._plain(values))
        if self in prepared:
            try:
                return fetch(b"; ".join(self._executions(prepared[self], values)))
            except PeeweeException as error:
                if sqlstate(error) in _OUTDATED:
                    prepared.pop(self)  # the next execution prepares the queries again
                raise
        if not self._is_used or not self._can_prepare:
            self._is_used = True
            return fetch(self._plain(values))
        names = [f"housekeeping_{next(_numbers)}" for _ in self._parts]
        forgotten = prepared.pop(next(iter(prepared))) if len(prepared) >= _MOST else []
        texts = [b"DEALLOCATE %b" % name.encode() for name in forgotten]
        texts += [part.prepare(name) for part, name in zip(self._parts, names, strict=True)]
        try:
            rows = fetch(b"; ".join([*texts, *self._executions(names, values)]))
        except PeeweeException as error:
            if is_of_statement_alone(error):
                # PostgreSQL cannot infer the type of each parameter. Nothing was executed.
                self._can_prepare = False
                return self.rows_at_once(*values)
            prepared[self] = names  # the connection keeps them, although the transaction is undone
            raise
        prepared[self] = names
        return rows

    def _plain(self, values: Sequence[Any]) -> bytes:
        return b"; ".join(part.plain(values) for part in self._parts)

    def _executions(self, names: Sequence[str], values: Sequence[Any]) -> list[bytes]:
        return [part.execute(name, values) for part, name in zip(self._parts, names, strict=True)]


#: Types of values that the library itself writes into statements. Values of other types come from the application's
#: functions or from the run.
_OWN: Final = (NoneType, bool, int, str, _Number)


@dataclass(frozen=True, slots=True)
class Inputs:
    """SQL texts and values that functions of the application contribute to a statement."""

    texts: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, queries: Iterable[Any]) -> Inputs:
        """Return the inputs in the SQL of these queries."""
        compiled = [_compiled(each) for each in queries]
        return cls(tuple(text for text, _ in compiled), tuple(value for _, values in compiled for value in values))

    @classmethod
    def joined(cls, several: Sequence[Inputs]) -> Inputs:
        """Return all of these inputs."""
        return cls(tuple(t for each in several for t in each.texts), tuple(v for each in several for v in each.values))


class StatementTexts:
    """Cache of the compiled statements of a declaration, which later runs execute with other values.

    Compiling takes most of the time of a small run. Each run calls the functions of the declaration. A cached statement
    is used only if they return the same SQL as before, and if `catalog_version` is unchanged.

    Attributes:
      checked: The `catalog_version` at the last comparison of the stages with their tables; None before the first.
    """

    checked: Any = None

    def __init__(self) -> None:
        self._texts: dict[Hashable, tuple[Any, _Text]] = {}

    def prepared(self, form: Hashable, inputs: Inputs, make: Callable[[], Sequence[Query]]) -> PreparedQuery:
        """Return the statement with the values of these inputs.

        Parameters:
          form: Key of the statement: everything it depends on, except for the inputs and the catalog.
          make: Builds its queries.
        """
        version = catalog_version()
        known_version, text = self._texts.get(form, (None, None))
        parts = None if text is None or known_version != version else text.filled(inputs)
        if parts is None:
            parts = [_compiled(each) for each in make()]
            self._texts[form] = (version, _Text(inputs, parts))
        return PreparedQuery(*parts)


class _Text:
    """SQL of a statement, with the positions of its input values.

    The positions are found by comparing values. This is safe only for types that the library itself does not write,
    such as times. If an input of another type changes, the statement is compiled again.
    """

    def __init__(self, inputs: Inputs, parts: Sequence[_Sql]) -> None:
        self._inputs, self._parts = inputs, parts
        self._known = [_known(value) for value in inputs.values]
        places = {known: number for number, known in enumerate(self._known)}
        self._places = [
            {index: places.get(_known(value)) for index, value in enumerate(values) if type(value) not in _OWN}
            for _, values in parts
        ]

    def filled(self, inputs: Inputs) -> list[_Sql] | None:
        """Return the SQL with the values of these inputs; None if their positions are ambiguous or the SQL differs."""
        if inputs.texts != self._inputs.texts or any(None in each.values() for each in self._places):
            return None
        values: dict[Any, Any] = {}
        for before, value in zip(self._known, inputs.values, strict=True):
            now = _known(value)
            # Inputs that were equal before cannot be told apart.
            if values.setdefault(before, now) != now or (before != now and before[0] in _OWN):
                return None
        return [
            (sql, [self._filled(places, index, value, inputs) for index, value in enumerate(parameters)])
            for (sql, parameters), places in zip(self._parts, self._places, strict=True)
        ]

    @staticmethod
    def _filled(places: Mapping[int, int | None], index: int, value: Any, inputs: Inputs) -> Any:
        number = places.get(index)
        return value if number is None else inputs.values[number]


def _known(value: Any) -> tuple[type[Any], str]:
    return type(value), repr(value)


#: What `RowNotChanged` says of a row with other values than were written.
UNDONE: Final = "the row has other values than were written to it; a trigger or a rule of its table undoes the change"
#: Triggers set times of their own, such as that of the last change.
_TIMES: Final = (DateTimeField, DateField, TimeField)
#: Types that PostgreSQL cannot compare.
_INCOMPARABLE: Final = ("json", "xml")


def update_rows(update: Any) -> int:
    """Execute an UPDATE in the open transaction, and return the number of changed rows.

    Raises:
      RowNotChanged: A row has other values than were written; the transaction must be undone.
    """
    written = has_written_values(update)
    query: Any = update.returning(SQL("TRUE") if written is None else written)
    found = [as_written for (as_written,) in query.tuples().execute()]
    if not all(found):
        raise RowNotChanged(UNDONE)
    return len(found)


def has_written_values(update: Any) -> Expression | None:
    """Return the condition, for the RETURNING of an UPDATE, that the row has the constants that were written to it.

    Texts, whole numbers, booleans and NULL are compared. Times, fractions and values that PostgreSQL computes are not.
    None if the UPDATE writes nothing else.
    """
    conditions = [_has(column, value) for column, value in update._update.items() if _is_compared(column, value)]
    written: Expression | None = None
    for each in conditions:
        written = each if written is None else written & each
    return written


def _is_compared(column: Any, value: Any) -> bool:
    if not isinstance(column, Field) or isinstance(column, _TIMES) or isinstance(value, Node):
        return False
    stored = column.db_value(value)
    is_plain = stored is None or isinstance(stored, bool | int | str)
    return is_plain and table_if_visible(column.model).columns.get(column.column_name) not in _INCOMPARABLE


def _has(column: Field, value: Any) -> Any:
    return column.is_null() if column.db_value(value) is None else fn.COALESCE(column == value, False)


class Recorder(Context):
    """Compiler of statements that records their fields, tables and changes."""

    def __init__(self) -> None:
        super().__init__(**PostgresqlDatabase(None).get_context_options())
        self.fields: set[Field] = set()
        self.models: dict[type[Model], None] = {}
        self.changes: dict[type[Model], dict[str, None]] = {}

    def sql(self, obj: Any) -> Any:
        if isinstance(obj, Field):
            self.fields.add(obj.field if isinstance(obj, FieldAlias) else obj)
        if isinstance(obj, type) and issubclass(obj, Model):
            self.models[obj] = None
        elif isinstance(obj, ModelAlias):
            self.models[obj.model] = None
        elif isinstance(obj, Query):
            self._record(obj)
        return super().sql(obj)

    def _record(self, query: Any) -> None:
        if isinstance(query, Insert | Update | Delete) and hasattr(query, "model"):
            self.models[query.model] = None
            if isinstance(query, Update):
                changes: Any = query
                # A `Column` of a table has a name alone.
                columns = ", ".join(getattr(each, "column_name", None) or each.name for each in changes._update)
                right = f"UPDATE ({columns})"
            else:
                right = "INSERT" if isinstance(query, Insert) else "DELETE"
            self.changes.setdefault(query.model, {})[right] = None
        if getattr(query, "_for_update", None):
            for model in query._from_list:
                if isinstance(model, type) and issubclass(model, Model):
                    # FOR NO KEY UPDATE needs the same right.
                    self.changes.setdefault(model, {})["FOR UPDATE"] = None

    def rights(self) -> dict[type[Model], tuple[str, ...]]:
        """Return table -> the rights that the statements need on it, ``FOR UPDATE`` where they lock its rows."""
        return {model: ("SELECT", *self.changes.get(model, ())) for model in self.models}


def written_out(query: Node, **settings: Any) -> str:
    """Return a statement, or a part of one, with its parameters in their places, to be read.

    Parameters:
      settings: Settings of peewee's compiler.
    """
    sql, parameters = database.get_sql_context(**settings).sql(query).query()
    written: bytes = database.mogrify(sql, parameters)
    return written.decode()


def explain(query: Any) -> list[dict[str, Any]]:
    """Return the nodes of PostgreSQL's plan of the statement, as for a large table."""
    # The database's context: a query that starts with a common table expression has none of its own.
    sql, parameters = database.get_sql_context().sql(query).query()
    with database.atomic() as transaction:
        # PostgreSQL scans small tables even if they have a suitable index.
        database.execute_sql("SET LOCAL enable_seqscan = off")
        database.execute_sql("SET LOCAL enable_sort = off")
        plan: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()[0]
        transaction.rollback()
    return list(_nodes(plan[0]["Plan"]))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


_READ_ONLY: Final = """
SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only') = 'on' AND EXISTS (
    SELECT FROM pg_settings WHERE name = 'default_transaction_read_only'
    AND source NOT IN ('client', 'session', 'user', 'database user')
)
"""


def read_database_clock() -> ClockSkew:
    """Compare this machine's clock with the database's; one round trip."""
    before = SYSTEM_CLOCK.now()
    server_at = database.execute_sql("SELECT clock_timestamp()").fetchone()[0]
    return ClockSkew.between(before, server_at.astimezone(UTC), SYSTEM_CLOCK.now())


def why_read_only() -> str | None:
    """Return why the server rejects all writes; None if it accepts them.

    Note: A session or a role that may only read does not count.
    """
    in_recovery, read_only = database.execute_sql(_READ_ONLY).fetchone()
    if in_recovery or read_only:
        return f"it is {'a replica' if in_recovery else 'read-only'}: use the URL of the primary, or make it writable"
    return None


def database_now() -> datetime:
    """Return the database's time in UTC; one round trip."""
    return read_database_clock().server_at


class UtcDateTimeField(DateTimeField):
    """``timestamptz`` column that rejects naive datetimes and reads as UTC.

    Raises:
      ValueError: If a datetime without a timezone is written or compared.
    """

    field_type = "TIMESTAMPTZ"

    def db_value(self, value: datetime | None) -> Any:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{self.name}: {value!r} has no timezone")
        return value

    def python_value(self, value: Any) -> Any:
        value = super().python_value(value)
        return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


class NaiveUtcDateTimeField(UtcDateTimeField):
    """``timestamp`` column without time zone that contains UTC; rejects naive datetimes and reads as UTC.

    Values that are compared with it are converted to UTC here. PostgreSQL would convert them to the time zone of the
    session, and every age would be wrong by the offset of that zone.
    """

    field_type = "TIMESTAMP"

    def db_value(self, value: datetime | None) -> Any:
        value = super().db_value(value)
        return value and value.astimezone(UTC).replace(tzinfo=None)

    def python_value(self, value: Any) -> Any:
        value = super().python_value(value)
        return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value


class StatementTime(SQL):
    """SQL for the time of the statement; add a `timedelta` for a later time, subtract one for an earlier time.

    An expression and not a `datetime`, because a run compiles its statements once and executes them for each batch.
    """

    def __init__(self, offset: timedelta = timedelta()) -> None:
        self.offset = offset
        if offset:
            super().__init__("(statement_timestamp() + %s)", (offset,))
        else:
            super().__init__("statement_timestamp()")

    def __add__(self, other: Any) -> Any:
        return StatementTime(self.offset + other) if isinstance(other, timedelta) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return self + other if isinstance(other, timedelta) else super().__radd__(other)

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, timedelta) else super().__sub__(other)


STATEMENT_TIME: Final = StatementTime()


def statement_time(column: Any) -> Any:
    """Return SQL for the time of the statement, as the column stores it."""
    return as_stored(column, STATEMENT_TIME)


def as_stored(column: Any, value: Any) -> Any:
    """Return the value to write; a `StatementTime` becomes UTC if the column has no time zone."""
    if isinstance(value, StatementTime) and isinstance(column, NaiveUtcDateTimeField):
        return fn.TIMEZONE("UTC", value)
    return value


def all_as_stored(model: type[Model], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the changes, column or its name -> value, with each value `as_stored`."""
    columns: Mapping[str, Any] = model._meta.combined
    return {
        column: as_stored(columns.get(column) if isinstance(column, str) else column, value)
        for column, value in changes.items()
    }
