from __future__ import annotations

from datetime import UTC, datetime, timedelta

from housekeeping.database.connection import Database
from housekeeping.sweeps.ledger.models import Switch, SwitchChange
from housekeeping.sweeps.ledger.overrides import Override, override_of, overrides, resume, switch

LATER = datetime.now(UTC) + timedelta(hours=2)


def test_override_is_stored_with_reason_end_and_author(postgres: Database) -> None:
    switch(Override("w", "narrow", "peak", LATER, None, "ann@host", 10, timedelta(seconds=5)))

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


def test_every_override_and_its_end_are_recorded(postgres: Database) -> None:
    switch(Override("w", "paused", "first"))
    switch(Override("w", "narrow", "second", batch_size=3))
    resume("w", "bob@host")

    changes = SwitchChange.select(SwitchChange.state, SwitchChange.reason, SwitchChange.said_by).order_by(
        SwitchChange.id
    )
    assert list(changes.tuples()) == [("paused", "first", None), ("narrow", "second", None), ("on", None, "bob@host")]


def test_resume_without_an_override_returns_false(postgres: Database) -> None:
    switch(Override("w", "paused", until=datetime.now(UTC) - timedelta(seconds=1)))

    assert (resume("w"), resume("unknown"), overrides()) == (False, False, {})
    assert SwitchChange.select().where(SwitchChange.state == "on").count() == 0
