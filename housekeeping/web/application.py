"""The dashboard as a WSGI application: pages that show, and a few forms that change something."""

from __future__ import annotations

from flask import Flask, abort, redirect, render_template, request, url_for
from peewee import PeeweeException
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from housekeeping.core.errors import HousekeepingError, Refused, SettingsError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.explain_outcome import REASONS
from housekeeping.web import snapshot
from housekeeping.web.actions import add_actions
from housekeeping.web.alert_help import ALARMS
from housekeeping.web.dead_letters import add_dead_letters
from housekeeping.web.plan import add_plans
from housekeeping.web.rendering import configure_templates
from housekeeping.web.security import protect
from housekeeping.web.snapshot import SnapshotCache


def create_app(settings: Settings, sweeps: dict[str, Sweep], token: str, *, open_to_read: bool) -> Flask:
    """The application; the database must be set up, nothing is connected yet.

    Parameters:
      token: What allows to change something, and to look where `open_to_read` is not set.
    """
    app = Flask("housekeeping.web")
    protect(app, token, open_to_read=open_to_read)
    configure_templates(app)
    observatory = SnapshotCache(settings, sweeps)
    _add_pages(app, observatory)
    add_plans(app, observatory)
    add_dead_letters(app, observatory)
    add_actions(app, observatory)
    _add_errors(app, observatory)
    return app


def _add_pages(app: Flask, observatory: SnapshotCache) -> None:
    @app.get("/")
    def front() -> str:
        return render_template("front.html", facts=observatory.look(), live=True)

    @app.get("/workers/<name>")
    def worker(name: str) -> str:
        sweep: Sweep = observatory.sweeps.get(name) or abort(404, "there is no such worker")
        seen = observatory.look()
        with translate_postgres_errors():
            rows, changes = snapshot.last_rows(name), snapshot.last_changes(name)
        return render_template(
            "worker.html",
            sweep=sweep,
            facts=seen,
            worker_status=seen.overviews.get(name),
            rows=rows,
            changes=changes,
            live=True,
        )

    @app.get("/runs/<int:run_id>")
    def run(run_id: int) -> str:
        with translate_postgres_errors():
            row = snapshot.run_row(run_id)
            if row is None:
                abort(404, "there is no such run, or it is older than 30 days")
            beside = snapshot.attempts_beside(row)
        meaning = REASONS.get(row.reason or "", "").replace("NAME", row.worker)
        return render_template("run.html", run=row, beside=beside, meaning=meaning, live=row.outcome is None)

    @app.get("/alarms")
    def alarms() -> str:
        return render_template("alarms.html", alarms=ALARMS)

    @app.get("/favicon.ico")
    def favicon() -> Response:
        return redirect(url_for("static", filename="icon.svg"), 301)


def _add_errors(app: Flask, observatory: SnapshotCache) -> None:
    def said(text: str | None, status: int) -> tuple[str, int]:
        about = (request.view_args or {}).get("name")
        known = about if about in observatory.sweeps else None
        # What is away comes back, and then the page is there by itself.
        live = status == 503 and request.method == "GET"
        return render_template("error.html", text=text, worker_name=known, live=live), status

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> tuple[str, int]:
        return said(error.description, error.code or 500)

    @app.errorhandler(HousekeepingError)
    @app.errorhandler(PeeweeException)
    def failed(error: Exception) -> tuple[str, int]:
        own_fault = isinstance(error, Refused) and not isinstance(error, SettingsError)
        return said(error_line(error), 400 if own_fault else 503)
