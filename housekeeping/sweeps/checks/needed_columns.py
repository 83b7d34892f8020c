"""Columns that the statements of a stage use, and the types that fit them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from peewee import Field

from housekeeping.sweeps.checks.touched_tables import recorded
from housekeeping.sweeps.stages.call import CallStage
from housekeeping.sweeps.stages.stage import Stage

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


def used_fields(stage: Stage, now: datetime) -> set[Field]:
    """Return the fields that the statements of a stage use."""
    fields = recorded(stage, now).fields
    if isinstance(stage, CallStage):
        fields.update(stage.model._meta.sorted_fields)  # its function gets whole rows
    return fields


def updated_columns(rights: Iterable[str]) -> set[str]:
    """Return the columns in rights such as ``UPDATE (status, updated_at)``."""
    return {column for right in rights for named in re.findall(r"\((.*)\)", right) for column in named.split(", ")}
