"""Access control: tokens, logins, the user's name and address, and forms that only the dashboard's own pages can send.

Logins are in the memory of the dashboard's process. The cookie has only the id of a login. So a logout takes effect at
once, a login ends with the process, and neither needs a server: operators can log in and out while Redis or PostgreSQL
is unavailable. Each process has its own logins.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from math import ceil
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit
from wsgiref.types import WSGIEnvironment

from flask import Flask, abort, flash, g, get_flashed_messages, redirect, render_template, request, session, url_for
from flask import Response as FlaskResponse
from flask.sessions import SecureCookieSessionInterface
from werkzeug.wrappers import Response

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import WrongArgument
from housekeeping.core.logs import error_line, in_one_line
from housekeeping.core.settings import Settings
from housekeeping.insight.wording import parse_since
from housekeeping.ledger.operators import record_action

Role = Literal["change", "read"]
T = TypeVar("T")

_IDLE_S: Final = 12 * 3600.0  # a working day; a login that was not used for longer ends
_MOST_LOGINS: Final = 1000  # logins; the least recently used ones end
_ATTEMPTS: Final = 10  # wrong tokens in a row from one address
_ATTEMPT_S: Final = 10.0  # seconds after which an address may try one more
_MOST_ADDRESSES: Final = 10_000  # addresses whose attempts are counted; those of the oldest ones are forgotten
_SUBSCRIBER: Final = 64  # bits of an IPv6 address; one subscriber has all addresses that begin with them


@dataclass(slots=True)
class Login:
    """One login.

    Attributes:
      role: ``read``: it may change nothing.
      user: The name that was given at the login; empty without one.
    """

    role: Role
    user: str
    used_at: float


class Logins:
    """The current logins. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logins: dict[str, Login] = {}  # the least recently used first

    def begin(self, role: Role, user: str = "") -> str:
        """Return the id of a new login."""
        login_id = secrets.token_urlsafe(32)
        with self._lock:
            self._logins[login_id] = Login(role, user, time.monotonic())
            while len(self._logins) > _MOST_LOGINS:
                del self._logins[next(iter(self._logins))]
        return login_id

    def find(self, login_id: str | None) -> Login | None:
        """Return a login and note its use; None if it has ended, or another process has it."""
        with self._lock:
            login = self._logins.pop(login_id or "", None)
            if login is None or time.monotonic() - login.used_at > _IDLE_S:
                return None
            login.used_at = time.monotonic()
            self._logins[str(login_id)] = login
            return login

    def end(self, login_id: str | None) -> None:
        """End a login, if it has not ended."""
        with self._lock:
            self._logins.pop(login_id or "", None)


@dataclass(frozen=True, slots=True)
class ApplicationLogin:
    """Login of the application that the dashboard is mounted into.

    Attributes:
      user: Returns the name of the user who sent a request; None or an empty string if the user may not read the
        dashboard.
      may_change: Returns whether the user who sent a request may make changes.
    """

    user: Callable[[WSGIEnvironment], str | None]
    may_change: Callable[[WSGIEnvironment], bool]

    def require(self) -> Login:
        """Return the login of this request, or abort it with status 403."""
        user = in_one_line((self.user(request.environ) or "").strip(), _MAX_USER)
        if not user:
            abort(403, "you are not logged in to the application, or may not read this dashboard")
        return Login("change" if self.may_change(request.environ) else "read", user, time.monotonic())


