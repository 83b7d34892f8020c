"""Sentinel and its servers behind TLS (``rediss+sentinel://``). The embedded server cannot encrypt."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from housekeeping import Settings
from tests.internals.core import redis_client
from tests.internals.doctor import servers as redis_server
from tests.sentinel_servers import Encryption, SentinelServers, sentinel_servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def encryption(tmp_path_factory: pytest.TempPathFactory) -> Encryption:
    programs = [Path(found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name))]
    able = [each for each in programs if b"libssl" in each.read_bytes()]
    if not able or not shutil.which("openssl"):
        pytest.skip("needs openssl, and a redis-server or valkey-server that is built with TLS")
    folder = tmp_path_factory.mktemp("tls")
    made = Encryption(able[0], folder / "server.crt", folder / "server.key")
    subject = ["-subj", "/CN=tests", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", *files, *subject], check=True, capture_output=True
    )
    return made


@pytest.fixture(scope="module")
def servers(encryption: Encryption) -> Iterator[SentinelServers]:
    with sentinel_servers(password="s3cret", tls=encryption) as running:
        yield running


def test_connections_to_wrong_or_plain_servers_are_refused(servers: SentinelServers, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-keyout", "/dev/null", "-out", str(stranger)]
        + ["-subj", "/CN=stranger"],
        check=True,
        capture_output=True,
    )
    address, _, parameters = servers.url.partition("?")
    trusted = servers.url.rpartition("=")[2]

    for url in (servers.url.replace(trusted, str(stranger)), f"{address.replace('rediss', 'redis')}?{parameters}"):
        with redis_client(url.partition("&ssl_ca_certs")[0] if "redis+" in url else url) as client:
            with pytest.raises(redis.ConnectionError) as error:
                client.ping()
            assert "s3cret" not in str(error.value)


def test_client_follows_a_failover_behind_tls(servers: SentinelServers, settings: Settings) -> None:
    with redis_client(servers.url) as client:
        client.set("kept", "1")
        servers.await_replication()
        behind = settings.model_copy(update={"redis_url": servers.url})
        said = [each.text for each in redis_server.examine_redis(behind, {}) if each.subject == "sentinel"]
        assert "1 replica, 3 of 3 Sentinels answer" in said[0]

        before = servers.primary
        servers.kill(before)
        servers.await_failover(before)

        assert client.get("kept") == b"1"
