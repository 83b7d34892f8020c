"""Page with the plan of a worker's next run."""

from __future__ import annotations

import threading
from typing import Final

from flask import Flask, abort, render_template, request

from housekeeping.presentation.workers import parse_argument, translate_table_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.plan import plan as make_plan
from housekeeping.web.snapshot import SnapshotCache

#: Maximum number of records counted per stage, so that the page loads quickly.
_COUNTED: Final = 100_000


def add_plans(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page. It changes nothing, so reading it needs no token."""
    counting = threading.Lock()

    @app.get("/workers/<name>/plan")
    def plan(name: str) -> str:
        sweep: Sweep = snapshots.sweeps.get(name) or abort(404, "no worker has this name")
        # A plan loads the database, and a foreign page could make a browser request it.
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            abort(403, "another site requested this page: open it from the worker's page")
        argument = parse_argument(sweep, request.args.get("argument", "").strip() or None)
        # One plan at a time, so that repeated clicks do not occupy all threads and the database.
        if not counting.acquire(blocking=False):
            abort(503, "another plan is being computed; reload this page in a moment")
        try:
            with translate_table_errors(sweep):
                planned = make_plan(sweep, argument, limit=_COUNTED)
        finally:
            counting.release()
        return render_template("plan.html", sweep=sweep, plan=planned, argument=argument)
