"""The sweep of a purge: what the engine runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from peewee import Model

from housekeeping.core.errors import DeclarationError, WrongArgument
from housekeeping.database.primary_key import key_of
from housekeeping.purge.holds import any_of, holds_on
from housekeeping.purge.request import PurgeRequest
from housekeeping.purge.target import model_of_table
from housekeeping.sweeps.checks.conditions import as_condition, check_expression
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.limits.declared import Breaker
from housekeeping.sweeps.stages.actions import Delete
from housekeeping.sweeps.table_models.naming import keyset_order


@dataclass(frozen=True, kw_only=True)
class PurgeSweep(Sweep):
    """Sweep that no module declares. Its name has a colon, so it cannot be that of a declared one.

    Attributes:
      held_by: The declared sweeps whose holds it applies.
    """

    held_by: tuple[str, ...] = ()

    _name_form: ClassVar[re.Pattern[str]] = re.compile(r"purge:[^\x00-\x1f]{1,200}")


def sweep_of(request: PurgeRequest, declared: Iterable[Sweep] = ()) -> PurgeSweep:
    """Return the sweep of a purge; reads the table from the catalog of the current database.

    Parameters:
      declared: Sweeps whose holds on the table the purge applies, unless it ignores them.

    Raises:
      WrongArgument: The table, the WHERE, a column of the order or the archive's name is wrong.
      peewee.PeeweeException: The catalog cannot be read.
    """
    check_expression(request.where)
    model = model_of_table(request.table)
    stale: Any = as_condition(request.where)
    holds = {} if request.ignore_holds else holds_on(model, request.database, declared)
    return PurgeSweep(
        name=request.worker,
        stale=lambda now: stale,
        always_stale=True,
        hold=any_of(holds),
        held_by=tuple(holds),
        order=_order(request, model),
        action=_delete(request),
        batch_size=request.batch_size,
        max_runtime=request.max_runtime,
        # A fresh purge has another WHERE than the last one; a resumed run is given its cursor.
        ignore_cursor=True,
        breaker=Breaker(times_history=None),
        confirm_first_run=False,
        database=request.database,
        max_rows_per_s=request.max_rows_per_s,
    )


def _order(request: PurgeRequest, model: type[Model]) -> tuple[Any, ...]:
    try:
        order = keyset_order("--order-by", model, request.order_by)
    except DeclarationError as error:
        raise WrongArgument(str(error)) from None
    # Columns after the whole key make no difference.
    key = key_of(model)
    last = max(place for place, column in enumerate(order) if any(column is each for each in key))
    return order[: last + 1]


def _delete(request: PurgeRequest) -> Delete:
    try:
        return Delete(archive_to=request.archive_to)
    except DeclarationError as error:
        raise WrongArgument(f"--archive-to: {error}") from None
