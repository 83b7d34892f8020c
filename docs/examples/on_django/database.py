"""Database URL from Django's settings."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from django.conf import settings

#: Options of Django itself. All others are libpq's (``sslmode``, ``options``, ``service``, ...).
DJANGOS_OWN = ("assume_role", "isolation_level", "pool", "server_side_binding")


def database_url(alias: str = "default") -> str:
    """Return the URL of ``DATABASES[alias]``, with the server, user and options of Django's connections."""
    database = settings.DATABASES[alias]
    options = dict(database.get("OPTIONS", {}))
    if options.get("assume_role"):
        options["options"] = f"{options.get('options', '')} -c role={options['assume_role']}".strip()
    parameters = {
        "dbname": database.get("NAME"),
        "user": database.get("USER"),
        "password": database.get("PASSWORD"),
        "host": database.get("HOST"),  # may be a folder of sockets
        "port": database.get("PORT"),
        **{name: value for name, value in options.items() if name not in DJANGOS_OWN},
    }
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    # libpq reads parameters after the question mark. It needs %20 for a space, not +.
    return f"postgresql://?{urlencode(given, quote_via=quote)}"
