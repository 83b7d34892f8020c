from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.internals.database import Database
from tests.internals.ledger import Override, Switch, override_of, overrides, resume, switch

LATER = datetime.now(UTC) + timedelta(hours=2)


def test_override_is_stored_with_reason_end_and_author(postgres: Database) -> None:
    switch(Override("w", "narrow", "peak", LATER, None, "ann@host", 10, 5.0))

    there = override_of("w")

    assert there is not None and there.since is not None and there.since <= datetime.now(UTC)
    assert (there.state, there.reason, there.until, there.said_by) == ("narrow", "peak", LATER, "ann@host")
    assert (there.batch_size, there.max_runtime) == (10, timedelta(seconds=5))


def test_later_override_replaces_the_earlier_one(postgres: Database) -> None:
    switch(Override("w", "narrow", batch_size=10))
    switch(Override("w", "paused", "enough"))

    there = overrides()["w"]
    assert Switch.select().count() == 1
    assert (there.state, there.batch_size, there.reason) == ("paused", None, "enough")


def test_resume_without_an_override_returns_false(postgres: Database) -> None:
    switch(Override("w", "paused", until=datetime.now(UTC) - timedelta(seconds=1)))

    assert (resume("w"), resume("unknown"), overrides()) == (False, False, {})
