"""The cleanup of one project with limits that a few rows reach, and what it counts."""

from __future__ import annotations

import dataclasses
from typing import Final

from housekeeping.workers.batched_git_ref_updates.worker import project_cleanup

SMALL: Final = dataclasses.replace(project_cleanup, options={"page_size": 10, "git_batch_size": 5, "max_deletes": 30})
#: The counts of a run that found nothing.
NONE: Final = {"total_deletes": 0, "invalid": 0, "failed": 0}
