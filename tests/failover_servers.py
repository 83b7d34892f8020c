"""``--topology=failover``: a primary and its synchronous replica, which the URL names both, the replica first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
from psycopg2.extensions import parse_dsn

from tests.integration.database.replicas.standby import Standby


@contextmanager
def synchronous_pair(primary_url: str) -> Iterator[str]:
    """Give the primary a replica that each commit waits for; yield the URL with both hosts.

    Each new connection finds at the replica that it accepts no writes, and takes the primary.
    """
    # A short path, because the name of a socket may not be long.
    replica = Standby(primary_url, Path(tempfile.mkdtemp(prefix="housekeeping-pair-", dir="/tmp")))
    try:
        make_synchronous(primary_url)
        hosts = ",".join(parse_dsn(url)["host"] for url in (replica.url, primary_url))
        yield f"postgresql://postgres@/postgres?host={hosts}&target_session_attrs=read-write"
    finally:
        replica.remove()


def make_synchronous(primary_url: str) -> None:
    """Let each commit wait for a replica."""
    with closing(psycopg2.connect(primary_url)) as primary:
        primary.autocommit = True
        with primary.cursor() as cursor:
            cursor.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            cursor.execute("SELECT pg_reload_conf()")
