"""Pages of the dead letters: the list, the details, and the form that requeues one."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any, Final

from flask import Flask, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.brokers.dead_letters import DeadLetter, DeadLetterStore, dead_letters_of, found, requeue
from housekeeping.brokers.dead_letters.formatting import arguments, body, bounded
from housekeeping.core.sanitize import in_one_line
from housekeeping.installation import broker_without_database
from housekeeping.presentation.formatting import describe_requeue
from housekeeping.web.snapshot import SnapshotCache

_SHOWN: Final = 50  # letters
_ARGUMENTS_WIDTH: Final = 100  # characters
_ERROR_WIDTH: Final = 200
_ID_WIDTH: Final = 60


def add_dead_letters(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages."""
    lock, made = threading.Lock(), list[DeadLetterStore]()

    def letters_of_broker() -> DeadLetterStore:
        # The ready-made application's broker knows the actor options that requeueing applies. It is made on first use.
        with lock:
            if not made:
                made.append(dead_letters_of(broker_without_database(snapshots.settings, snapshots.sweeps)))
            return made[0]

    @app.get("/dead-letters")
    def dead_letters() -> str:
        store = letters_of_broker()
        newest, total = store.newest(_SHOWN), sum(store.counts().values())
        letters = [(letter, _row(letter)) for letter in newest]
        return render_template("dead_letters.html", letters=letters, total=total, now=datetime.now(UTC))

    @app.get("/dead-letters/one")
    def dead_letter() -> str:
        [letter] = found(letters_of_broker(), [request.args.get("id", "")])
        return render_template("dead_letter.html", letter=letter, details=_details(letter), error=bounded(letter.error))

    @app.post("/dead-letters/requeue")
    def requeue_letter() -> Response:
        [result] = requeue(letters_of_broker(), [request.args.get("id", "")])
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
