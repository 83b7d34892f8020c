"""Sweep of an application whose accounts have dependents (``HOUSEKEEPING_SWEEPS``).

It is not beside the others, because a purge asks the tables of all declared sweeps for holds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from housekeeping import Delete, Guard, Lease, Limits, Reference, Rows, Sweep

closed_accounts: Final = Sweep(
    "shop.closed_accounts",
    Rows(
        "account",
        stale=lambda row, now: row.closed_at < now,
        order="closed_at",
        action=Delete(
            dependents={"item": "delete", "invoice": "keep"},
            references=[Reference("item.order_id", "purchase.id")],
        ),
    ),
    lease=Lease("shop.closed_accounts", timedelta(minutes=10)),
    limits=Limits(batch_takes=None),
    guard=Guard(first_run=False),
)
