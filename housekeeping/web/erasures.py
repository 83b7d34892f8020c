"""Pages of the erasures: a list, and each receipt as JSON. Neither has anything that identifies a subject."""

from __future__ import annotations

from flask import Flask, abort, render_template, request
from werkzeug.sansio.response import Response

from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.insight.erasures import find_erasure, read_erasures
from housekeeping.web.security import Form

_SHOWN = 50  # erasures on a page


def add_erasures(app: Flask, settings: Settings) -> None:
    """Register the pages."""

    @app.get("/erasures")
    def erasures() -> tuple[str, int]:
        form = Form(request.args, "subject", "since", "until")
        since, until = form.times()
        before = request.args.get("before", type=int)
        # One more than shown tells whether there are older ones.
        limit = 0 if form.errors else _SHOWN + 1
        found = read_erasures(limit, before=before, since=since, until=until, subject=form.typed.get("subject"))
        older = found[_SHOWN - 1].erasure_id if len(found) > _SHOWN else None
        shown = render_template("erasures.html", erasures=found[:_SHOWN], older=older, form=form)
        return shown, 400 if form.errors else 200

    @app.get("/erasures/<int:number>/receipt.json")
    def receipt(number: int) -> Response:
        try:
            found = find_erasure(str(number))
        except WrongArgument:
            abort(404, "no erasure has this ID")
        return app.json.response(found.receipt(settings.require_erasure_key()))
