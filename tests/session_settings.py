"""Settings of a test's own database session, also through a pooler, which keeps no sessions."""

from __future__ import annotations

from typing import Final

import pytest

from tests.internals.database import Database, DatabaseHandle

NEEDS_SESSION: Final = pytest.mark.direct_only(reason="run_in_process and the kit's assertions need a session")


def set_in_session(handle: Database | DatabaseHandle, *settings: str) -> None:
    """Set parameters (``name = value``), the role or the time zone of this thread's connection.

    Through a pooler they apply to each transaction of the connection, and no other client gets them.
    """
    if handle.prepared() is not None:
        for each in settings:
            handle.execute_sql(f"SET {each}")
        return
    # A default would apply to the next transaction only.
    local = [each.removeprefix("default_") for each in settings]
    handle.connection().transaction_settings += "".join(f"SET LOCAL {each}; " for each in (*settings, *local)).encode()
