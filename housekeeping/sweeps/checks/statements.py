"""Tables and columns that the statements of a stage use, with the rights and the types that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from peewee import Context, Delete, Field, FieldAlias, Insert, Model, ModelAlias, PostgresqlDatabase, Query, Update

from housekeeping.sweeps.stages.call import CallStage
from housekeeping.sweeps.stages.stage import Conditional, Explainable, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

ZONED: Final = {"timestamp with time zone"}
UNZONED: Final = {"timestamp without time zone"}
TEXTS: Final = {"text", "character varying", "character", "citext"}
_INTEGERS: Final = {"smallint", "integer", "bigint", "numeric"}
#: peewee's name of a field's type -> fitting column types; other fields are not checked.
FITTING: Final[Mapping[str, set[str]]] = {
    **dict.fromkeys(("AUTO", "BIGAUTO", "INT", "BIGINT", "SMALLINT"), _INTEGERS),
    **dict.fromkeys(("TEXT", "VARCHAR", "CHAR"), TEXTS),
    "BOOL": {"boolean"},
    "DATETIME": ZONED | UNZONED | {"date"},
    "TIMESTAMPTZ": ZONED,
    "TIMESTAMP": UNZONED,
}
KNOWN_TYPES: Final = set().union(*FITTING.values())


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
                columns = ", ".join(getattr(each, "column_name", str(each)) for each in changes._update)
                right = f"UPDATE ({columns})"
            else:
                right = "INSERT" if isinstance(query, Insert) else "DELETE"
            self.changes.setdefault(query.model, {})[right] = None
        if getattr(query, "_for_update", None):
            for model in query._from_list:
                if isinstance(model, type) and issubclass(model, Model):
                    self.changes.setdefault(model, {})["FOR UPDATE"] = None

    def rights(self) -> dict[type[Model], tuple[str, ...]]:
        """Return table -> the rights that the statements need on it, ``FOR UPDATE`` where they lock its rows."""
        return {model: ("SELECT", *self.changes.get(model, ())) for model in self.models}


def recorded(stage: Stage, now: datetime) -> Recorder:
    """Return the fields, tables and changes of a stage's statements, without executing them.

    Raw SQL within them and the function of a `Call` are not included.
    """
    recorder = Recorder()
    queries = [each.query for each in stage.explain_queries(now)] if isinstance(stage, Explainable) else []
    if isinstance(stage, TableStage):
        queries += stage.statements_of_a_run(now)
    if isinstance(stage, Conditional):
        queries += stage.conditions(now)
    for query in queries:
        recorder.sql(query)
    return recorder


def used_fields(stage: Stage, now: datetime) -> set[Field]:
    """Return the fields that the statements of a stage use."""
    fields = recorded(stage, now).fields
    if isinstance(stage, CallStage):
        fields.update(stage.model._meta.sorted_fields)  # its function gets whole rows
    return fields


def updated_columns(rights: Iterable[str]) -> set[str]:
    """Return the columns in rights such as ``UPDATE (status, updated_at)``."""
    return {column for right in rights for named in re.findall(r"\((.*)\)", right) for column in named.split(", ")}
