"""Pages about dead letters: the newest, one of them whole, and the form that sends it once more."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any, Final

from flask import Flask, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.brokers.dead_letters import DeadLetter, DeadLetterStore, dead_letters_of, found, requeue
from housekeeping.brokers.dead_letters.formatting import arguments, body, bounded
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.settings import Settings
from housekeeping.installation import broker_beside
from housekeeping.presentation.descriptions import describe_requeue
from housekeeping.web.snapshot import SnapshotCache

_SHOWN: Final = 50  # letters
_ARGUMENTS_WIDTH: Final = 100  # characters
_ERROR_WIDTH: Final = 200
_ID_WIDTH: Final = 60


class Letters:
    """The dead letters of the ready-made application; its broker is made when somebody first looks."""

    def __init__(self, observatory: SnapshotCache) -> None:
        self._observatory = observatory
        self._lock = threading.Lock()
        self._store: DeadLetterStore | None = None

    def store(self) -> DeadLetterStore:
        """With the workers' options, which a requeued message has to meet.

        Raises:
          SettingsError: When a setting it needs is missing.
        """
        with self._lock:
            if self._store is None:
                settings: Settings = self._observatory.settings
                self._store = dead_letters_of(broker_beside(settings, self._observatory.sweeps))
            return self._store


def add_dead_letters(app: Flask, observatory: SnapshotCache) -> None:
    """Add the pages to the application."""
    letters = Letters(observatory)

    @app.get("/dead-letters")
    def dead_letters() -> str:
        store = letters.store()
        newest, total = store.newest(_SHOWN), sum(store.counts().values())
        shown = [(letter, _line(letter)) for letter in newest]
        return render_template("dead_letters.html", letters=shown, total=total, now=datetime.now(UTC))

    @app.get("/dead-letters/one")
    def dead_letter() -> str:
        [letter] = found(letters.store(), [request.args.get("id", "")])
        return render_template("dead_letter.html", letter=letter, whole=_whole(letter), error=bounded(letter.error))

    @app.post("/dead-letters/requeue")
    def requeue_letter() -> Response:
        [result] = requeue(letters.store(), [request.args.get("id", "")])
        observatory.forget()
        flash(f"{in_one_line(result.id, _ID_WIDTH)}: {describe_requeue(result)}")
        return redirect(url_for("dead_letters"), 303)


def _line(letter: DeadLetter) -> dict[str, str]:
    return {
        "actor": in_one_line(letter.message.actor_name, _ARGUMENTS_WIDTH) if letter.message else "(unreadable)",
        "arguments": in_one_line(arguments(letter), _ARGUMENTS_WIDTH),
        "error": in_one_line(bounded(letter.error) or "-", _ERROR_WIDTH),
    }


def _whole(letter: DeadLetter) -> dict[str, Any]:
    whole = body(letter)
    if letter.message is not None:
        whole["traceback"] = whole["traceback"] or "the broker has none"
    return whole
