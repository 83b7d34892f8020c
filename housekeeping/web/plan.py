"""The page that says what a run would do now."""

from __future__ import annotations

import threading
from typing import Final

from flask import Flask, abort, render_template, request

from housekeeping.presentation.workers import parse_argument, translate_table_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.plan import plan as make_plan
from housekeeping.web.snapshot import SnapshotCache

#: Records of a pass that are counted; whoever looks at a page does not wait for more.
_COUNTED: Final = 100_000


def add_plans(app: Flask, observatory: SnapshotCache) -> None:
    """Add the page to the application. It changes nothing and leaves no row, so reading it takes no token."""
    counting = threading.Lock()

    @app.get("/workers/<name>/plan")
    def plan(name: str) -> str:
        sweep: Sweep = observatory.sweeps.get(name) or abort(404, "there is no such worker")
        # It costs the database something, and any page elsewhere could have a browser ask for it.
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            abort(403, "this page was asked for by another one: open it from the worker's page")
        about = parse_argument(sweep, request.args.get("argument", "").strip() or None)
        # One at a time, or a few impatient people would have all threads and the database count the same.
        if not counting.acquire(blocking=False):
            abort(503, "another plan is being made; load this page again in a moment")
        try:
            with translate_table_errors(sweep):
                planned = make_plan(sweep, about, limit=_COUNTED)
        finally:
            counting.release()
        return render_template("plan.html", sweep=sweep, plan=planned, argument=about)
