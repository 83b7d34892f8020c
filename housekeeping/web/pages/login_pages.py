"""Pages to log in and out, and forms that were sent after the login had ended."""

from __future__ import annotations

import json
from typing import Any, Final

from flask import Flask, abort, flash, redirect, render_template, request, session, url_for
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from housekeeping.web.logins import Logins
from housekeeping.web.security import Access, is_foreign_form

_MOST: Final = 2000  # characters of a form that is kept; it is in the cookie
_NOT_KEPT: Final = (
    "You were logged out before your last form was sent, and it was too large to keep. It was not carried out."
)


def add_login_pages(app: Flask, access: Access, logins: Logins) -> None:
    """Register the pages."""

    @app.get("/login")
    def log_in() -> str:
        return render_template("login.html", wrong=False, unfinished=_unfinished(app))

    @app.post("/login")
    def log_in_with() -> Response | tuple[str, int]:
        role = access.role(request.form.get("token", ""))
        if role is None:
            return render_template("login.html", wrong=True, unfinished=_unfinished(app)), 401
        target, unfinished = request.args.get("next", "/"), session.get("unfinished")
        logins.end(session.get("login"))
        session.clear()
        session["login"] = logins.begin(role)
        if unfinished:
            session["unfinished"] = unfinished
            return redirect(url_for("unfinished"))
        if unfinished is not None:
            flash(_NOT_KEPT)
        return redirect(target if is_own_path(target) else "/")

    @app.post("/logout")
    def log_out() -> Response:
        logins.end(session.get("login"))
        session.clear()
        return redirect("/")

    @app.get("/unfinished")
    def unfinished() -> Response | str:
        form = _unfinished(app)
        return redirect("/") if form is None else render_template("unfinished.html", unfinished=form)

    @app.post("/unfinished/discard")
    def discard_unfinished() -> Response:
        session.pop("unfinished", None)
        return redirect("/", 303)

    @app.before_request
    def forget_unfinished() -> None:
        if request.method == "POST" and session.get("unfinished", {}).get("path") == _path():
            session.pop("unfinished")


def ask_to_log_in() -> Response:
    """Return the redirect to the login page. A form is kept, to be carried out after the login."""
    if request.method in ("GET", "HEAD"):
        return redirect(url_for("log_in", next=request.full_path))
    # Another site must not leave a form here that the user then carries out.
    if is_foreign_form():
        abort(403, "this form was sent from another site")
    if request.endpoint not in ("log_out", "discard_unfinished"):
        fields = [[name, value] for name, value in request.form.items(multi=True) if name != "form_token"]
        form = {"path": _path(), "fields": fields}
        session["unfinished"] = form if len(json.dumps(form)) <= _MOST else {}
    return redirect(url_for("log_in", next="/"))


def is_own_path(target: str) -> bool:
    """Return whether a redirect to this address stays on the dashboard."""
    # Browsers drop tabs and line ends and read a backslash as a slash, which can turn a path into a foreign address.
    return target.isprintable() and target.startswith("/") and not target.startswith(("//", "/\\"))


def _unfinished(app: Flask) -> dict[str, Any] | None:
    """Return the form that was sent without a login, with a title; without a path if it was too large; or None."""
    form: dict[str, Any] | None = session.get("unfinished")
    if not form:
        return form
    path, _, query = str(form["path"]).partition("?")
    try:
        endpoint, values = app.url_map.bind("").match(path, method="POST")
    except HTTPException:
        return None
    target = " ".join([*(str(value) for value in values.values()), query])
    return {**form, "title": f"{endpoint.replace('_', ' ').capitalize()} {target}".strip()}


def _path() -> str:
    return request.full_path.rstrip("?")
