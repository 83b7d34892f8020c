"""Background tasks: ``dramatiq invoices.actors``."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta

import dramatiq
import psycopg2

import housekeeping
from invoices.broker import client, tenant


def note(what: str) -> None:
    """Record what was done and for which tenant, in place of a printer."""
    client.rpush("invoices:done", f"{tenant.get()}: {what}")


@dramatiq.actor(idempotent=True, deduplicate="until_executing")
def render(invoice: int) -> None:
    """Print the invoice. Ten requests before it starts print it once."""
    note(f"rendered {invoice}")


@dramatiq.actor(exclusive_lease={"key": "books", "ttl": timedelta(minutes=10)}, schedule="0 3 1 * *")
def close_month() -> None:
    """Close the books at 3:00 on the first of each month, never twice at a time."""
    note("closed the month")


@dramatiq.actor(idempotent=True, deduplicate=None)
def charge(invoice: int, cents: int) -> None:
    """Charge the invoice. Two messages with the same ``idempotency_key`` charge it once."""
    with closing(psycopg2.connect(os.environ["INVOICES_DATABASE_URL"])) as own, own, own.cursor() as cursor:
        housekeeping.complete_in(own)  # first: a message that is already done ends here
        cursor.execute("INSERT INTO charges (invoice, cents) VALUES (%s, %s)", (invoice, cents))
