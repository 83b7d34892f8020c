"""Database options of Django and SQLAlchemy, passed to the library (docs/howto/existing-application-*.md)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from django.conf import settings as django_settings
from django.db.utils import ConnectionHandler
from psycopg2.extensions import parse_dsn
from sqlalchemy import create_engine
from sqlalchemy.engine import URL

from housekeeping import Settings
from tests.acceptance.examples import EXAMPLES

#: Every character with a meaning in a URL, a connection string or a shell.
PASSWORD: Final = "p@s/s:w#o%r+d &?='\"\\ü"
CASES: Final[dict[str, dict[str, str]]] = {
    "a plain one": {"dbname": "shop", "user": "app", "password": "secret", "host": "db", "port": "5433"},
    "signs in the password": {"dbname": "shop", "user": "app@team", "password": PASSWORD, "host": "db"},
    "a socket": {"dbname": "shop", "user": "app", "host": "/var/run/postgresql"},
    "options": {"dbname": "shop", "host": "db", "options": "-c search_path=app,public -c lock_timeout=3s"},
    "tls": {"dbname": "shop", "host": "db", "sslmode": "verify-full", "sslrootcert": "/etc/ssl/our ca.pem"},
    "two hosts": {"dbname": "shop", "host": "db1,db2", "port": "5432,5433", "target_session_attrs": "read-write"},
}


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    if not django_settings.configured:
        django_settings.configure()
    yield


def understood(url: str) -> dict[str, str]:
    """Return libpq's connection options for the library's connection string of the URL."""
    parameters: dict[str, str] = parse_dsn(Settings.load(database_url=url).require_database_url())
    return parameters


def of_django(given: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return an entry of Django's ``DATABASES``."""
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    known = {names[parameter]: value for parameter, value in given.items() if parameter in names}
    options = {parameter: value for parameter, value in given.items() if parameter not in names}
    return {"ENGINE": "django.db.backends.postgresql", **known, "OPTIONS": {**options, **more}}


#: Sets Django's ``DATABASES``.
Declare = Callable[[dict[str, Any]], None]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Django's own `override_settings` warns of this setting."""
    return lambda databases: monkeypatch.setattr(django_settings, "DATABASES", databases)


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_djangos_database_options_reach_the_server(given: dict[str, str], declare: Declare) -> None:
    recipe = importlib.import_module("housekeeping.contrib.django")
    declare({"default": of_django(given)})

    url = recipe.database_url()

    djangos = ConnectionHandler({"default": of_django(given)})["default"].get_connection_params()
    assert understood(url) == given
    assert {parameter: str(djangos[parameter]) for parameter in given} == given


def test_django_only_options_are_dropped_and_its_role_is_kept(declare: Declare) -> None:
    recipe = importlib.import_module("housekeeping.contrib.django")
    own = {"assume_role": "writer", "isolation_level": 2, "pool": True, "connect_timeout": 3}
    given = of_django({"dbname": "shop", "options": "-c jit=off"}, **own)
    declare({"other": given})

    url = recipe.database_url("other")

    assert understood(url) == {"dbname": "shop", "options": "-c jit=off -c role=writer", "connect_timeout": "3"}


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_sqlalchemy_engine_options_reach_the_server(driver: str, given: dict[str, str]) -> None:
    recipe = importlib.import_module("on_sqlalchemy.database")
    names = {"user": "username", "dbname": "database", "password": "password"}
    known: dict[str, Any] = {names[parameter]: value for parameter, value in given.items() if parameter in names}
    query = {parameter: value for parameter, value in given.items() if parameter not in names}

    engine = create_engine(URL.create(f"postgresql+{driver}", **known, query=query))

    assert understood(recipe.database_url(engine)) == given


def test_sqlalchemy_driver_options_reach_the_server() -> None:
    recipe = importlib.import_module("on_sqlalchemy.database")
    driver_options = {"connect_timeout": 3, "options": "-c search_path=app"}

    url = recipe.database_url(
        create_engine("postgresql+psycopg2://app@db/shop", connect_args=driver_options), **driver_options
    )

    assert understood(url) == {
        **{"user": "app", "host": "db", "dbname": "shop"},
        **{"connect_timeout": "3", "options": "-c search_path=app"},
    }
