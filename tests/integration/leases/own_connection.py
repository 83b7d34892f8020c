"""Connection of an application of its own, also through a pooler, which rejects the options of the tests' URL."""

from __future__ import annotations

import psycopg2
from psycopg2.extensions import connection as Connection

from housekeeping import Settings


def own_connection(settings: Settings) -> Connection:
    """Connect without a search path."""
    return psycopg2.connect(settings.require_database_url().partition("options=")[0].rstrip("?&"))
