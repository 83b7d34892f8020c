"""Who may look and who may change: a token, a session, and forms that only our own pages can send."""

from __future__ import annotations

import hmac
import ipaddress
import math
import secrets
from typing import Final

from flask import Flask, Response, abort, make_response, redirect, render_template, request, session, url_for
from werkzeug.wrappers import Response as AnyResponse

from housekeeping.web.rate_limit import Guesses

#: Of a page that shows what databases and messages contain: nothing is loaded, sent or framed but by ourselves.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer": a browser then hides from us, too, which page a form was sent from.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_OPEN_ENDPOINTS: Final = ("log_in", "log_in_with", "static", "favicon")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def protect(app: Flask, token: str, *, open_to_read: bool) -> None:
    """Put the gate before every page of the application.

    Parameters:
      token: Opens everything; compared in constant time.
      open_to_read: Whether pages are shown to everybody who reaches them: on loopback only.
    """
    app.config.update(
        SECRET_KEY=secrets.token_bytes(32),  # sessions end with the process
        SESSION_COOKIE_NAME="housekeeping",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
    )

    guesses = Guesses()

    @app.before_request
    def gate() -> AnyResponse | None:
        # A page elsewhere could otherwise have the browser ask under a name of its own that leads here.
        if open_to_read and not is_loopback(_host()):
            abort(403, "this dashboard is for this machine: ask for it as localhost or 127.0.0.1")
        if request.endpoint in _OPEN_ENDPOINTS or _has_entered():
            if request.method == "POST":
                _refuse_forms_of_others()
            return None
        if request.headers.get("Authorization", "").startswith("Bearer "):
            _refuse_guessing(guesses)
            if _is_right(request.headers["Authorization"].removeprefix("Bearer "), token):
                return None
            guesses.was_wrong(request.remote_addr)
            abort(401, "the token is wrong")
        if request.method in ("GET", "HEAD") and open_to_read:
            return None
        return redirect(url_for("log_in", next=request.full_path if request.method == "GET" else "/"))

    @app.after_request
    def headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        return response

    @app.get("/login")
    def log_in() -> str:
        return render_template("login.html", wrong=False)

    @app.post("/login")
    def log_in_with() -> AnyResponse | tuple[str, int]:
        _refuse_guessing(guesses)
        if not _is_right(request.form.get("token", ""), token):
            guesses.was_wrong(request.remote_addr)
            return render_template("login.html", wrong=True), 401
        following = request.args.get("next", "/")
        session.clear()
        session["entered"] = True
        # A path of ours, not an address elsewhere that only looks like one.
        # A tab or a line end would be taken out on the way, and what is left be another address.
        ours = following.isprintable() and following.startswith("/") and not following.startswith(("//", "/\\"))
        return redirect(following if ours else "/")

    @app.post("/logout")
    def log_out() -> AnyResponse:
        session.clear()
        return redirect("/")

    @app.context_processor
    def for_forms() -> dict[str, object]:
        return {"form_token": form_token, "entered": _has_entered()}


def form_token() -> str:
    """The word a form must bring back: known to pages of this session only."""
    if "form" not in session:
        session["form"] = secrets.token_urlsafe(32)
    return str(session["form"])


def _refuse_forms_of_others() -> None:
    sent, known = request.form.get("form_token", ""), session.get("form", "")
    origin = request.headers.get("Origin")
    if not known or not hmac.compare_digest(sent.encode(), known.encode()):
        abort(403, "this form is too old, or was not ours: go back and load the page again")
    # Without the scheme: behind a proxy that speaks TLS ours is another one.
    if origin is not None and origin.partition("://")[2] != request.host:
        abort(403, "this form was sent from another page")


def _has_entered() -> bool:
    return bool(session.get("entered"))


def _refuse_guessing(guesses: Guesses) -> None:
    """Say at once when to come again: whoever sleeps over it would keep a thread from everybody else."""
    if wait_s := math.ceil(guesses.wait_s(request.remote_addr)):
        text = f"too many wrong tokens from this address: try again in {wait_s} s"
        refused = make_response(render_template("error.html", text=text), 429)
        refused.headers["Retry-After"] = str(wait_s)
        abort(refused)


def _is_right(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _host() -> str:
    host = request.host
    return host[1 : host.index("]")] if host.startswith("[") else host.rsplit(":", 1)[0]
