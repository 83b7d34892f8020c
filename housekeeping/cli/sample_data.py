"""Sample rows for a trial of the built-in workers, made as those of the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.demo import batched_git_ref_updates, bulk_imports, ci_stuck_builds, user_status_cleanup
from housekeeping.sweeps.registry import Family
from housekeeping.workers import families

#: Family -> function that adds about 300 rows to each of its larger tables, a third of them or more stale.
_FILLED_BY: Final[dict[str, Callable[[], None]]] = {
    "user_status_cleanup": partial(user_status_cleanup.fill, 200, 75, 25, every="1 minute"),
    "bulk_imports": partial(bulk_imports.fill, 100, 20, 3, ["members"]),
    "batched_git_ref_updates": partial(
        batched_git_ref_updates.fill, 10, [f"refs/heads/fix-{number:03}" for number in range(30)]
    ),
    "ci_stuck_builds": partial(ci_stuck_builds.fill, 25, 50, 150),
}


def add_sample_rows(settings: Settings, found: Iterable[Family] | None = None) -> dict[str, int]:
    """Add rows to the empty tables of the built-in families in one transaction, and return their number by table.

    Parameters:
      found: Families whose tables are in the current database; by default all.

    Git refs are left out if the settings have no folder with repositories.

    Raises:
      WrongArgument: One of the tables has rows; nothing is changed.
    """
    active = {family.name: family for family in (families(settings) if found is None else found)}
    filling = {name: fill for name, fill in _FILLED_BY.items() if name in active}
    if settings.repositories_root is None:
        filling.pop("batched_git_ref_updates", None)
    models = [model for name, family in active.items() if name in filling for model in family.models.values()]
    with database.atomic():
        for model in models:
            if model.select().limit(1).exists():
                raise WrongArgument(
                    f"table {_name(model)} already has rows; sample data is only for empty tables, and none was added"
                )
        for fill in filling.values():
            fill()
    return {_name(model): model.select().count() for model in models}


def _name(model: type[Model]) -> str:
    meta: Any = model._meta
    return str(meta.table_name)
