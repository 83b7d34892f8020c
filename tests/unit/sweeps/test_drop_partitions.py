"""Declarations of sweeps that drop partitions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from peewee import TextField

from housekeeping import BaseModel, DropPartitions, Sweep, UtcDateTimeField
from housekeeping.core.errors import DeclarationError
from housekeeping.core.events import event
from housekeeping.sweeps.partitions.marks import Mark, mark_of

YEAR = timedelta(days=365)


class View(BaseModel):
    viewed_at = UtcDateTimeField(primary_key=True)
    page = TextField()


def _sweep(**given: Any) -> Sweep:
    return Sweep(
        **{"name": "shop.views", "order": (View.viewed_at,), "action": DropPartitions(older_than=YEAR), **given}
    )


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
    kept = _sweep(action=DropPartitions(older_than=YEAR, keep_table=True))

    assert kept.counts[:2] == ("detached_partitions", "skipped_partitions")
    assert kept.progress_counts == ("detached_partitions",)


def test_predicate_of_dropped_partitions_need_not_depend_on_the_time() -> None:
    _sweep(stale=lambda now: View.page == "start")


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: DropPartitions(older_than=365), r"older_than is 365; write timedelta\(days=365\)"),  # type: ignore[arg-type]
        (lambda: DropPartitions(older_than=-YEAR), "partitions that are still in use would be dropped"),
        (lambda: DropPartitions(older_than=YEAR, lock_timeout=timedelta()), "lock_timeout must be longer"),
        (lambda: DropPartitions(older_than=YEAR, lock_timeout=timedelta(minutes=1)), "at most 30 seconds"),
        (lambda: DropPartitions(older_than=YEAR, lock_retries=-1), "must not be negative"),
        (lambda: _sweep(order=()), "missing: order="),
        (lambda: _sweep(event=event("shop.view_dropped")), "reads no rows, so it has no event"),
        (lambda: _sweep(stale=lambda now: True), "stale returns True"),
        (lambda: _sweep(shards=2), "shards must be 1"),
    ],
)
def test_wrong_declaration_is_rejected(declare: Callable[[], object], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        declare()


def test_sweep_on_a_table_of_another_library_needs_no_predicate() -> None:
    declared = Sweep.on(View, name="shop.views", order="viewed_at", action=DropPartitions(older_than=YEAR))

    assert declared.order[0] is View.viewed_at


@pytest.mark.parametrize("comment", [None, "of the shop", "two\nlines"])
def test_mark_keeps_the_comment_of_the_table(comment: str | None) -> None:
    mark = Mark("shop.views", 'public."a b"', "FOR VALUES FROM ('2025-01-01') TO (MAXVALUE)", comment)

    assert mark_of(str(mark)) == mark


@pytest.mark.parametrize("comment", [None, "", "of the shop", "housekeeping drops this table: soon"])
def test_comment_without_mark_is_no_mark(comment: str | None) -> None:
    assert mark_of(comment) is None
