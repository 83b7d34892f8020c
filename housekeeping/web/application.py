"""Dashboard as a Flask application: its pages, its error pages, and how they are sent.

Each module of pages has a function ``add_...`` that registers its routes; `create_app` calls them. Every value in a
template is escaped; control characters are made visible. An unchanged page is not sent again, texts are compressed,
static files are cached.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from flask import Flask, abort, redirect, render_template, request, url_for
from flask import Response as FlaskResponse
from jinja2 import StrictUndefined
from markupsafe import Markup, escape
from peewee import PeeweeException
from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from housekeeping.core.clock import SYSTEM_CLOCK, impatient
from housekeeping.core.errors import HousekeepingError, Refused, SettingsError
from housekeeping.core.logs import counted, error_line, format_duration, format_size, printable
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import Settings
from housekeeping.database.connection import close_databases, database
from housekeeping.insight.alerts import ALERTS, advice, format_numbers, help_for, topic
from housekeeping.insight.status import WorkerStatus
from housekeeping.insight.trends import format_progress
from housekeeping.insight.wording import (
    format_age,
    format_run_counts,
    format_time,
    format_value,
    lost_holder,
    outcome_in_words,
)
from housekeeping.ledger.alerts import Acknowledged, Alert, AlertKey, acknowledge, describe_acknowledged
from housekeeping.ledger.operators import record_action
from housekeeping.ledger.schema import run_label
from housekeeping.sweeps.declaration import Sweep
from housekeeping.web.charts import add_charts, add_coverage, add_database, backlog_chart, runs_chart
from housekeeping.web.dead_letters import add_dead_letters, add_errors
from housekeeping.web.runs import add_action_log, add_erasures, add_processes, add_runs
from housekeeping.web.security import ApplicationLogin, current_user, protect
from housekeeping.web.snapshot import SnapshotCache
from housekeeping.web.workers import ORDERS, WorkerTable, add_actions, add_plans, worker_page

logger = named_logger(__name__)

_STATIC: Final = Path(__file__).parent / "static"
_COMPRESSIBLE: Final = ("text/html", "text/css", "text/javascript", "image/svg+xml")
_LEAST: Final = 500  # bytes; compressing less saves nothing
#: Ages and the time of the page, which the page's script keeps up to date.
_CLOCK: Final = re.compile(rb'<time id="at"[^>]*>[^<]*|(?<=<time class="ago")([^>]*>)[^<]*')


def shrink_responses(app: Flask) -> None:
    """Let pages be requested with the ``ETag`` of an earlier response, and compress them."""

    @app.after_request
    def shrink(response: FlaskResponse) -> FlaskResponse:
        versioned = request.endpoint == "static" and request.args.get("v") == _version(request.path.rpartition("/")[2])
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if versioned else "no-store"
        if response.status_code != 200 or response.mimetype not in _COMPRESSIBLE:
            return response
        response.direct_passthrough = False  # of static files, which are small
        body = response.get_data()
        if request.endpoint != "static":
            # A weak one: two pages with the same one may differ in their ages.
            response.set_etag(hashlib.sha256(_CLOCK.sub(rb"\1", body)).hexdigest()[:32], weak=True)
            response.make_conditional(request)
        if response.status_code == 200 and len(body) >= _LEAST and request.accept_encodings["gzip"] > 0:
            response.set_data(gzip.compress(body, 5, mtime=0))
            response.headers["Content-Encoding"] = "gzip"
        response.vary.update(("Accept-Encoding", "Cookie"))
        return response


def be_impatient(app: Flask, *, keep_connections: bool) -> None:
    """Let each request wait at most two seconds for a server.

    Parameters:
      keep_connections: Whether the threads keep their connections to databases for their next request.
    """
    answer: Any = app.wsgi_app

    def answer_soon(environ: Any, start_response: Any) -> Any:
        with impatient():
            try:
                return answer(environ, start_response)
            finally:
                if not keep_connections:
                    close_databases()

    app.wsgi_app = answer_soon  # type: ignore[method-assign]


def static_url(name: str) -> str:
    """Return the URL of a static file, which changes with its content."""
    return url_for("static", filename=name, v=_version(name))


@cache
def _version(name: str) -> str:
    path = _STATIC / name
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""


def configure_templates(app: Flask, sweeps: Mapping[str, Sweep]) -> None:
    """Register the filters and globals of the templates."""
    app.jinja_env.finalize = _visible
    app.jinja_env.undefined = StrictUndefined  # a name that no longer exists is an error, and not an empty page
    app.context_processor(lambda: {"live": False, "snapshot": None})
    app.jinja_env.filters |= _FILTERS
    app.jinja_env.globals |= {
        "runs_chart": partial(runs_chart, sweeps),
        "backlog_chart": backlog_chart,
        "help_for": help_for,
        "advice": advice,
        "topic": topic,
        "lost_holder": lost_holder,
        "outcome_in_words": outcome_in_words,
        "counted": counted,
        "run_counts": format_run_counts,
        "run_label": run_label,
        "progress_text": format_progress,
        "several_databases": database.several,
        "static_url": static_url,
        "alerts_are_open": are_open,
    }


def _visible(value: Any) -> Any:
    """Make characters visible that reverse or hide neighboring text. Escaping alone keeps only markup out."""
    return value if isinstance(value, Markup) else printable(str(value))


def _foldable(name: str) -> Markup:
    """Return a name that may wrap only after its separators."""
    return Markup(re.sub(r"([._/:@])", r"\1<wbr>", str(escape(printable(name)))))


def _ago(value: Any, now: datetime | None = None) -> Markup:
    """Return how long ago a time was. The page's script keeps it up to date, so that it need not be sent again."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return Markup("-")
    text = format_age(value, now or SYSTEM_CLOCK.now())
    return Markup(f'<time class="ago" datetime="{value.isoformat(timespec="seconds")}">{text}</time>')


