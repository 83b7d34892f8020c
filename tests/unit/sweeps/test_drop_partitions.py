"""Declarations of sweeps that drop partitions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from peewee import TextField

from housekeeping import BaseModel, DropPartitions, Sweep, UtcDateTimeField
from tests.internals.core import DeclarationError, event

YEAR = timedelta(days=365)


class View(BaseModel):
    viewed_at = UtcDateTimeField(primary_key=True)
    page = TextField()


def _sweep(**given: Any) -> Sweep:
    return Sweep("shop.views", DropPartitions(View, "viewed_at", **{"older_than": YEAR, **given}))


def test_sweep_that_drops_partitions_needs_no_predicate() -> None:
    assert _sweep().counts == (
        "dropped_partitions",
        "freed_bytes",
        "skipped_partitions",
        "batches",
        "out_of_time",
    )
    assert _sweep().progress_counts == ("dropped_partitions",)
    assert _sweep().model is View


def test_sweep_that_keeps_tables_counts_detached_partitions() -> None:
    kept = _sweep(keep_table=True)

    assert kept.counts[:2] == ("detached_partitions", "skipped_partitions")
    assert kept.progress_counts == ("detached_partitions",)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"older_than": 365}, r"older_than is 365; write timedelta\(days=365\)"),
        ({"older_than": -YEAR}, "partitions that are still in use would be dropped"),
        ({"older_than": None}, "write how old a partition must be, either older_than=.* or older_than_months=12"),
        ({"older_than_months": 12}, "either older_than=.* or older_than_months=12"),
        ({"older_than": None, "older_than_months": 0}, "older_than_months is 0; write a number above 0"),
        ({"key": "epoch"}, "key is 'epoch'; write 'time', 'uuid7', 'epoch_s', 'epoch_ms' or 'text'"),
        ({"lock_timeout": timedelta()}, "lock_timeout is .*; write a time above 0 seconds"),
        ({"lock_timeout": timedelta(minutes=1)}, "lock_timeout is .*; write a time at most 30 seconds"),
        ({"lock_retries": -1}, "lock_retries is -1; write a number at least 0"),
        ({"event": event("shop.view_dropped")}, "there is no field 'event'"),
        ({"stale": lambda row: True}, "stale returns True"),
        ({"hold": lambda row: row.pages}, "hold reads row.pages, but View has no column 'pages'"),
    ],
)
def test_wrong_declaration_is_rejected(given: dict[str, Any], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        _sweep(**given)


def test_column_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="View has no column 'seen_at'"):
        Sweep("shop.views", DropPartitions(View, "seen_at", older_than=YEAR))