class Attempts:
    """Wrong tokens by address, so that a token cannot be guessed in the time between two looks at the log. Thread-safe.

    Each address has ten attempts, and one more every ten seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_at: dict[str, float] = {}  # when all attempts are available again; the oldest first

    def begin(self, address: str) -> float:
        """Count an attempt and return 0, or return the seconds until the next attempt of this address."""
        key = _subscriber(address)
        with self._lock:
            now = self._clock()
            paid_at = max(self._paid_at.pop(key, now), now)
            wait_s = max(0.0, paid_at - now - (_ATTEMPTS - 1) * _ATTEMPT_S)
            self._paid_at[key] = paid_at if wait_s else paid_at + _ATTEMPT_S
            while len(self._paid_at) > _MOST_ADDRESSES:
                del self._paid_at[next(iter(self._paid_at))]
            return wait_s

    def succeeded(self, address: str) -> None:
        """Forget the attempts of an address."""
        with self._lock:
            self._paid_at.pop(_subscriber(address), None)


#: Pages show content of databases and messages. They may load, send and be framed by nothing from elsewhere.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer", browsers send "Origin: null" with our own forms.
    "Referrer-Policy": "same-origin",
}
_OPEN_ENDPOINTS: Final = ("log_in", "log_in_with", "static", "favicon")
#: They say only whether something works, and are asked by programs that name the host as they like.
_HEALTH_ENDPOINTS: Final = ("live", "ready")
_MOST_HOPS: Final = 10  # proxies between a client and the dashboard
_MAX_USER: Final = 100  # characters
_MAX_FIELD: Final = 500  # characters


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def role_of(given: str, token: str, read_token: str | None) -> Role | None:
    """Return what a given token allows; None if it is wrong. Tokens are compared in constant time."""
    if _equal(given, token):
        return "change"
    return "read" if read_token is not None and _equal(given, read_token) else None


def protect(
    app: Flask,
    settings: Settings,
    login: str | ApplicationLogin,
    *,
    open_to_read: bool,
    secret_key: bytes | None = None,
) -> None:
    """Require a login for changes, and for every page unless `open_to_read` is set.

    Parameters:
      login: Token that allows everything, for which a login page is added; or the application's login.
      open_to_read: Whether everyone who reaches the dashboard may read it; for loopback addresses only.
      secret_key: Key that signs the cookies; None for a random one, with which other processes reject the cookies.
    """
    logins, attempts, proxies = Logins(), Attempts(), Proxies(settings)
    application = login if isinstance(login, ApplicationLogin) else None
    if isinstance(login, str):
        role = partial(_limited_role, attempts, partial(role_of, token=login, read_token=settings.web_read_token))
        _add_login_pages(app, role, logins)
    app.session_interface = _Sessions(settings, proxies)
    app.config.update(
        SECRET_KEY=secret_key or secrets.token_bytes(32),
        SESSION_COOKIE_NAME="housekeeping",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
    )

    @app.before_request
    def check_access() -> Response | None:
        if request.endpoint in _HEALTH_ENDPOINTS:
            return None
        # DNS rebinding: a foreign page could otherwise reach this address under its own host name.
        if open_to_read and not is_loopback(_host()):
            abort(403, "this dashboard only serves this machine: open it as localhost or 127.0.0.1")
        g.address, changes = proxies.client_address(), request.method not in ("GET", "HEAD", "OPTIONS")
        if application is not None:
            if request.endpoint not in _OPEN_ENDPOINTS:  # such as the style sheet of error pages
                g.login = application.require()
                if changes:
                    _reject_foreign_form()
                    _reject_reader(g.login)
            return None
        g.proxy_user = proxies.user()
        g.login = login = logins.find(session.get("login"))
        if request.endpoint in _OPEN_ENDPOINTS or login is not None:
            if changes:
                _reject_foreign_form()
                _reject_reader(login)
            return None
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer":
            allowed = role(bearer)
            if allowed is None:
                abort(429 if g.get("retry_after_s") else 401, _wrong_token())
            if allowed == "read" and changes:
                abort(403, "this token may only read; nothing was changed")
            g.is_program = True
            return None
        return None if open_to_read and not changes else _ask_to_log_in()

    @app.after_request
    def add_headers(response: FlaskResponse) -> FlaskResponse:
        response.headers.update(_HEADERS)
        if g.get("retry_after_s"):
            response.headers["Retry-After"] = str(g.retry_after_s)
        if g.get("is_program"):
            session.clear()  # a program reads no confirmations, which would pile up in its cookie
        return response

    @app.context_processor
    def template_variables() -> dict[str, object]:
        login: Login | None = g.get("login")
        return {
            "form_token": form_token,
            "has_logins": application is None,
            "logged_in": login is not None,
            "user": login.user if login else "",
            "may_change": login is not None and login.role == "change",
            "messages": _messages,
        }


_Address = IPv4Address | IPv6Address
#: An address with a port, as some proxies write it.
_HOP: Final = re.compile(r"\[(?P<six>[^\]]+)\](?::\d+)?|(?P<four>\d+\.\d+\.\d+\.\d+):\d+")


class Form:
    """Fields of a request as they were typed, with an error for each wrong one.

    Parameters:
      names: The fields.

    Attributes:
      typed: The text of each field that is not empty; the query of links that keep a filter.
      errors: What is wrong, by field.
    """

    def __init__(self, sent: Mapping[str, str], *names: str) -> None:
        # PostgreSQL text cannot contain NUL characters.
        texts = {name: in_one_line(sent.get(name, "").strip(), _MAX_FIELD) for name in names}
        self.typed = {name: text for name, text in texts.items() if text}
        self.errors: dict[str, str] = {}

    def read(self, name: str, parse: Callable[[str], T]) -> T | None:
        """Return the parsed value of a field; None if it is empty or wrong.

        Parameters:
          parse: Raises WrongArgument for a wrong value.
        """
        try:
            return parse(self.typed[name]) if name in self.typed else None
        except WrongArgument as error:
            self.errors[name] = error_line(error)
            return None

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Return the value of a field if it is one of these; None if it is empty or wrong."""

        def parse(text: str) -> str:
            if text not in choices:
                raise WrongArgument(f"{text!r} is none of {', '.join(choices)}")
            return text

        return self.read(name, parse)

    def times(self) -> tuple[datetime | None, datetime | None]:
        """Return the values of the fields ``since`` and ``until``."""
        parse = partial(parse_since, now=SYSTEM_CLOCK.now())
        return self.read("since", parse), self.read("until", parse)


