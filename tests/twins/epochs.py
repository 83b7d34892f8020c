"""Faults of fencing (promise L3)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest

from housekeeping.database.connection import database
from housekeeping.leases import fencing, holder_epoch, lease
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.ledger import schema
from housekeeping.workers.old_runs import worker as own_worker
from tests.twins import Twin
from tests.twins.planting import in_text, instead

_FENCES: Final = "tests/integration/leases/test_fences.py::"
_EPOCHS: Final = "tests/integration/leases/test_fencing_tokens.py::"
_LOST: Final = "tests/integration/middleware/test_lost_leases.py::"


def _checks_the_epoch_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    def is_latest(fence: fencing.Fence, connection: Any = None) -> bool:
        query = f'SELECT 1 FROM "{fencing.Lease._meta.schema}".leases WHERE key = %s AND epoch = %s AND holder = %s'
        return database.execute_sql(query, fence).fetchone() is not None

    patch.setattr(holder_epoch, "is_latest", is_latest)


def _issues_the_first_epoch_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing, "_LOCK", "hashtextextended(%s || random()::text, 0)")


def _accepts_every_holder(patch: pytest.MonkeyPatch) -> None:
    for name, passes in (("check_epoch", None), ("is_latest", True), ("first_epoch", 1)):
        patch.setattr(holder_epoch, name, lambda *_, passes=passes: passes)


def _issues_the_same_epoch_to_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holder_epoch, "acquire_epoch", lambda key, token: 1)


def _restarts_epochs_with_each_row(patch: pytest.MonkeyPatch) -> None:
    def next_epoch(key: str, token: str) -> int:
        query = f"""
            INSERT INTO "{fencing.Lease._meta.schema}".leases (key, epoch, holder, used_at) VALUES (%s, 1, %s, now())
            ON CONFLICT (key) DO UPDATE SET epoch = leases.epoch + 1, holder = EXCLUDED.holder RETURNING epoch
        """
        epoch: int = database.execute_sql(query, (key, token)).fetchone()[0]
        return epoch

    patch.setattr(fencing, "next_epoch", next_epoch)


def _draws_the_epoch_before_the_lock(patch: pytest.MonkeyPatch) -> None:
    def next_epoch(key: str, token: str) -> int:
        query = f"""
            INSERT INTO "{fencing.Lease._meta.schema}".leases (key, holder, used_at) VALUES (%s, %s, now())
            ON CONFLICT (key) DO UPDATE SET epoch = EXCLUDED.epoch, holder = EXCLUDED.holder RETURNING epoch
        """
        epoch: int = database.execute_sql(query, (key, token)).fetchone()[0]
        return epoch

    patch.setattr(fencing, "next_epoch", next_epoch)


def _accepts_an_epoch_without_a_row(patch: pytest.MonkeyPatch) -> None:
    fetched = fencing._fetch_row
    patch.setattr(fencing, "_fetch_row", lambda *given: fetched(*given) or (False,))


def _keeps_the_lease_without_an_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExclusiveLease, "_release_or_warn", lambda self: None)


TWINS: Final[list[Twin]] = [
    Twin(
        "L3",
        "fence_accepts_every_holder",
        _FENCES + "test_suspended_holder_commits_nothing_after_a_new_run_began",
        _accepts_every_holder,
    ),
    Twin(
        "L3",
        "fence_accepts_every_actor",
        _LOST + "test_actor_that_slept_cannot_commit_once_another_began",
        _accepts_every_holder,
    ),
    Twin(
        "L3",
        "checks_the_epoch_without_a_lock",
        _FENCES + "test_next_epoch_waits_for_a_fenced_transaction_to_end",
        _checks_the_epoch_without_a_lock,
    ),
    Twin(
        "L3",
        "issues_the_first_epoch_without_a_lock",
        _FENCES + "test_next_holder_waits_for_a_transaction_with_the_first_fence",
        _issues_the_first_epoch_without_a_lock,
    ),
    Twin(
        "L3",
        "first_fence_ignores_redis",
        _FENCES + "test_first_fence_after_another_holder_began_raises",
        instead(ExclusiveLease, "renew", lambda self: True),
    ),
    Twin(
        "L3",
        "first_fence_trusts_redis_alone",
        _FENCES + "test_first_fence_after_another_one_raises_even_if_redis_agrees",
        in_text(fencing, "_UNLESS_ISSUED", "DO NOTHING", "DO UPDATE SET holder = EXCLUDED.holder"),
    ),
    Twin(
        "L3",
        "issues_the_same_epoch_to_all",
        _LOST + "test_each_run_of_an_actor_has_a_higher_epoch_and_may_commit",
        _issues_the_same_epoch_to_all,
    ),
    Twin(
        "L3",
        "accepts_an_epoch_after_the_lease_expired",
        _FENCES + "test_lease_that_expires_while_its_epoch_is_issued_is_lost",
        instead(lease, "safe_until", lambda since, ttl_s: float("inf")),
    ),
    Twin(
        "L3",
        "keeps_the_lease_without_an_epoch",
        _FENCES + "test_lease_is_released_if_its_epoch_cannot_be_issued",
        _keeps_the_lease_without_an_epoch,
    ),
    Twin(
        "L3",
        "restarts_epochs_with_each_row",
        _EPOCHS + "test_epoch_is_higher_than_before_its_row_was_deleted",
        _restarts_epochs_with_each_row,
    ),
    Twin(
        "L3",
        "draws_the_epoch_before_the_lock",
        _EPOCHS + "test_epoch_is_drawn_after_its_row_is_locked",
        _draws_the_epoch_before_the_lock,
        slow=True,
    ),
    Twin(
        "L3",
        "uses_only_the_sequence_for_epochs",
        _EPOCHS + "test_epoch_is_higher_than_one_issued_without_the_sequence",
        _draws_the_epoch_before_the_lock,
    ),
    Twin(
        "L3",
        "restarts_epochs_after_an_upgrade",
        _EPOCHS + "test_epochs_of_an_upgraded_database_go_on_above_all_there_were",
        instead(
            schema,
            "MIGRATIONS",
            (*schema.MIGRATIONS[:2], schema.MIGRATIONS[2].split("SELECT setval")[0], *schema.MIGRATIONS[3:]),
        ),
    ),
    Twin(
        "L3",
        "accepts_an_epoch_without_a_row",
        _EPOCHS + "test_holder_whose_epoch_row_was_deleted_cannot_commit",
        _accepts_an_epoch_without_a_row,
    ),
    Twin(
        "L3",
        "deletes_leases_in_use",
        "tests/integration/workers/old_runs/test_worker.py::test_unused_leases_are_deleted_after_30_days",
        instead(own_worker, "LEASES_KEPT_FOR", timedelta(days=29)),
    ),
]
