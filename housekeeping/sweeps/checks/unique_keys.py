"""Comparison of a stage's key with the unique keys of its table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from peewee import Field, Model

from housekeeping.core.errors import DeclarationError
from housekeeping.database.catalog import Table, forget_table, quoted_name, read_table, table_of
from housekeeping.database.primary_key import declared_key_columns, vouches_for_key
from housekeeping.sweeps.checks.statements import used_fields
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.sweeps.table_models.columns import is_built

_NO_KEY: Final = "has no primary key and no unique index over NOT NULL columns, so its rows cannot be told apart"

_SYSTEM_COLUMNS: Final = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}


def stages_of(sweep: Sweep) -> tuple[Stage, ...]:
    """Return the stages of a run, after checking their keys and columns against the real tables.

    Raises:
      DeclarationError: The key of a stage is not unique in its table, the table lacks a column that the stage uses, or
        a statement of its action identifies rows by a part of their key.
      peewee.PeeweeException: When the database cannot be asked.
    """
    stages = sweep.stages_for_run()
    for stage in stages:
        if isinstance(stage, TableStage) and (missing := missing_column(stage)) is not None:
            raise DeclarationError(f"{sweep.name}: {missing}")
        if isinstance(stage, TableStage) and wrong_key(stage) is not None:
            forget_table(stage.model)  # it may have been given a key since it was looked at
            if (mismatch := wrong_key(stage)) is not None:
                forget_table(stage.model)
                raise DeclarationError(f"{sweep.name}: {'; '.join(mismatch)}")
        if isinstance(stage, TableStage):
            try:
                stage.statements_of_a_run(datetime.now(UTC))
            except DeclarationError as error:
                raise DeclarationError(f"{sweep.name}: {error}") from None
    return stages


def missing_column(stage: TableStage) -> str | None:
    """Return an error text for a column of the stage that its table lacks; None if it has all of them."""
    model = stage.model
    if not _absent_columns(model, table_of(model)):
        return None
    table = read_table(model)  # the known one may be outdated
    absent = _absent_columns(model, table)
    # Other sweeps may use further columns of the model.
    fields = used_fields(stage, datetime.now(UTC))
    used = sorted((each for each in fields if each.model is model and each.column_name in absent), key=_name_of)
    if not used:
        return None
    return (
        f"table {quoted_name(model)} has no column {used[0].column_name}, which {model.__name__}.{used[0].name} "
        f"declares; its columns are {', '.join(sorted(table.columns))}"
    )


def _absent_columns(model: type[Model], table: Table) -> set[str]:
    if not table.exists:
        return set()  # the first statement on the table reports it
    meta: Any = model._meta
    return {name for name in meta.columns if name not in table.columns} - _SYSTEM_COLUMNS


def _name_of(field: Field) -> str:
    return str(field.name)


def wrong_key(stage: TableStage) -> tuple[str, str] | None:
    """Return an error text for a stage's wrong key, with the right one; None if the key is right."""
    model, table = stage.model, table_of(stage.model)
    if not table.enforced or vouches_for_key(model) or table.is_unique(column.column_name for column in stage.key):
        return None
    name, declared = quoted_name(model), ", ".join(declared_key_columns(model))
    if not table.keys:
        return (
            f"{name} {_NO_KEY} ({model.__name__} declares the key ({declared}))",
            f"add one: ALTER TABLE {name} ADD PRIMARY KEY ({declared})",
        )
    keys = " and ".join(_in_brackets(key) for key in table.keys)
    order = _in_brackets([column.column_name for column in stage.order])
    return (
        f"{model.__name__} declares the key ({declared}) and order is {order}, "
        f"but rows of {name} are identified by {keys}",
        _as_written(stage, table),
    )


def key_in_model(model: type[Model], table: Table) -> str:
    """Return an instruction for declaring the key of the table in the model."""
    meta: Any = model._meta
    if is_built(model):
        return f"declare the primary key {_in_brackets(table.keys[0])} in {model.__name__}"
    key = [_field_name(model, column) for column in table.keys[0]]
    if len(key) == 1:
        written = f"write {key[0]} = ...Field(primary_key=True) in {model.__name__}"
    else:
        names = ", ".join(map(repr, key))
        written = f"write primary_key = CompositeKey({names}) in class Meta of {model.__name__}"
    missing = [column for column in table.keys[0] if column not in meta.columns]
    return f"{written}, with a field for {' and '.join(missing)}" if missing else written


def _as_written(stage: TableStage, table: Table) -> str:
    model, key = stage.model, table.keys[0]
    if is_built(model):
        return key_in_model(model, table)  # `Sweep.on` appends the key to the order
    declared = declared_key_columns(model)
    before = [column.column_name for column in stage.order if column.column_name not in (*key, *declared)]
    columns = [*before, *(column for column in (*declared, *key) if column in table.columns)]
    order = [f"{model.__name__}.{_field_name(model, column)}" for column in dict.fromkeys(columns)]
    written = f"write order=({', '.join(order)}{',' if len(order) == 1 else ''})"
    return f"{written} and {key_in_model(model, table).removeprefix('write ')}"


def _in_brackets(columns: Sequence[str]) -> str:
    return f"({', '.join(columns)})"


def _field_name(model: type[Model], column: str) -> str:
    meta: Any = model._meta
    return str(meta.columns[column].name) if column in meta.columns else column
