"""Real PostgreSQL and Redis-compatible servers for a trial or a test, gone without a trace afterwards.

::

    from housekeeping import embedded

    with embedded.start() as servers:
        psycopg2.connect(servers.database_url)
        redis.Redis.from_url(servers.redis_url)

The servers listen on unix sockets in a temporary folder of their own, never on a port. They are
run by a *keeper*: a small process that holds a pipe to the one that called `start` and, when that
pipe closes for whatever reason (SIGKILL included), stops the servers and removes the folder. When
the keeper itself was killed, the next `start` clears what it left.

Servers installed on the machine (PostgreSQL 13, Redis 6 or Valkey, or newer) come before those of
the ``embedded`` extra; ``HOUSEKEEPING_EMBEDDED=system`` or ``wheels`` allows only the one or the other.
"""

from __future__ import annotations

from housekeeping.embedded.servers import Servers, start

__all__ = ["Servers", "start"]
