"""Check that each sweep identifies the rows of its tables by a unique key."""

from __future__ import annotations

from collections.abc import Iterator

from housekeeping.core.settings import Settings
from housekeeping.database.catalog import table_if_visible
from housekeeping.database.primary_key import declared_key_columns, vouches_for_key
from housekeeping.sweeps.checks.unique_keys import key_in_model, wrong_key
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.error_mapping import is_unavailable
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.sweeps.limits.db_health import table_name
from housekeeping.sweeps.stages.table_stage import TableStage


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding for each stage whose key is wrong, cannot be verified, or is not the declared one."""
    for sweep in sweeps.values():
        try:
            stages = sweep.stages_for_run()
        except Exception as error:  # another check reports missing rights and failing predicates
            if is_unavailable(error):
                raise
            continue
        for stage in stages:
            if isinstance(stage, TableStage):
                yield from _of_stage(sweep, stage)


def _of_stage(sweep: Sweep, stage: TableStage) -> Iterator[Finding]:
    model, table = stage.model, table_if_visible(stage.model)
    name = table_name(model)
    subject, declared = f"key of {name}", ", ".join(declared_key_columns(model))
    if not table.exists:
        return
    if vouches_for_key(model):
        return
    if not table.enforced:
        text = f"{name} is a view, a foreign table or has inheriting tables: ({declared}) may not be unique"
        yield Finding(
            "warning",
            sweep.name,
            subject,
            text,
            "make sure that it is, then declare it: key_is_unique = True in class Meta",
        )
    elif (mismatch := wrong_key(stage)) is not None:
        yield Finding("error", sweep.name, subject, *mismatch)
    elif not table.is_unique(declared_key_columns(model)) and sweep.stages is None:
        used = ", ".join(column.column_name for column in stage.key)
        text = f"{model.__name__} declares the key ({declared}), which is not unique; runs use ({used})"
        yield Finding("warning", sweep.name, subject, text, key_in_model(model, table))
