"""Dashboard as a Flask application: its pages and its error pages."""

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
from housekeeping.web.alert_help import ALERTS
from housekeeping.web.dead_letters import add_dead_letters
from housekeeping.web.plan import add_plans
from housekeeping.web.rendering import configure_templates
from housekeeping.web.security import protect
from housekeeping.web.snapshot import SnapshotCache


def create_app(settings: Settings, sweeps: dict[str, Sweep], token: str, *, open_to_read: bool) -> Flask:
    """Return the application. The database must be configured; nothing is connected yet.

    Parameters:
      token: Allows changes, and reading unless `open_to_read`.
      open_to_read: Whether pages can be read without the token.
    """
    app = Flask("housekeeping.web")
    protect(app, token, open_to_read=open_to_read)
    configure_templates(app)
    snapshots = SnapshotCache(settings, sweeps)
    _add_pages(app, snapshots)
    add_plans(app, snapshots)
    add_dead_letters(app, snapshots)
    add_actions(app, snapshots)
    _add_errors(app, snapshots)
    return app


def _add_pages(app: Flask, snapshots: SnapshotCache) -> None:
    @app.get("/")
    def front() -> str:
        return render_template("front.html", snapshot=snapshots.current(), live=True)

    @app.get("/workers/<name>")
    def worker(name: str) -> str:
        sweep: Sweep = snapshots.sweeps.get(name) or abort(404, "no worker has this name")
        current = snapshots.current()
        with translate_postgres_errors():
            rows, changes = snapshot.last_rows(name), snapshot.last_changes(name)
        return render_template(
            "worker.html",
            sweep=sweep,
            snapshot=current,
            worker_status=current.statuses.get(name),
            rows=rows,
            changes=changes,
            live=True,
        )

    @app.get("/runs/<int:run_id>")
    def run(run_id: int) -> str:
        with translate_postgres_errors():
            row = snapshot.run_row(run_id)
            if row is None:
                abort(404, "no run has this id, or it is older than 30 days")
            attempts = snapshot.attempts_of(row)
        meaning = REASONS.get(row.reason or "", "").replace("NAME", row.worker)
        return render_template("run.html", run=row, attempts=attempts, meaning=meaning, live=row.outcome is None)

    @app.get("/alerts")
    def alerts() -> str:
        return render_template("alerts.html", alerts=ALERTS)

    @app.get("/favicon.ico")
    def favicon() -> Response:
        return redirect(url_for("static", filename="icon.svg"), 301)


def _add_errors(app: Flask, snapshots: SnapshotCache) -> None:
    def page(text: str | None, status: int) -> tuple[str, int]:
        name = (request.view_args or {}).get("name")
        known = name if name in snapshots.sweeps else None
        # A page whose server is unavailable reloads itself until the server is back.
        live = status == 503 and request.method == "GET"
        return render_template("error.html", text=text, worker_name=known, live=live), status

    @app.errorhandler(HTTPException)
    def show_http_error(error: HTTPException) -> tuple[str, int]:
        return page(error.description, error.code or 500)

    @app.errorhandler(HousekeepingError)
    @app.errorhandler(PeeweeException)
    def show_failure(error: Exception) -> tuple[str, int]:
        wrong_input = isinstance(error, Refused) and not isinstance(error, SettingsError)
        return page(error_line(error), 400 if wrong_input else 503)
