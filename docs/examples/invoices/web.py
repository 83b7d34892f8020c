"""Web application, which only sends messages."""

from __future__ import annotations

import flask

from invoices.actors import charge, close_month, render
from invoices.broker import tenant

application = flask.Flask(__name__)


@application.before_request
def remember_the_tenant() -> None:
    tenant.set(flask.request.headers.get("Tenant", "nobody"))


@application.post("/invoices/<int:invoice>/render")
def ask_for_rendering(invoice: int) -> tuple[dict[str, object], int]:
    message = render.send(invoice)
    return {"waiting": "duplicate_of" not in message.options}, 202


@application.post("/invoices/<int:invoice>/charge")
def ask_for_money(invoice: int) -> tuple[dict[str, object], int]:
    cents = int(flask.request.form["cents"])
    charge.send_with_options(args=(invoice, cents), idempotency_key=f"invoice-{invoice}")
    return {}, 202


@application.post("/books/close")
def ask_for_the_books() -> tuple[dict[str, object], int]:
    close_month.send()
    return {}, 202
