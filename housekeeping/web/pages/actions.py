"""Forms that pause, narrow and resume a worker, or release a lease."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from flask import Flask, abort, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.errors import WrongArgument
from housekeeping.core.redis.client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.presentation.formatting import describe_override
from housekeeping.presentation.time_parsing import parse_future_time
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import overrides
from housekeeping.sweeps.ledger.action_log import ActionName, record_action
from housekeeping.sweeps.ledger.lease_admin import HeldLease, release_lease
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.web.pages.worker_page import SentForm, worker_page
from housekeeping.web.security import current_user
from housekeeping.web.snapshot import SnapshotCache

_LONGEST_REASON: Final = 200  # characters
_LARGEST_BATCH: Final = 10_000  # as on the command line


def add_actions(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the routes of the forms."""
    _add_overrides(app, snapshots)

    @app.get("/leases/release")
    def lease_to_release() -> str:
        lease = _held_lease(snapshots, request.args.get("key", ""))
        return render_template("lease.html", lease=lease, seen=_fingerprint(lease))

    @app.post("/leases/release")
    def release() -> Response:
        key = request.args.get("key", "")
        lease = _held_lease(snapshots, key)
        # The page sends the holder that it showed. Programs may name only the key.
        seen = request.form.get("seen")
        if seen is not None and seen != _fingerprint(lease):
            abort(409, "the lease has a new holder since the page was loaded; nothing was released")
        settings = snapshots.settings
        client = redis_client(settings.require_redis_url())
        with record_action("release_lease", key, current_user()) as outcome:
            release_lease(client, settings.namespace, key, expected=None if seen is None else lease.token)
            outcome.result = f"released, held by {lease.holder}"
        snapshots.invalidate()
        flash(f"The lease {in_one_line(key, 100)} was released.")
        return redirect(url_for("front"), 303)


def _add_overrides(app: Flask, snapshots: SnapshotCache) -> None:
    def done(name: str, message: str) -> Response:
        snapshots.invalidate()
        flash(message)
        return redirect(url_for("worker", name=name), 303)

    def set_override(form: SentForm, override: Override) -> Response | tuple[str, int]:
        if form.errors:
            return worker_page(snapshots, override.worker, form), 400
        action: ActionName = "pause" if override.state == "paused" else "narrow"
        with record_action(action, override.worker, current_user()) as outcome:
            with database.using(snapshots.sweep(override.worker).database), translate_postgres_errors():
                overrides.switch(override)
            outcome.result = describe_override(override)
        return done(override.worker, f"{outcome.result}.")

    @app.post("/workers/<name>/pause")
    def pause(name: str) -> Response | tuple[str, int]:
        form = SentForm("pause")
        until = form.read("until", _time_at(snapshots.sweep(name)))
        return set_override(form, Override(name, "paused", _reason(form), until, said_by=current_user()))

    @app.post("/workers/<name>/narrow")
    def narrow(name: str) -> Response | tuple[str, int]:
        form = SentForm("narrow")
        until = form.read("until", _time_at(snapshots.sweep(name)))
        batch_size = form.read("batch_size", _number_to(_LARGEST_BATCH))
        max_runtime_s = form.read("max_runtime_s", _number_to(86_400))
        if not (form.text("batch_size") or form.text("max_runtime_s")):
            form.errors["batch_size"] = "nothing to narrow; give records per batch, seconds per run, or both"
        max_runtime = None if max_runtime_s is None else timedelta(seconds=max_runtime_s)
        override = Override(name, "narrow", _reason(form), until, batch_size=batch_size, max_runtime=max_runtime)
        return set_override(form, replace(override, said_by=current_user()))

    @app.post("/workers/<name>/resume")
    def resume(name: str) -> Response:
        sweep = snapshots.sweep(name)
        with record_action("resume", name, current_user()) as outcome:
            with database.using(sweep.database), translate_postgres_errors():
                ended = overrides.resume(name, current_user())
            outcome.result = f"{name} {'resumes at its next tick' if ended else 'was neither paused nor narrowed'}"
        return done(name, f"{outcome.result}.")


def _reason(form: SentForm) -> str | None:
    # PostgreSQL text cannot contain NUL characters.
    return in_one_line(form.text("reason"), _LONGEST_REASON) or None


def _time_at(sweep: Sweep) -> Callable[[str], datetime]:
    """Return the parser of a future time, by the clock of the worker's database."""

    def parse(text: str) -> datetime:
        with database.using(sweep.database), translate_postgres_errors():
            return parse_future_time(text, database_now())

    return parse


def _number_to(maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= maximum):
            raise WrongArgument(f"{in_one_line(text, 20)!r} is not a number from 1 to {maximum:,}")
        return int(text)

    return parse


def _held_lease(snapshots: SnapshotCache, key: str) -> HeldLease:
    lease = next((each for each in snapshots.leases() if each.key == key), None)
    return lease or abort(404, "this lease is not held: it was released or has expired")


def _fingerprint(lease: HeldLease) -> str:
    """Return a hash that identifies the holder without revealing its token."""
    return hashlib.sha256(lease.token.encode()).hexdigest()[:16]
