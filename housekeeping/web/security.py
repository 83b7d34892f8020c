"""Access control: tokens, logins, the user's name, and forms that only the dashboard's own pages can send."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Callable
from typing import Final

from flask import Flask, Response, abort, g, get_flashed_messages, request, session
from werkzeug.wrappers import Response as AnyResponse

from housekeeping.core.sanitize import in_one_line
from housekeeping.core.settings import Settings
from housekeeping.web.logins import Login, Logins, Role

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
#: Forms that change only the login itself.
_OF_THE_LOGIN: Final = ("log_out", "discard_unfinished")
_MAX_USER: Final = 100  # characters


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Access:
    """The tokens, and what they allow.

    Wrong tokens are not counted: a random token of 32 characters cannot be guessed. `housekeeping doctor` warns about
    a shorter one.

    Parameters:
      token: Allows everything; compared in constant time.
      read_token: Allows reading; None if not set.
    """

    def __init__(self, token: str, read_token: str | None) -> None:
        self._token = token
        self._read_token = read_token

    def role(self, given: str) -> Role | None:
        """Return what a token allows; None if it is wrong."""
        if _equal(given, self._token):
            return "change"
        return "read" if self._read_token is not None and _equal(given, self._read_token) else None


def protect(
    app: Flask,
    settings: Settings,
    access: Access,
    logins: Logins,
    *,
    open_to_read: bool,
    ask: Callable[[], AnyResponse],
) -> None:
    """Require a token for changes, and for every page unless `open_to_read` is set.

    Parameters:
      open_to_read: Whether everyone who reaches the dashboard may read it; for loopback addresses only.
      ask: Returns the response to a request that needs a login.
    """
    app.config.update(
        SECRET_KEY=secrets.token_bytes(32),  # cookies of another process are not valid in this one
        SESSION_COOKIE_NAME="housekeeping",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
    )

    @app.before_request
    def check_access() -> AnyResponse | None:
        # DNS rebinding: a foreign page could otherwise reach this address under its own host name.
        if open_to_read and not is_loopback(_host()):
            abort(403, "this dashboard only serves this machine: open it as localhost or 127.0.0.1")
        g.user = _user(settings)
        g.login = login = logins.find(session.get("login"))
        changes = request.method not in ("GET", "HEAD", "OPTIONS")
        if request.endpoint in _OPEN_ENDPOINTS or login is not None:
            if changes:
                _reject_foreign_form()
                _reject_reader(login)
            return None
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer":
            role = access.role(bearer)
            if role is None:
                abort(401, "the token is wrong")
            if role == "read" and changes:
                abort(403, "this token may only read; nothing was changed")
            g.is_program = True
            return None
        return None if open_to_read and not changes else ask()

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        if g.get("is_program"):
            session.clear()  # a program reads no confirmations, which would pile up in its cookie
        return response

    @app.context_processor
    def template_variables() -> dict[str, object]:
        login: Login | None = g.get("login")
        return {
            "form_token": form_token,
            "logged_in": login is not None,
            "may_change": login is not None and login.role == "change",
            "messages": _messages,
        }


def current_user() -> str:
    """Return who sends this request, for the log of actions."""
    user: str | None = g.get("user")
    return user or "dashboard"


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
    if login is not None and login.role == "read" and request.endpoint not in _OF_THE_LOGIN + _OPEN_ENDPOINTS:
        abort(403, "this login may only read; nothing was changed: log out, and log in with the other token")


def _user(settings: Settings) -> str | None:
    """Return the user that a trusted proxy names; None if there is none."""
    if settings.web_user_header is None or not _is_trusted(settings, request.remote_addr or ""):
        return None
    # WSGI decodes headers as Latin-1, whatever their encoding.
    value = request.headers.get(settings.web_user_header, "").encode("latin-1", "replace").decode(errors="replace")
    return in_one_line(value.strip(), _MAX_USER) or None


def _is_trusted(settings: Settings, address: str) -> bool:
    try:
        peer = ipaddress.ip_address(address)
    except ValueError:
        return False
    peer = getattr(peer, "ipv4_mapped", None) or peer
    return any(peer in ipaddress.ip_network(each) for each in settings.web_trusted_proxies)


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _host() -> str:
    host = request.host
    return host[1 : host.index("]")] if host.startswith("[") else host.rsplit(":", 1)[0]
