"""Redis servers that become replicas while clients are connected to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.internals.core import redis_client
from tests.internals.embedded import embedded


class Address:
    """Address that leads to one of two servers, like a host name: here a link to a socket."""

    def __init__(self, link: Path, *servers: Any) -> None:
        self._link = link
        self.servers = servers
        self.lead_to(0)

    @property
    def url(self) -> str:
        return f"unix://{self._link}"

    def lead_to(self, number: int) -> None:
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(
            redis.Redis.from_url(self.servers[number].redis_url).connection_pool.connection_kwargs["path"]
        )


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    with embedded.start(postgres=False) as first, embedded.start(postgres=False) as second:
        yield Address(tmp_path / "redis.sock", first, second)


@pytest.mark.parametrize(
    "write",
    [
        lambda client: client.set("a", 1),
        lambda client: client.register_script("return redis.call('set', KEYS[1], 1)")(keys=["a"]),
        lambda client: client.pipeline().set("a", 1).execute(),
    ],
)
def test_client_leaves_a_server_that_has_become_a_replica(
    address: Address, write: Callable[[redis.Redis], object]
) -> None:
    first, second = (redis.Redis.from_url(server.redis_url) for server in address.servers)
    client = redis_client(address.url)
    write(client)

    first.replicaof("127.0.0.1", "1")
    address.lead_to(1)
    with pytest.raises(redis.ConnectionError, match="is not a primary, but a replica"):
        write(client)
    write(client)

    assert second.get("a") == b"1"
    for each in (first, second, client):
        each.close()
