"""Sweeps whose stages are of another kind, as an application may declare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from housekeeping import Sweep
from tests.internals.sweeps import Batch, BatchResult, TableStage


def with_stages(sweep: Sweep, kind: type[TableStage], **further: Any) -> Sweep:
    """Return the sweep with its table stages as stages of this kind."""

    names = [each.name for each in dataclasses.fields(TableStage) if each.init]

    def stages(of: Sweep) -> list[TableStage]:
        declared = dataclasses.replace(sweep, limits=of.limits).declared_stages()
        return [kind(**{name: getattr(stage, name) for name in names}, **further) for stage in declared]

    return dataclasses.replace(sweep, stages=stages)


@dataclass(frozen=True, kw_only=True)
class _InTransaction(TableStage):
    """Stage with its own `apply`, so that no batch is committed in one round trip."""

    then: Callable[[], object]

    def apply(self, batch: Batch, prepared: None = None) -> BatchResult:
        result = TableStage.apply(self, batch, prepared)
        self.then()
        return result


def in_transactions(sweep: Sweep, then: Callable[[], object] = lambda: None) -> Sweep:
    """Return the sweep with stages that call a function after they have changed the rows of a batch."""
    return with_stages(sweep, _InTransaction, then=then)
