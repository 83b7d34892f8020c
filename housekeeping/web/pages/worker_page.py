"""Page of a worker, also with a form that could not be carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from flask import render_template, request

from housekeeping.core.errors import DatabaseUnavailable, WrongArgument
from housekeeping.sweeps.ledger import history
from housekeeping.sweeps.ledger.models import SwitchChange
from housekeeping.web.snapshot import SnapshotCache

_RUNS: Final = 50  # in the list
_CHANGES: Final = 10  # of its override

T = TypeVar("T")


class SentForm:
    """Form of the request, with an error for each field that is wrong.

    Attributes:
      name: The id of the form on its page.
      errors: What is wrong, by field.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors: dict[str, str] = {}

    def text(self, field: str) -> str:
        """Return what was typed into a field."""
        return request.form.get(field, "").strip()

    def read(self, field: str, parse: Callable[[str], T]) -> T | None:
        """Return the parsed value of a field; None if it is empty or wrong.

        Parameters:
          parse: Raises WrongArgument for a wrong value.
        """
        try:
            return parse(text) if (text := self.text(field)) else None
        except WrongArgument as error:
            self.errors[field] = str(error)
            return None


def worker_page(snapshots: SnapshotCache, name: str, sent: SentForm | None = None) -> str:
    """Return a worker's page.

    Parameters:
      sent: A form with errors, which the page shows beside its fields, with what was typed.
    """
    sweep, current = snapshots.sweep(name), snapshots.current()
    rows: Any = None
    changes: Any = []
    try:
        with snapshots.reading(sweep.database):
            rows = history.recent(name, _RUNS)
            changes = SwitchChange.select().where(SwitchChange.worker == name)
            changes = list(changes.order_by(SwitchChange.id.desc()).limit(_CHANGES))
    except DatabaseUnavailable:
        if name not in current.statuses:  # there is nothing else to show
            raise
    typed: Mapping[str, str] = {} if sent is None else request.form
    return render_template(
        "worker.html",
        sweep=sweep,
        snapshot=current,
        worker_status=current.statuses.get(name),
        rows=rows,
        changes=changes,
        live=sent is None,
        sent=None if sent is None else sent.name,
        typed=typed,
        errors={} if sent is None else sent.errors,
    )
