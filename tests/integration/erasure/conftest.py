"""Fixtures of the tests of erasures."""

from __future__ import annotations

import pytest
import redis

from tests.integration.erasure import shop
from tests.integration.several_databases import two as two
from tests.internals.database import Database
from tests.internals.erasures import work


@pytest.fixture
def customers(postgres: Database, housekeeping_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A customer to be erased and another one. Passes follow each other at once."""
    monkeypatch.setattr(work, "FIRST_WAIT_S", 0.0)
    shop.create()
