"""Dashboard as a Flask application: its pages and its error pages."""

from __future__ import annotations

import socket
from typing import Any, Final

from flask import Flask, redirect, render_template, request, url_for
from peewee import PeeweeException
from waitress.server import create_server
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from housekeeping.core.errors import HousekeepingError, Refused, SettingsError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.sweeps.declaration import Sweep
from housekeeping.web.alert_groups import add_acknowledging
from housekeeping.web.alert_help import ALERTS
from housekeeping.web.broker import LazyBroker
from housekeeping.web.logins import Logins
from housekeeping.web.pages.action_log import add_action_log
from housekeeping.web.pages.actions import add_actions
from housekeeping.web.pages.charts import add_charts
from housekeeping.web.pages.dead_letter_changes import add_dead_letter_changes
from housekeeping.web.pages.dead_letters import add_dead_letters
from housekeeping.web.pages.login_pages import add_login_pages, ask_to_log_in
from housekeeping.web.pages.plans import add_plans
from housekeeping.web.pages.processes import add_processes
from housekeeping.web.pages.runs import add_runs
from housekeeping.web.pages.worker_page import worker_page
from housekeeping.web.pages.worker_table import SORTS, Choices, WorkerTable
from housekeeping.web.rendering import configure_templates
from housekeeping.web.responses import shrink_responses
from housekeeping.web.security import Access, protect
from housekeeping.web.snapshot import SnapshotCache

#: A request waits for a server for seconds at most. The others must not wait for it.
_THREADS: Final = 8
#: Limits for unauthenticated requests. The longest form has a few hundred bytes. Lease keys and dead letter ids are in
#: the URL.
_LIMITS: Final[dict[str, Any]] = {
    "max_request_body_size": 64 * 1024,  # bytes
    "max_request_header_size": 32 * 1024,  # bytes
    "channel_timeout": 30,  # seconds without data
    "cleanup_interval": 10,  # seconds between checks for idle channels
    "connection_limit": 200,
}


def create_app(settings: Settings, sweeps: dict[str, Sweep], token: str, *, open_to_read: bool) -> Flask:
    """Return the application. The database must be configured; nothing is connected yet.

    Parameters:
      token: Allows changes, and reading unless `open_to_read`. ``web_read_token`` of the settings allows only reading.
      open_to_read: Whether pages can be read without the token.
    """
    app = Flask("housekeeping.web")
    access, logins = Access(token, settings.web_read_token), Logins()
    protect(app, settings, access, logins, open_to_read=open_to_read, ask=ask_to_log_in)
    add_login_pages(app, access, logins)
    shrink_responses(app)
    configure_templates(app)
    snapshots = app.extensions["snapshots"] = SnapshotCache(settings, sweeps)
    _add_pages(app, snapshots)
    add_runs(app, snapshots)
    add_processes(app, snapshots)
    add_charts(app, snapshots)
    broker = LazyBroker(settings, sweeps)
    add_plans(app, snapshots, broker)
    add_dead_letters(app, snapshots, broker)
    add_dead_letter_changes(app, snapshots, broker)
    add_actions(app, snapshots)
    add_action_log(app)
    add_acknowledging(app, snapshots)
    _add_errors(app, snapshots)
    return app


def _add_pages(app: Flask, snapshots: SnapshotCache) -> None:
    @app.get("/")
    def front() -> str:
        snapshot = snapshots.current()
        table = WorkerTable.of(snapshot.statuses.values(), Choices.of(request.args))
        return render_template("front.html", snapshot=snapshot, table=table, sorts=SORTS, live=True)

    @app.get("/workers/<name>")
    def worker(name: str) -> str:
        return worker_page(snapshots, name)

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


def server(app: Flask, listener: socket.socket) -> Any:
    """Return a server on a listening socket; ``run()`` serves, and ``close()`` from another thread stops it.

    Its responses contain no version numbers.
    """
    return create_server(
        app, sockets=[listener], threads=_THREADS, ident="housekeeping", clear_untrusted_proxy_headers=True, **_LIMITS
    )
