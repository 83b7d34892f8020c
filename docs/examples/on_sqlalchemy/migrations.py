"""Functions for Alembic's ``env.py``: what its autogenerate leaves alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

#: The library's schema.
SCHEMA = os.environ.get("HOUSEKEEPING_SCHEMA", "housekeeping")


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Leave out the library's own tables, which ``housekeeping init`` creates and upgrades."""
    return not (type_ == "schema" and name == SCHEMA)


def include_object(object: Any, name: str | None, type_: str, reflected: bool, compare_to: object) -> bool:
    """Leave out archives, which ``housekeeping init --with-archives`` creates, unless they have a model."""
    return not (type_ == "table" and reflected and compare_to is None and "archived_by_run" in object.columns)