def current_user(given: str = "") -> str:
    """Return who sends this request, for the action log: ``user@address``, as on the command line.

    The user is the one that a trusted proxy names, or that of the login.

    Parameters:
      given: The name in a form that begins a login.
    """
    login: Login | None = g.get("login")
    user = g.get("proxy_user") or given or (login.user if login else "") or "dashboard"
    address: str = g.get("address", "")
    return f"{user}@{address}" if address else user


def form_token() -> str:
    """Return the token that this session's forms must contain."""
    if "form" not in session:
        session["form"] = secrets.token_urlsafe(32)
    return str(session["form"])


def is_foreign_form() -> bool:
    """Return whether another site has sent this form."""
    origin = request.headers.get("Origin")
    # Compare without the scheme, which a proxy with TLS changes.
    return origin is not None and origin.partition("://")[2] != request.host


def _messages() -> list[str]:
    """Return the confirmations, for the next page that a person opens; a page that refreshes itself takes none."""
    is_opened = request.method != "HEAD" and "X-Refresh" not in request.headers
    return [str(text) for text in get_flashed_messages()] if is_opened else []


def _reject_foreign_form() -> None:
    # Not Flask-WTF: it needs WTForms, and over plain HTTP it does not check which page sent a form.
    sent, expected = request.form.get("form_token", ""), session.get("form", "")
    if not expected or not _equal(sent, expected):
        abort(
            403,
            "this form has expired or is not from this dashboard, and nothing was changed: go back and reload the page",
        )
    if is_foreign_form():
        abort(403, "this form was sent from another site")


def _reject_reader(login: Login | None) -> None:
    if login is not None and login.role == "read" and request.endpoint not in ("log_out", *_OPEN_ENDPOINTS):
        abort(403, "this login may only read; nothing was changed: log in as a user who may make changes")


