"""Recipe for Flask-Session."""

from __future__ import annotations

from typing import Any, Unpack

from housekeeping.recipes.tables import BATCH_SIZE, table
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.options import SweepOptions
from housekeeping.sweeps.stages.actions import Delete


def flask_session(
    *, name: str = "recipes.flask_session", table_name: str = "sessions", **options: Unpack[SweepOptions]
) -> Sweep:
    """Return a sweep that deletes expired sessions of Flask-Session's SQLAlchemy backend.

    Parameters:
      table_name: As in ``SESSION_SQLALCHEMY_TABLE``.
    """
    session = table(table_name, "id", id="integer", expiry="timestamp")
    given: Any = {"batch_size": BATCH_SIZE, "schedule": "17 * * * *", **options}
    return Sweep(
        name=name,
        stale=lambda now: session.expiry <= now,
        order=(session.id,),  # expiry has no index
        action=Delete(),
        **given,
    )
