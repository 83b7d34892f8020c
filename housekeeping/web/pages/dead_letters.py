"""Pages of the dead letters: the list with its filter, the details, and the form that requeues one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from flask import Flask, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.brokers.dead_letters import DeadLetter, found, requeue
from housekeeping.brokers.dead_letters.formatting import arguments, body, bounded
from housekeeping.brokers.dead_letters.search import Position, search
from housekeeping.core.sanitize import in_one_line
from housekeeping.presentation.formatting import describe_requeue
from housekeeping.sweeps.ledger.action_log import record_action
from housekeeping.web.broker import LazyBroker
from housekeeping.web.pages.dead_letter_filter import MAX_SEARCH, FilterForm
from housekeeping.web.security import current_user
from housekeeping.web.snapshot import SnapshotCache

_SHOWN: Final = 50  # letters
_ARGUMENTS_WIDTH: Final = 100  # characters
_ERROR_WIDTH: Final = 200
_ID_WIDTH: Final = 60


def add_dead_letters(app: Flask, snapshots: SnapshotCache, broker: LazyBroker) -> None:
    """Register the pages."""

    @app.get("/dead-letters")
    def dead_letters() -> str:
        store, form = broker.dead_letters(), FilterForm.of(request.args)
        counts, after = store.counts(), request.args.get("after")
        page = search(store, form.filter, _SHOWN, None if after is None else Position.parse(after), MAX_SEARCH)
        return render_template(
            "dead_letters.html",
            page=page,
            letters=[(letter, _row(letter)) for letter in page.letters],
            form=form,
            counts=counts,
            now=datetime.now(UTC),
        )

    @app.get("/dead-letters/one")
    def dead_letter() -> str:
        [letter] = found(broker.dead_letters(), [request.args.get("id", "")])
        return render_template("dead_letter.html", letter=letter, details=_details(letter), error=bounded(letter.error))

    @app.post("/dead-letters/requeue")
    def requeue_letter() -> Response:
        message_id = request.args.get("id", "")
        with record_action("requeue", message_id, current_user()) as outcome:
            [result] = requeue(broker.dead_letters(), [message_id])
            outcome.result = describe_requeue(result)
        snapshots.invalidate()
        flash(f"{in_one_line(result.id, _ID_WIDTH)}: {describe_requeue(result)}")
        return redirect(url_for("dead_letters"), 303)


def _row(letter: DeadLetter) -> dict[str, str]:
    return {
        "actor": in_one_line(letter.message.actor_name, _ARGUMENTS_WIDTH) if letter.message else "(unreadable)",
        "arguments": in_one_line(arguments(letter), _ARGUMENTS_WIDTH),
        "error": in_one_line(bounded(letter.error) or "-", _ERROR_WIDTH),
    }


def _details(letter: DeadLetter) -> dict[str, Any]:
    details = body(letter)
    if letter.message is not None:
        details["traceback"] = details["traceback"] or "the broker has none"
    return details
