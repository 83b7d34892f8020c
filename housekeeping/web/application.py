"""The dashboard as a WSGI application: pages that show, and three forms that change something."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from flask import Flask, abort, redirect, render_template, request
from peewee import PeeweeException
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from housekeeping.cli.moments import coming_moment
from housekeeping.cli.tables import counts, length, moment
from housekeeping.foundation.db import one_line, reaching_postgres
from housekeeping.foundation.errors import HousekeepingError, WrongArgument
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps import switches
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.switches import Switched
from housekeeping.web import charts, facts
from housekeeping.web.facts import Observatory
from housekeeping.web.security import protect

_LONGEST_REASON = 200  # characters


def create_app(settings: Settings, sweeps: dict[str, Sweep], token: str, *, open_to_read: bool) -> Flask:
    """The application; the database must be set up, nothing is connected yet.

    Parameters:
      token: What allows to change something, and to look where `open_to_read` is not set.
    """
    app = Flask("housekeeping.web")
    protect(app, token, open_to_read=open_to_read)
    observatory = Observatory(settings, sweeps)
    app.jinja_env.filters |= {"length": length, "moment": moment, "counts": counts, "ago": _ago}
    app.jinja_env.globals |= {"runs_chart": charts.runs_chart, "backlog_chart": charts.backlog_chart}

    @app.get("/")
    def front() -> str:
        return render_template("front.html", facts=observatory.look())

    @app.get("/workers/<name>")
    def worker(name: str) -> str:
        sweep = sweeps.get(name) or abort(404, "there is no such worker")
        seen = observatory.look()
        with reaching_postgres():
            rows, changes = facts.last_rows(name), facts.last_changes(name)
        return render_template(
            "worker.html", sweep=sweep, facts=seen, overview=seen.overviews.get(name), rows=rows, changes=changes
        )

    @app.get("/runs/<int:run_id>")
    def run(run_id: int) -> str:
        with reaching_postgres():
            row = facts.run_row(run_id) or abort(404, "there is no such run, or it is older than 30 days")
        return render_template("run.html", run=row, facts=None)

    @app.post("/workers/<name>/<change>")
    def change(name: str, change: str) -> Response:
        if name not in sweeps or change not in ("pause", "resume"):
            abort(404, "there is no such worker, or nothing of this kind to do")
        with reaching_postgres():
            if change == "resume":
                switches.resume(name, "dashboard")
            else:
                switches.switch(_pause(name))
        observatory.forget()
        return redirect(f"/workers/{name}", 303)

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> tuple[str, int]:
        return render_template("error.html", text=error.description, facts=None), error.code or 500

    @app.errorhandler(HousekeepingError)
    @app.errorhandler(PeeweeException)
    def failed(error: Exception) -> tuple[str, int]:
        status = 400 if isinstance(error, WrongArgument) else 503
        return render_template("error.html", text=one_line(error), facts=None), status

    return app


def _pause(name: str) -> Switched:
    until = request.form.get("until", "").strip()
    reason = request.form.get("reason", "").strip()[:_LONGEST_REASON]
    ends = coming_moment(until, datetime.now(UTC)) if until else None
    return Switched(name, "paused", reason or None, ends, said_by="dashboard")


def _ago(value: Any, now: datetime | None = None) -> str:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return "-"
    passed = (now or datetime.now(UTC)) - value
    return f"{length(passed.total_seconds())} ago" if passed >= timedelta() else f"in {length(-passed.total_seconds())}"
