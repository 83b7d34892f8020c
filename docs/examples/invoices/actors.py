"""What the application does in the background; ``dramatiq invoices.actors`` runs it."""

from __future__ import annotations

from datetime import timedelta

import dramatiq

from invoices.broker import client, tenant


def note(what: str) -> None:
    """Stands in for a printer, a bank and a tax office: says what was done, and for whom."""
    client.rpush("invoices:done", f"{tenant.get()}: {what}")


@dramatiq.actor(idempotent=True, deduplicate="until_executing")
def render(invoice: int) -> None:
    """Print the invoice anew; asked for ten times before it begins, it is printed once."""
    note(f"rendered {invoice}")


@dramatiq.actor(idempotent=True, deduplicate=None)
def charge(invoice: int, cents: int) -> None:
    """Take the money; two messages with one ``idempotency_key`` take it once."""
    note(f"charged {cents} for {invoice}")


@dramatiq.actor(exclusive_lease={"key": "books", "ttl": timedelta(minutes=10)}, schedule="0 3 1 * *")
def close_month() -> None:
    """Close the books, on the first of each month at three; never twice at a time, on whichever machine."""
    note("closed the month")
