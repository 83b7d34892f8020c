"""Fixtures of the tests of cascades."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest

from tests.integration.cascades import shop
from tests.integration.cascades.shop import Application
from tests.integration.several_databases import two as two
from tests.internals.database import Database


@pytest.fixture
def accounts(postgres: Database) -> None:
    """Three closed accounts and an open one, each with two orders of two items and a comment."""
    shop.create()
    shop.fill()


@pytest.fixture
def archive(accounts: None) -> Iterator[str]:
    """Name of a schema for the archives."""
    name = f"{shop.value('SELECT current_schema()')}_old"
    yield name
    shop.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.fixture
def application(application_url: str, postgres: Database) -> Iterator[Application]:
    """Session of the application. Its statements never wait for a lock."""
    connection = psycopg2.connect(application_url)
    connection.autocommit = True
    yield Application(connection)
    connection.close()
