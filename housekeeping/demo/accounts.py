"""Custom sweep of the demo, imported by its processes: deletes closed accounts with all their dependents.

`erase` requests the erasure of a customer whose account is open, and the worker process executes it.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path
from typing import Final

from peewee import BigAutoField

from housekeeping.core.logs import counted
from housekeeping.database.connection import BaseModel, database
from housekeeping.database.queries import UtcDateTimeField
from housekeeping.erasures import erase as request_erasure
from housekeeping.ledger.schema import Erasure
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.rows import Rows
from housekeeping.sweeps.subjects import Keep, Subject
from housekeeping.sweeps.values import Guard, Kept

ACCOUNTS: Final = 600
CLOSED: Final = 200
PURCHASES: Final = 10  # of each account
ITEMS: Final = 10  # of each purchase
WITH_INVOICE: Final = 5  # closed accounts that their invoice keeps
ERASED: Final = ACCOUNTS  # id of the erased customer, who has an invoice

_SEED: Final = """
CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz, email text);
CREATE TABLE purchase (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account ON DELETE CASCADE);
CREATE TABLE purchase_item (id bigint PRIMARY KEY, purchase_id bigint NOT NULL REFERENCES purchase ON DELETE CASCADE);
CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint REFERENCES account, name text);
INSERT INTO account
SELECT n, CASE WHEN n <= %(closed)s THEN now() - interval '91 days' - n * interval '1 hour' END, n || '@example.com'
FROM generate_series(1, %(accounts)s) AS n;
INSERT INTO purchase SELECT n, 1 + (n - 1) / %(purchases)s FROM generate_series(1, %(accounts)s * %(purchases)s) AS n;
INSERT INTO purchase_item SELECT n, 1 + (n - 1) / %(items)s
FROM generate_series(1, %(accounts)s * %(purchases)s * %(items)s) AS n;
INSERT INTO invoice SELECT n, n, 'Customer ' || n FROM generate_series(1, %(kept)s) AS n;
INSERT INTO invoice VALUES (%(erased)s, %(erased)s, 'Customer');
CREATE INDEX ON account (closed_at, id);
CREATE INDEX ON purchase (account_id);
CREATE INDEX ON purchase_item (purchase_id);
CREATE INDEX ON invoice (account_id);
ANALYZE account, purchase, purchase_item, invoice
"""
_COUNT: Final = """
SELECT (SELECT count(*) FROM account WHERE closed_at < now() - interval '90 days'),
       (SELECT count(*) FROM account WHERE closed_at IS NULL),
       (SELECT count(*) FROM purchase),
       (SELECT count(*) FROM purchase_item)
"""


class Account(BaseModel):
    """Account of a customer."""

    id = BigAutoField()
    closed_at = UtcDateTimeField(null=True)


closed_accounts: Final = Sweep(
    "demo.closed_accounts",
    Rows(
        Account,
        stale=lambda row, limit: row.closed_at < limit,
        age=timedelta(days=90),
        order="closed_at",
        action=Delete(dependents={"invoice": "keep"}),
    ),
    schedule="* * * * *",
    guard=Guard(first_run=False),  # the demo runs unattended
)

customer: Final = Subject(
    "customer",
    Account,
    tables={
        "purchase": Delete(),
        "purchase_item": Delete(),
        "invoice": Keep("tax law", anonymise={"account_id": None, "name": "erased"}),
    },
)

SWEEPS: Final = (closed_accounts,)
SUBJECTS: Final = (customer,)
KEPT: Final = (Kept("invoice", "tax law"),)


def seed(folder: Path) -> str:
    """Create and fill the tables in under a second; return a summary line."""
    numbers = {"accounts": ACCOUNTS, "closed": CLOSED, "purchases": PURCHASES, "items": ITEMS, "kept": WITH_INVOICE}
    numbers["erased"] = ERASED
    database.execute_sql(_SEED, numbers)
    purchases = ACCOUNTS * PURCHASES
    return (
        f"{counted(ACCOUNTS, 'account')} with {purchases:,} purchases of {purchases * ITEMS:,} items: {CLOSED} were "
        f"closed over 90 days ago, {WITH_INVOICE} of these stay for their invoices"
    )


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of the scene: this module, and a secret for erasures."""
    return {"SWEEPS": __name__, "ERASURE_KEY": secrets.token_urlsafe(32)}


def count() -> dict[str, int]:
    """Return the number of rows of each kind."""
    names = (f"closed accounts ({WITH_INVOICE} with an invoice)", "other accounts", "purchases", "items of purchases")
    return dict(zip(names, database.execute_sql(_COUNT).fetchone(), strict=True))


def erase() -> int:
    """Request the erasure of the customer; return the id of the erasure."""
    return request_erasure(customer.name, ERASED, reason="demo")


def erased(number: int) -> Erasure | None:
    """Return the erasure with this id; None while it has not ended."""
    return Erasure.get_or_none((Erasure.id == number) & Erasure.ended_at.is_null(False))
