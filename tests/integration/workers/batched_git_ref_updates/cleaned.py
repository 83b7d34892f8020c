"""The cleanup of one project with limits that a few rows reach, and what it counts."""

from __future__ import annotations

from typing import Final

from tests.declarations import changed
from tests.internals.workers import project_cleanup

SMALL: Final = changed(project_cleanup, options={"page_size": 10, "git_batch_size": 5, "max_deletes": 30})
#: The counts of a run that found nothing.
NONE: Final = {"total_deletes": 0, "invalid": 0, "failed": 0}
