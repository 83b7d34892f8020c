"""peewee models of tables that are described elsewhere: Django models, SQLAlchemy tables and mapped classes.

Start at `model_of`. Each library has a module that reads its metadata into a `TableDescription`; `columns.build_model`
makes a model of it. Neither library is imported unless the application passes an object of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Hashable
from functools import cache
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import DeclarationError
from housekeeping.core.sanitize import described
from housekeeping.sweeps.table_models.columns import build_model

#: A module that is imported wherever an object of its library is, and the module here that reads such objects.
_READERS: Final = {"django.db.models": "django_models", "sqlalchemy": "sqlalchemy_tables"}


def model_of(table: object) -> type[Any]:
    """Return the peewee model of a table that the application has declared elsewhere; one model for each.

    ::

        Order = model_of(shop.models.Order)
        machine = StateMachine(Order.status, Status, {"expire": ([Status.OPEN], Status.EXPIRED)})

    Parameters:
      table: A Django model, a SQLAlchemy `Table`, a class mapped by SQLAlchemy, or a model derived from
        `housekeeping.BaseModel`, which is returned as it is.

    Raises:
      DeclarationError: When it is something else, or its rows cannot be swept through one table with a primary key.
    """
    if isinstance(table, type) and issubclass(table, Model):
        return table
    model = _built(table) if isinstance(table, Hashable) else None
    if model is None:
        raise DeclarationError(
            f"{described(table)} is no table; it should be a Django model, a SQLAlchemy Table or mapped class, or a "
            "model derived from housekeeping.BaseModel"
        )
    return model


@cache
def _built(table: object) -> type[Model] | None:
    for library, reader in _READERS.items():
        if library in sys.modules:
            described = importlib.import_module(f"{__name__}.{reader}").describe(table)
            if described is not None:
                return build_model(described)
    return None
