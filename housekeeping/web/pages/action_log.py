"""Page of the operators' actions."""

from __future__ import annotations

from typing import Final

from flask import Flask, render_template, request

from housekeeping.sweeps.ledger.action_log import logged_actions

_SHOWN: Final = 50  # actions on a page


def add_action_log(app: Flask) -> None:
    """Register the page."""

    @app.get("/actions")
    def actions() -> str:
        chosen = {name: request.args.get(name, "").strip() or None for name in ("target", "user")}
        before = request.args.get("before", type=int)
        # One more than shown tells whether there are older ones.
        found = logged_actions(_SHOWN + 1, before=before, **chosen)
        return render_template("actions.html", actions=found[:_SHOWN], more=len(found) > _SHOWN, chosen=chosen)