class Proxies:
    """What trusted proxies say about a request: its user, its client's address, and whether it came by TLS.

    Anybody else can send the same headers, which are then ignored.
    """

    def __init__(self, settings: Settings) -> None:
        self._user_header = settings.web_user_header
        self._networks = [ipaddress.ip_network(each) for each in settings.web_trusted_proxies]

    def user(self) -> str | None:
        """Return the user that a trusted proxy names; None if there is none."""
        if self._user_header is None or not self._is_trusted(_ip(request.remote_addr or "")):
            return None
        # WSGI decodes headers as Latin-1, whatever their encoding.
        value = request.headers.get(self._user_header, "").encode("latin-1", "replace").decode(errors="replace")
        return in_one_line(value.strip(), _MAX_USER) or None

    def client_address(self) -> str:
        """Return the client's address; behind trusted proxies the last one in ``X-Forwarded-For`` that is none of them.

        Empty for a request without an address.
        """
        address = _ip(request.remote_addr or "")
        hops = request.headers.get("X-Forwarded-For", "").split(",")[-_MOST_HOPS:]
        # From the end: each proxy appends the address it was asked from, and the client can send anything before.
        while hops and self._is_trusted(address) and (forwarded := _ip(hops.pop())):
            address = forwarded
        return str(address or "")

    def came_by_tls(self) -> bool:
        """Return whether a trusted proxy was asked by HTTPS."""
        scheme = request.headers.get("X-Forwarded-Proto", "")
        return self._is_trusted(_ip(request.remote_addr or "")) and "https" in re.split(r"[,\s]+", scheme.lower())

    def _is_trusted(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _ip(text: str) -> _Address | None:
    """Return the address in a text, also with a port; None if it has none."""
    found = _HOP.fullmatch(text.strip())
    try:
        address = ipaddress.ip_address(found["six"] or found["four"] if found else text.strip())
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _subscriber(address: str) -> str:
    """Return what stands for all addresses of one client."""
    found = _ip(address)
    if isinstance(found, IPv6Address):
        return str(IPv6Network((found.packed, _SUBSCRIBER), strict=False))
    return str(found)


def _limited_role(attempts: Attempts, role: Callable[[str], Role | None], given: str, user: str = "") -> Role | None:
    """Return what a token allows; None if it is wrong, or the client has sent too many wrong ones.

    Each wrong token is in the action log. A token that is not looked at is not, so that a client cannot fill the
    log; the request then has the time until the next attempt.
    """
    wait_s = attempts.begin(g.address)
    if wait_s:
        g.retry_after_s = ceil(wait_s)
        return None
    allowed = role(given)
    if allowed is not None:
        attempts.succeeded(g.address)
    else:
        with record_action("login", "dashboard", current_user(user)) as outcome:
            outcome.result = "failed: wrong token"
    return allowed


def _wrong_token() -> str:
    wait_s = g.get("retry_after_s")
    return f"too many wrong tokens from your address; try again in {wait_s} s" if wait_s else "the token is wrong"


class _Sessions(SecureCookieSessionInterface):
    """Cookies for the dashboard's path; restricted to TLS if the browser reaches the dashboard by TLS."""

    def __init__(self, settings: Settings, proxies: Proxies) -> None:
        self._always = settings.web_https
        self._proxies = proxies

    def get_cookie_secure(self, app: Flask) -> bool:
        return self._always or request.is_secure or self._proxies.came_by_tls()

    def get_cookie_path(self, app: Flask) -> str:
        return f"{request.script_root}/"


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _host() -> str:
    host = request.host
    return host[1 : host.index("]")] if host.startswith("[") else host.rsplit(":", 1)[0]


def _add_login_pages(app: Flask, role: Callable[[str, str], Role | None], logins: Logins) -> None:

    @app.get("/login")
    def log_in() -> str:
        return render_template("login.html", problem="", name="", known_user=g.proxy_user)

    @app.post("/login")
    def log_in_with() -> Response | tuple[str, int]:
        name = in_one_line(request.form.get("name", "").strip(), _MAX_USER)
        allowed = role(request.form.get("token", ""), name)
        if allowed is None:
            page = render_template("login.html", problem=_wrong_token(), name=name, known_user=g.proxy_user)
            return page, 429 if g.get("retry_after_s") else 401
        with record_action("login", "dashboard", current_user(name)) as outcome:
            outcome.result = "may change" if allowed == "change" else "may only read"
        target = request.args.get("next", "/")  # below the dashboard's own path
        logins.end(session.get("login"))
        session.clear()
        session["login"] = logins.begin(allowed, name)
        return redirect(request.script_root + target if is_own_path(target) else url_for("front"))

    @app.post("/logout")
    def log_out() -> Response:
        logins.end(session.get("login"))
        session.clear()
        return redirect(url_for("front"))


def _ask_to_log_in() -> Response:
    """Return the redirect to the login page, which leads back to the page. A form is not carried out."""
    if request.method in ("GET", "HEAD"):
        return redirect(url_for("log_in", next=request.full_path))
    if is_foreign_form():
        abort(403, "this form was sent from another site")
    if request.endpoint != "log_out":
        flash("You were logged out, so the form was not carried out. Log in and send it again.")
    page = urlsplit(request.referrer or "")
    path = f"{page.path.removeprefix(request.script_root)}?{page.query}"
    return redirect(url_for("log_in", next=path if page.netloc == request.host else "/"))


def is_own_path(target: str) -> bool:
    """Return whether a redirect to this address stays on the dashboard."""
    # Browsers drop tabs and line ends and read a backslash as a slash, which can turn a path into a foreign address.
    return target.isprintable() and target.startswith("/") and not target.startswith(("//", "/\\"))
