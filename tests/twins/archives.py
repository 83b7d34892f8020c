"""Faults of archives and restores (promises A1 and A2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from peewee import SQL

from housekeeping.sweeps import restore
from housekeeping.sweeps.stages import actions
from housekeeping.sweeps.stages.archive import declared_columns, moved
from housekeeping.sweeps.stages.restore import Restore
from tests.twins import Twin
from tests.twins.planting import instead

_ARCHIVE: Final = "tests/integration/archives/test_archive.py::"
_RESTORE: Final = "tests/integration/archives/test_restore.py::"


def _ignores_rows_that_the_archive_refuses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(actions, "moved", lambda *given: (moved(*given)[0], SQL("true")))


def leaves_restored_rows_in_the_archive(patch: pytest.MonkeyPatch) -> None:
    write = Restore.write

    def broken(self: Restore, *given: Any) -> actions.Write:
        found = write(self, *given)
        removed: Any = found.ctes[0]
        removed._query = removed._query.where(SQL("false"))
        return replace(found, holds=SQL("true"))  # type: ignore[arg-type]

    patch.setattr(Restore, "write", broken)


def _restores_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    with_lease = restore._sweep
    patch.setattr(restore, "_sweep", lambda sweep, tables: with_lease(replace(sweep, lease=None), tables))


TWINS: Final = (
    Twin(
        "A1",
        "archives_only_the_columns_of_the_model",
        f"{_ARCHIVE}test_rows_move_to_the_archive_with_all_columns",
        instead(actions, "columns_of_table", declared_columns),
    ),
    Twin(
        "A1",
        "ignores_rows_that_the_archive_refuses",
        f"{_ARCHIVE}test_trigger_that_keeps_rows_out_of_the_archive_stops_the_run",
        _ignores_rows_that_the_archive_refuses,
    ),
    Twin(
        "A2",
        "leaves_restored_rows_in_the_archive",
        f"{_RESTORE}test_run_is_restored_exactly",
        leaves_restored_rows_in_the_archive,
    ),
    Twin(
        "A2",
        "restores_without_a_pause",
        f"{_RESTORE}test_sweep_without_a_lease_is_paused_meanwhile",
        instead(restore.Restoration, "_pause", lambda *_: None),
    ),
    Twin(
        "A2",
        "restores_without_the_lease",
        f"{_RESTORE}test_lease_of_the_sweep_is_held_during_a_restore",
        _restores_without_the_lease,
    ),
)
