"""What a killed run left behind: servers at work, shared memory, a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from housekeeping.embedded.folders import abandoned
from housekeeping.embedded.postgres import release_shared_memory
from housekeeping.embedded.processes import stop_all_in, unprivileged_account

logger = logging.getLogger(__name__)


def clear_leftovers(parents: Iterable[Path]) -> None:
    """Stop what still runs out of our abandoned folders in `parents`, and remove them.

    What cannot be cleared is logged and left; it does not keep a new run from starting.
    """
    account = unprivileged_account()
    for folder in abandoned(parents):
        if not stop_all_in(folder.path):
            folder.give_up()
            logger.warning("Left %s alone: its servers could not be stopped", folder.path)
            continue
        release_shared_memory(folder.path, account)
        try:
            folder.remove()
        except OSError as error:
            folder.give_up()
            logger.warning("Could not remove %s: %s", folder.path, error)