def _backlog(status: WorkerStatus, now: datetime) -> Markup:
    counted_at = status.counted_at
    return escape(status.waiting or "?") + (Markup(" (") + _ago(counted_at, now) + ")" if counted_at else "")


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, indent=2)


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "duration": format_duration,
    "size": format_size,
    "count_value": format_value,
    "time": format_time,
    "ago": _ago,
    "as_json": _as_json,
    "backlog": _backlog,
    "foldable": _foldable,
}


#: Groups that are shown open: a few alerts fit above the table of workers, a storm does not.
_OPEN_ALERTS: Final = 3


@dataclass(slots=True)
class AlertGroup:
    """The active root causes of one name, either the acknowledged or the other ones.

    Attributes:
      explained: The alerts that they explain, by name.
    """

    name: str
    members: list[Alert] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)

    @property
    def caused(self) -> str:
        """The alerts that they explain: ``overdue (61), backlog (3)``; empty without any."""
        return format_numbers(self.explained)

    @property
    def since(self) -> datetime | None:
        """When the first of them began; None if unknown."""
        return min((each.since for each in self.members if each.since), default=None)

    @property
    def acknowledged(self) -> Acknowledged | None:
        """The latest acknowledgment; None if not acknowledged."""
        known = [each.acknowledged for each in self.members if each.acknowledged]
        return max(known, key=lambda each: each.at, default=None)

    @property
    def subject(self) -> str:
        """The worker of a single alert, empty if it concerns the whole installation; of several alerts their number."""
        if len(self.members) == 1:
            return self.members[0].worker
        return counted(len(self.members), "worker" if all(each.worker for each in self.members) else "alert")

    @property
    def seen(self) -> str:
        """The ids of the group's alerts, as its form sends them."""
        return ",".join(str(each.alert_id) for each in self.members)


def group_alerts(alerts: Iterable[Alert]) -> list[AlertGroup]:
    """Return the root causes by name, in the order of the alerts; the acknowledged ones in groups of their own.

    Parameters:
      alerts: As `housekeeping.insight.alerts.explained` returns them.
    """
    groups: dict[tuple[str, bool], AlertGroup] = {}
    of_root: dict[AlertKey, AlertGroup] = {}
    for alert in alerts:
        if alert.cause is not None:
            of_root[alert.cause].explained[alert.name] += 1
            continue
        key = alert.name, alert.acknowledged is not None
        of_root[alert.key] = groups.setdefault(key, AlertGroup(alert.name))
        of_root[alert.key].members.append(alert)
    return list(groups.values())


def are_open(groups: Iterable[AlertGroup]) -> bool:
    """Return whether the groups are shown open at first."""
    return sum(len(each.members) for each in groups if each.acknowledged is None) <= _OPEN_ALERTS


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


