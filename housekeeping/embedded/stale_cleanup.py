"""Cleanup of what a killed run left behind: running servers, shared memory and a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from housekeeping.embedded.folders import abandoned
from housekeeping.embedded.postgres import release_shared_memory
from housekeeping.embedded.processes import stop_all_in, unprivileged_account

logger = logging.getLogger(__name__)


def clear_leftovers(parents: Iterable[Path]) -> None:
    """Stop the servers that still run in abandoned folders of `parents`, and remove the folders.

    Failures are logged and do not keep a new run from starting.
    """
    account = unprivileged_account()
    for folder in abandoned(parents):
        if not stop_all_in(folder.path):
            folder.release()
            logger.warning("Could not stop the servers in %s; the folder is kept", folder.path)
            continue
        release_shared_memory(folder.path, account)
        try:
            folder.remove()
        except OSError as error:
            folder.release()
            logger.warning("Could not remove %s: %s", folder.path, error)
