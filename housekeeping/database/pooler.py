"""Connections through a pooler in transaction mode, such as PgBouncer: each transaction may run on another server.

A setting of the session would be lost, or reach another client. So the settings travel with each transaction.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal
from uuid import uuid4

from psycopg2 import sql
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from psycopg2.extensions import cursor as Cursor

from housekeeping.core.errors import SettingsError

#: Value of ``HOUSEKEEPING_PREPARED_STATEMENTS``. ``auto`` tests each connection, ``on`` means that all are direct,
#: ``off`` that all lead through a pooler.
PreparedStatements = Literal["auto", "on", "off"]

#: What PgBouncer and RDS Proxy answer to the startup parameter ``options``.
_REJECTED: Final = re.compile("unsupported startup parameter|support command-line options", re.IGNORECASE)
#: A word of ``options``. A backslash escapes the next character.
_WORD: Final = re.compile(r"(?:\\.|[^\s\\])+")
#: Settings whose value is a list of identifiers.
_LISTS: Final = ("search_path", "temp_tablespaces")
_ITEM: Final = re.compile(r'"((?:[^"]|"")*)"|([^,\s]+)')
#: Default for later transactions -> the setting that applies to the current one and is sent instead.
_OF_TRANSACTION: Final = {
    "default_transaction_read_only": "transaction_read_only",
    "default_transaction_isolation": "transaction_isolation",
    "default_transaction_deferrable": "transaction_deferrable",
}
_NAME_LENGTH: Final = 50  # bytes; PostgreSQL cuts application names at 63


class PooledCursor(Cursor):
    """Cursor that sends the connection's settings together with the first statement of each transaction.

    They precede ``BEGIN`` in the same message. PostgreSQL makes one transaction of both.
    """

    def execute(self, query: Any, vars: Any = None) -> None:
        connection: Any = self.connection
        if connection.get_transaction_status() == TRANSACTION_STATUS_IDLE:
            query, vars = connection.transaction_settings + self.mogrify(query, vars), None
        super().execute(query, vars)


def use_pooler(connection: Any, options: str) -> None:
    """Send the settings in `options` with each transaction of the connection, and give the transactions a name.

    The name is the transaction's ``application_name``. `StatementInProgress` finds the server process by it, because
    the process id that libpq knows is not the server's.
    """
    name = (
        str(connection.info.dsn_parameters.get("application_name", "")).encode()[:_NAME_LENGTH].decode(errors="ignore")
    )
    connection.transaction_name = f"{name} {uuid4().hex[:12]}"
    settings = {"datestyle": "ISO"} | read_options(options) | {"application_name": connection.transaction_name}
    statements = [_set_local(name, value) for name, value in settings.items()]
    connection.transaction_settings = sql.SQL("").join(statements).as_string(connection).encode(connection.encoding)
    connection.cursor_factory = PooledCursor


def leads_to_pooler(connection: Any) -> bool:
    """Return whether a pooler is between the connection and the server; one round trip."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone()[0] != connection.info.backend_pid)


def rejects_options(error: Exception) -> bool:
    """Return whether the error of a connection attempt says that a pooler rejects the parameter ``options``."""
    return _REJECTED.search(str(error)) is not None


def read_options(options: str) -> dict[str, str]:
    """Return the settings in a value of libpq's parameter ``options``: name -> value.

    Raises:
      SettingsError: If it has another option than settings.
    """
    settings = {}
    words = (re.sub(r"\\(.)", r"\1", word) for word in _WORD.findall(options))
    for word in words:
        prefix, text = word[:2], word[2:]
        name, equals, value = (next(words, "") if word == "-c" else text).partition("=")
        if prefix not in ("-c", "--") or not equals:
            raise SettingsError(
                f"HOUSEKEEPING_DATABASE_URL has the option {word!r}, which cannot be sent through a connection pooler; "
                "it should be -c name=value"
            )
        settings[name.replace("-", "_").lower()] = value
    return settings


def _set_local(name: str, value: str) -> sql.Composable:
    values = [value]
    if name in _LISTS:
        items = _ITEM.findall(value)
        values = [quoted.replace('""', '"') or plain.lower() for quoted, plain in items] or [""]
    return sql.SQL("SET LOCAL {} = {}; ").format(
        sql.Identifier(*_OF_TRANSACTION.get(name, name).split(".")), sql.SQL(", ").join(map(sql.Literal, values))
    )
