"""What Django's settings say of a database, as a URL."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from django.conf import settings

#: Options that Django keeps to itself; all others are libpq's (``sslmode``, ``options``, ``service``, ...).
DJANGOS_OWN = ("assume_role", "isolation_level", "pool", "server_side_binding")


def database_url(alias: str = "default") -> str:
    """The URL of ``DATABASES[alias]``: the same server, user and options as Django's own connections."""
    database = settings.DATABASES[alias]
    options = dict(database.get("OPTIONS", {}))
    if options.get("assume_role"):
        options["options"] = f"{options.get('options', '')} -c role={options['assume_role']}".strip()
    parameters = {
        "dbname": database.get("NAME"),
        "user": database.get("USER"),
        "password": database.get("PASSWORD"),
        "host": database.get("HOST"),  # a folder of sockets, too
        "port": database.get("PORT"),
        **{name: value for name, value in options.items() if name not in DJANGOS_OWN},
    }
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    # libpq takes every parameter behind the question mark, with its signs escaped and %20 for a space, not +.
    return f"postgresql://?{urlencode(given, quote_via=quote)}"
