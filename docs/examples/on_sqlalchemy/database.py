"""Database URL of an SQLAlchemy engine."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from sqlalchemy import Engine


def database_url(engine: Engine, **connect_args: Any) -> str:
    """Return the URL of a psycopg or psycopg2 engine. `connect_args` are those of `create_engine`.

    Note: The text of `engine.url` does not work. It writes a space in ``options`` as +, which libpq reads as a plus.
    """
    _, parameters = engine.dialect.create_connect_args(engine.url)
    # A dialect also passes objects to its driver, such as adapters. They are not part of a URL.
    given = {name: value for name, value in {**parameters, **connect_args}.items() if isinstance(value, str | int)}
    # libpq reads parameters after the question mark. It needs %20 for a space.
    return f"postgresql://?{urlencode(given, quote_via=quote)}"
