"""Django models as descriptions of their tables. Imported only where Django is imported already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.apps import apps
from django.core.exceptions import AppRegistryNotReady
from django.db import connections, models, router

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.tables import OrmRule, TableColumn, TableDescription

#: Django leaves a name as it is that has quotes at both ends: so ``audit"."log`` becomes a name with a schema.
_QUOTED: Final = re.compile(r'"(?:(?P<schema>[^"]+)"\.")?(?P<name>[^"]+)"')


def describe(table: object) -> TableDescription | None:
    """Return the description of a Django model's table; None if it is no Django model.

    A proxy model stands for the model it is a proxy of.

    Raises:
      DeclarationError: When the model has no table of its own, several of them, or is not loaded yet.
    """
    if not (isinstance(table, type) and issubclass(table, models.Model)):
        return None
    given: Any = table
    meta = given._meta
    if meta.abstract or meta.swapped:
        what = f"is swapped for {meta.swapped}" if meta.swapped else "is abstract"
        raise DeclarationError(f"{meta.label} {what}, so it has no table; name a model that has one")
    try:
        meta.apps.check_models_ready()
    except AppRegistryNotReady:
        raise DeclarationError(
            f"Django's models are not loaded yet; call django.setup() before a sweep on {meta.label} is declared"
        ) from None
    return _described(meta.concrete_model)


def _described(model: Any) -> TableDescription:
    meta = model._meta
    if len(meta.local_concrete_fields) < len(meta.concrete_fields):
        tables = sorted({field.model._meta.db_table for field in meta.concrete_fields})
        raise DeclarationError(
            f"{meta.label} inherits from another model, so its rows are in several tables ({', '.join(tables)}); "
            "a sweep goes through one table: declare it on the parent, with an action that changes both"
        )
    connection = connections[router.db_for_write(model)]
    columns = [
        TableColumn(field.attname, field.column, field.db_type(connection) or "", field.null)
        for field in meta.local_concrete_fields
    ]
    # Before Django 5.2 no key has several columns.
    key = [field.column for field in getattr(meta, "pk_fields", [meta.pk])]
    schema, name = _split(meta.db_table)
    return TableDescription(meta.object_name, schema, name, columns, key)


#: Name of the function -> the decision. DO_NOTHING leaves it to the constraint.
_DECISIONS: Final = {
    "CASCADE": "delete",
    "SET_NULL": "clear",
    "SET_DEFAULT": "clear",
    "set_on_delete": "clear",  # of SET()
    "PROTECT": "keep",
    "RESTRICT": "keep",
}


def rules(declared: Iterable[object]) -> Iterator[OrmRule]:
    """Yield the `on_delete` of each foreign key of all models."""
    for model in [model for of_app in apps.all_models.values() for model in of_app.values()]:
        for field in model._meta.local_concrete_fields:
            relation: Any = field.remote_field
            function = getattr(getattr(relation, "on_delete", None), "__name__", "")
            if function in _DECISIONS:
                _, table = _split(model._meta.db_table)
                said = function.replace("set_on_delete", "SET")
                text = f"Django's {model.__name__}.{field.name} has on_delete={said}"
                yield OrmRule(table, (field.column,), _DECISIONS[function], text)


def _split(db_table: str) -> tuple[str | None, str]:
    quoted = db_table if db_table.startswith('"') and db_table.endswith('"') else f'"{db_table}"'
    parts = _QUOTED.fullmatch(quoted)
    return (None, db_table) if parts is None else (parts["schema"], parts["name"])