class _Server(TcpWSGIServer):
    """HTTP server that closes its oldest idle connection for a new one, once it has as many as it may have.

    A client that opens connections and sends nothing, or a byte now and then, would otherwise keep all others out.
    """

    _map: dict[int, Any]  # which the library's annotations lack
    active_channels: Any

    def handle_accept(self) -> None:
        super().handle_accept()
        # Not before: the new connection would get the number of a closed one, and the events that were read for it.
        surplus = len(self._map) - self.adj.connection_limit + 1
        if surplus > 0:
            idle = [each for each in self.active_channels.values() if not each.requests]
            for channel in sorted(idle, key=lambda each: each.creation_time)[:surplus]:
                channel.handle_close()


def create_app(
    settings: Settings,
    sweeps: dict[str, Sweep],
    login: str | ApplicationLogin,
    *,
    open_to_read: bool = False,
    mounted: bool = False,
    secret_key: bytes | None = None,
) -> Flask:
    """Return the application. The database must be configured; nothing is connected yet.

    Parameters:
      login: Token that allows changes and, unless `open_to_read`, is needed to read (``web_read_token`` of the settings
        allows only reading); or the login of the application that the dashboard is mounted into.
      open_to_read: Whether pages can be read without the token.
      mounted: Whether the threads belong to another application and must not keep connections.
      secret_key: Signs the cookies; None for a random one.
    """
    app = Flask("housekeeping.web")
    be_impatient(app, keep_connections=not mounted)
    protect(app, settings, login, open_to_read=open_to_read, secret_key=secret_key)
    shrink_responses(app)
    configure_templates(app, sweeps)
    snapshots = app.extensions["snapshots"] = SnapshotCache(settings, sweeps)
    _add_pages(app, snapshots)
    _add_health(app, snapshots)
    add_runs(app, snapshots)
    add_processes(app, snapshots)
    add_charts(app, snapshots)
    add_database(app, snapshots)
    add_coverage(app, snapshots)
    add_plans(app, snapshots)
    add_errors(app, snapshots)
    add_dead_letters(app, snapshots)
    add_actions(app, snapshots)
    add_action_log(app)
    add_erasures(app, settings)
    _add_errors(app, snapshots)
    return app


def _add_pages(app: Flask, snapshots: SnapshotCache) -> None:
    @app.get("/")
    def front() -> str:
        snapshot = snapshots.current()
        table = WorkerTable.of(snapshot.statuses.values(), request.args)
        groups = group_alerts(snapshot.alerts)
        return render_template("front.html", snapshot=snapshot, groups=groups, table=table, orders=ORDERS, live=True)

    @app.get("/workers/<name>")
    def worker(name: str) -> str:
        return worker_page(snapshots, name)

    @app.get("/alerts")
    def alerts() -> str:
        return render_template("alerts.html", alerts=ALERTS)

    @app.post("/alerts/acknowledge")
    def acknowledge_alerts() -> Response:
        name, seen = request.form.get("name", ""), request.form.get("seen", "").split(",")
        active = [alert for alert in snapshots.current().alerts if alert.name == name]
        # The page sends the alerts that it showed, because others may have begun since. Programs name the alert only.
        chosen = [alert for alert in active if seen == [""] or str(alert.alert_id) in seen]
        if not chosen:
            abort(404, "this alert is no longer active; nothing was acknowledged")
        with record_action("acknowledge", name, current_user()) as outcome:
            outcome.result = describe_acknowledged(name, acknowledge(chosen, current_user()))
        snapshots.invalidate()
        return redirect(url_for("front"), 303)

    @app.get("/favicon.ico")
    def favicon() -> Response:
        return redirect(url_for("static", filename="icon.svg"), 301)


def _add_health(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages for programs, which need no login and say nothing else."""

    def answer(works: bool) -> FlaskResponse:
        return FlaskResponse("ok\n" if works else "unavailable\n", 200 if works else 503, mimetype="text/plain")

    @app.get("/-/live")
    def live() -> FlaskResponse:
        return answer(True)

    @app.get("/-/ready")
    def ready() -> FlaskResponse:
        try:
            snapshot = snapshots.current()
        except Exception:
            logger.exception("The servers could not be read")
            return answer(False)
        return answer(not snapshot.unavailable and not snapshot.late_s)


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
    # `Proxies` decides which of the headers of a proxy are read. With poll(), file numbers may be above 1024.
    adjustments = Adjustments(
        threads=_THREADS, ident="housekeeping", clear_untrusted_proxy_headers=False, asyncore_use_poll=True, **_LIMITS
    )
    place = (listener.family, listener.type, listener.proto, listener.getsockname())
    return _Server(app, _sock=listener, adj=adjustments, sockinfo=place, bind_socket=False)
