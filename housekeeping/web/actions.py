"""The forms that change something: pause, narrow and resume a worker, release a lease."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Final

from flask import Flask, abort, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.errors import WrongArgument
from housekeeping.core.redis_client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.presentation.descriptions import describe_override
from housekeeping.presentation.time_parsing import parse_future_time
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import overrides
from housekeeping.sweeps.ledger.lease_admin import HeldLease, release_lease
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.web.snapshot import SnapshotCache

_LONGEST_REASON: Final = 200  # characters
_LARGEST_BATCH: Final = 10_000  # as on the command line
_SAID_BY: Final = "dashboard"


def add_actions(app: Flask, observatory: SnapshotCache) -> None:
    """Add the forms' addresses to the application."""
    _add_switches(app, observatory)

    @app.get("/leases/release")
    def lease_to_release() -> str:
        held = _lease(observatory, request.args.get("key", ""))
        return render_template("lease.html", lease=held, seen=_seen(held))

    @app.post("/leases/release")
    def release() -> Response:
        key = request.args.get("key", "")
        held = _lease(observatory, key)
        # A program names the key alone; a person has looked at a holder, and means that one.
        meant = request.form.get("seen")
        if meant is not None and meant != _seen(held):
            abort(409, "another holder has begun since you looked; nothing was released")
        settings = observatory.settings
        client = redis_client(settings.require_redis_url())
        release_lease(client, settings.namespace, key, expected=None if meant is None else held.token)
        observatory.forget()
        flash(f"The lease {in_one_line(key, 100)} was released.")
        return redirect(url_for("front"), 303)


def _add_switches(app: Flask, observatory: SnapshotCache) -> None:
    def known(name: str) -> Sweep:
        sweep: Sweep = observatory.sweeps.get(name) or abort(404, "there is no such worker")
        return sweep

    def done(name: str, said: str) -> Response:
        observatory.forget()
        flash(said)
        return redirect(url_for("worker", name=name), 303)

    def put(said: Override) -> Response:
        with translate_postgres_errors():
            overrides.switch(said)
        return done(said.worker, f"{describe_override(said)}.")

    @app.post("/workers/<name>/pause")
    def pause(name: str) -> Response:
        known(name)
        return put(Override(name, "paused", _reason(), _until(), said_by=_SAID_BY))

    @app.post("/workers/<name>/narrow")
    def narrow(name: str) -> Response:
        known(name)
        batch_size, longest_s = _number("batch_size", _LARGEST_BATCH), _number("max_runtime_s", 86_400)
        if batch_size is None and longest_s is None:
            raise WrongArgument("say how narrow: records a batch, seconds a run, or both")
        longest = None if longest_s is None else timedelta(seconds=longest_s)
        return put(
            Override(name, "narrow", _reason(), _until(), said_by=_SAID_BY, batch_size=batch_size, max_runtime=longest)
        )

    @app.post("/workers/<name>/resume")
    def resume(name: str) -> Response:
        known(name)
        with translate_postgres_errors():
            ended = overrides.resume(name, _SAID_BY)
        return done(name, f"{name} {'runs again at its next tick' if ended else 'was neither paused nor narrowed'}.")


def _reason() -> str | None:
    # PostgreSQL has no text with a null character in it.
    return in_one_line(request.form.get("reason", "").strip(), _LONGEST_REASON) or None


def _until() -> datetime | None:
    until = request.form.get("until", "").strip()
    if not until:
        return None
    with translate_postgres_errors():
        return parse_future_time(until, database_now())


def _number(name: str, most: int) -> int | None:
    given = request.form.get(name, "").strip()
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= most):
        raise WrongArgument(f"{name} is {given[:20]!r}; it should be a number from 1 to {most:,}")
    return int(given)


def _lease(observatory: SnapshotCache, key: str) -> HeldLease:
    found = next((each for each in observatory.leases() if each.key == key), None)
    return found or abort(404, "nobody holds a lease of this key: it was given back, or has expired")


def _seen(lease: HeldLease) -> str:
    """One word for this holder, which is another one for the next."""
    return hashlib.sha256(lease.token.encode()).hexdigest()[:16]
