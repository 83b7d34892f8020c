"""Access control: one token, a session, and forms that only the dashboard's own pages can send."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from typing import Final

from flask import Flask, Response, abort, redirect, render_template, request, session, url_for
from werkzeug.wrappers import Response as AnyResponse

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


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def protect(app: Flask, token: str, *, open_to_read: bool) -> None:
    """Require the token for changes, and unless `open_to_read` for every page.

    Wrong tokens are not counted: a random token of 32 characters cannot be guessed. `housekeeping doctor` warns about
    a shorter one.

    Parameters:
      token: Allows everything; compared in constant time.
      open_to_read: Whether everyone who reaches the dashboard may read it; for loopback addresses only.
    """
    app.config.update(
        SECRET_KEY=secrets.token_bytes(32),  # sessions end with the process
        SESSION_COOKIE_NAME="housekeeping",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
    )

    @app.before_request
    def check_access() -> AnyResponse | None:
        # DNS rebinding: a foreign page could otherwise reach this address under its own host name.
        if open_to_read and not is_loopback(_host()):
            abort(403, "this dashboard only serves this machine: open it as localhost or 127.0.0.1")
        if request.endpoint in _OPEN_ENDPOINTS or _logged_in():
            if request.method == "POST":
                _reject_foreign_form()
            return None
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer":
            if _equal(bearer, token):
                return None
            abort(401, "the token is wrong")
        if request.method in ("GET", "HEAD") and open_to_read:
            return None
        return redirect(url_for("log_in", next=request.full_path if request.method == "GET" else "/"))

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        return response

    @app.get("/login")
    def log_in() -> str:
        return render_template("login.html", wrong=False)

    @app.post("/login")
    def log_in_with() -> AnyResponse | tuple[str, int]:
        if not _equal(request.form.get("token", ""), token):
            return render_template("login.html", wrong=True), 401
        target = request.args.get("next", "/")
        session.clear()
        session["logged_in"] = True
        return redirect(target if _is_own_path(target) else "/")

    @app.post("/logout")
    def log_out() -> AnyResponse:
        session.clear()
        return redirect("/")

    @app.context_processor
    def template_variables() -> dict[str, object]:
        return {"form_token": form_token, "logged_in": _logged_in(), "may_change": _logged_in()}


def current_user() -> str:
    """Return who sends this request, for the log of actions."""
    return "dashboard"


def form_token() -> str:
    """Return the token that this session's forms must contain."""
    if "form" not in session:
        session["form"] = secrets.token_urlsafe(32)
    return str(session["form"])


def _reject_foreign_form() -> None:
    # Not Flask-WTF: it needs WTForms, and over plain HTTP it does not check which page sent a form.
    sent, expected = request.form.get("form_token", ""), session.get("form", "")
    origin = request.headers.get("Origin")
    if not expected or not _equal(sent, expected):
        abort(403, "this form has expired or is not from this dashboard: go back and reload the page")
    # Compare without the scheme, which a proxy with TLS changes.
    if origin is not None and origin.partition("://")[2] != request.host:
        abort(403, "this form was sent from another site")


def _logged_in() -> bool:
    return bool(session.get("logged_in"))


def _is_own_path(target: str) -> bool:
    # Browsers drop tabs and line ends and read a backslash as a slash, which can turn a path into a foreign address.
    return target.isprintable() and target.startswith("/") and not target.startswith(("//", "/\\"))


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _host() -> str:
    host = request.host
    return host[1 : host.index("]")] if host.startswith("[") else host.rsplit(":", 1)[0]
