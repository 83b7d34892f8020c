"""What an engine of SQLAlchemy is connected to, as a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from sqlalchemy import Engine


def database_url(engine: Engine, **connect_args: Any) -> str:
    """The URL of an engine on psycopg or psycopg2; `connect_args` are those given to `create_engine`, if any.

    Note: `engine.url` as text will not do: it writes a space in ``options`` as +, which libpq reads as a plus sign.
    """
    _, parameters = engine.dialect.create_connect_args(engine.url)
    # What else a dialect hands to its driver, such as adapters, is none of the server's business.
    given = {name: value for name, value in {**parameters, **connect_args}.items() if isinstance(value, str | int)}
    # libpq takes every parameter behind the question mark, with its signs escaped and %20 for a space.
    return f"postgresql://?{urlencode(given, quote_via=quote)}"
