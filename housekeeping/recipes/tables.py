"""Tables of other packages, as models with the columns that a recipe needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.table_models.columns import Column, TableDescription, build_model

#: Rows per batch of a recipe. They are small, and no other session locks them for long.
BATCH_SIZE: Final = 1000


def table(name: str, key: str, **columns: str) -> Any:
    """Return a model of a table of another package.

    Parameters:
      name: The table, with its schema if it is not in the connection's search path.
      key: The column of the primary key.
      columns: Column -> its type in PostgreSQL.

    Raises:
      DeclarationError: The name has more than two parts.
    """
    *schema, bare = name.split(".")
    if len(schema) > 1 or not all((*schema, bare)):
        raise DeclarationError(f"{name!r} is no name of a table; write sessions, or shop.sessions")
    described: Sequence[Column] = [Column(each, each, kind, each != key) for each, kind in columns.items()]
    return build_model(TableDescription(bare, schema[0] if schema else None, bare, described, (key,)))
