"""Parts of `housekeeping.embedded` that tests use."""

from __future__ import annotations

from housekeeping import embedded
from housekeeping.embedded import server as programs
from housekeeping.embedded import servers
from housekeeping.embedded.server import (
    UnprivilegedUser,
    data_folder,
    find_postgres,
    find_redis,
    identity_of,
    release_shared_memory,
    runnable_postgres,
    spawn,
    stop_all_in,
    unprivileged_user,
)
from housekeeping.embedded.servers import Servers, clear_leftovers, create_folder
