"""Fixtures of the tests of archives."""

from __future__ import annotations

import pytest

from tests.integration.archives import tickets
from tests.internals.database import Database


@pytest.fixture
def archive(postgres: Database) -> None:
    """Five stale tickets, two others, and an empty archive."""
    tickets.create()
    tickets.fill()
    tickets.create_archives(tickets.sweep())
