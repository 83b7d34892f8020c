"""Events after the commit: what an application hangs its mails and its pipelines' states on.

::

    from housekeeping import events

    @events.build_dropped.connect
    def tell_the_author(sender, *, rows, worker, run_id):
        for row in rows:
            mail(row["build_id"])

An event is sent once for each committed batch, in the worker's thread, outside of any transaction, with the
batch's rows. A subscriber that raises is logged and reported; it harms neither the sweep nor the other subscribers.

Note: A process killed between the commit and its event sends none. What must not be missed reads the table itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from blinker import NamedSignal, Namespace

from housekeeping.foundation.db import one_line
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.foundation.reports import report

logger = named_logger(__name__)

_events: Final = Namespace()

#: rows: user_id, clear_status_at
user_status_cleared: Final = _events.signal("user_status_cleared")
#: rows: bulk_import_id
import_timed_out: Final = _events.signal("import_timed_out")
#: rows: bulk_import_entity_id, bulk_import_id
entity_timed_out: Final = _events.signal("entity_timed_out")
#: rows: build_id, project_id, pipeline_id, failure_reason
build_dropped: Final = _events.signal("build_dropped")
#: rows: build_id, project_id, pipeline_id, failure_reason
build_doomed: Final = _events.signal("build_doomed")
#: rows: location, path
upload_deleted: Final = _events.signal("upload_deleted")
#: rows: id, project_id, ref
refs_deleted: Final = _events.signal("refs_deleted")


def send(event: NamedSignal, rows: Sequence[dict[str, Any]], *, worker: str, run_id: int | None) -> None:
    """Tell every subscriber of the event about these rows, each on its own; never raises."""
    if not rows:
        return
    for subscriber in event.receivers_for(worker):
        try:
            # Copies: what one subscriber does with them is its own business.
            subscriber(worker, rows=[dict(row) for row in rows], worker=worker, run_id=run_id)
        except Exception as error:
            logger.exception("A subscriber failed", subscribed_to=event.name, error=one_line(error))
            report(error, worker=worker, run_id=run_id, subscribed_to=event.name)
