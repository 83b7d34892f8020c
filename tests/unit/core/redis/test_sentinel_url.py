"""URLs of a Redis behind Sentinel."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from housekeeping import Settings
from tests.internals.core import SettingsError, parse_sentinel_url, redis_client

_HOSTS = "a URL with hosts separated by commas, IPv6 addresses in brackets, such as redis+sentinel://"
_SERVICE = "a URL with the name of Sentinel's service after the hosts, such as redis+sentinel://"
_URL = "a URL such as redis+sentinel://"
_CLUSTER = (
    "the URL of another server: a Redis Cluster loses messages when it moves slots; use one primary with Sentinel"
)


@pytest.mark.parametrize(
    ("url", "sentinels", "service", "server"),
    [
        ("redis+sentinel://a:1,b:2/s/3", (("a", 1), ("b", 2)), "s", "redis://primary/3?"),
        ("redis+sentinel://a/s", (("a", 26379),), "s", "redis://primary/0?"),
        ("redis+sentinel://a/s/", (("a", 26379),), "s", "redis://primary/0?"),
        ("redis+sentinel://[::1]:1,b,[fe80::2]/s/0", (("::1", 1), ("b", 26379), ("fe80::2", 26379)), "s", None),
        ("rediss+sentinel://me:a%40b%2F@a/s", (("a", 26379),), "s", "rediss://me:a%40b%2F@primary/0?"),
        ("redis+sentinel://:x@a/my%20service/0?socket_timeout=2", (("a", 26379),), "my service", None),
        ("redis+sentinel://a/7/0", (("a", 26379),), "7", None),
    ],
)
def test_url_is_divided_into_sentinels_service_and_server(
    url: str, sentinels: tuple[tuple[str, int], ...], service: str, server: str | None
) -> None:
    parsed = parse_sentinel_url(url)

    assert (parsed.sentinels, parsed.service) == (sentinels, service)
    assert server in (None, parsed.server_url)


@pytest.mark.parametrize("name", ["REDIS_URL", "BROKER_URL"])
@pytest.mark.parametrize(
    ("url", "should"),
    [
        ("redis+sentinel://a:1", _SERVICE),
        ("redis+sentinel://a:1/", _SERVICE),
        ("redis+sentinel://a:1/0", _SERVICE),
        ("redis+sentinel://a:1//0", _SERVICE),
        ("redis+sentinel://::1:1/s/0", _HOSTS),
        ("redis+sentinel://a:port/s", _HOSTS),
        ("redis+sentinel://a:0/s", _HOSTS),
        ("redis+sentinel://a:65536/s", _HOSTS),
        ("redis+sentinel://a,,b/s", _HOSTS),
        ("redis+sentinel:///s", _HOSTS),
        ("redis+sentinel://a/s/one", _URL),
        ("redis+sentinel://a/s/0/1", _URL),
        ("redis+cluster://a:7000", _CLUSTER),
        ("rediss+cluster://a:7000/0", _CLUSTER),
        ("sentinel://a/s", "a URL such as redis://"),
    ],
)
def test_wrong_url_is_rejected_in_one_line(monkeypatch: pytest.MonkeyPatch, name: str, url: str, should: str) -> None:
    monkeypatch.setenv(f"HOUSEKEEPING_{name}", url)
    with pytest.raises(SettingsError) as refusal:
        Settings.load()

    line = str(refusal.value)
    assert line.startswith(f"HOUSEKEEPING_{name} is '{url}'; it should be {should}")
    assert "\n" not in line


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://me:hunter2@a:1/0",
        "redis+sentinel://me:hunter2/x@a/s/0",
        "redis+sentinel://me:hun@hunter2@a/s/0",
        "redis+sentinel://a/0?sentinel_password=hunter2",
        "redis+cluster://me:hunter2@a:7000",
        "redis+sentinel://me:hunter2@a/s/0?nosuch=1&sentinel_password=hunter2",
    ],
)
def test_rejected_url_is_shown_without_passwords(url: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        redis_client(Settings.load(redis_url=url).require_redis_url())

    assert "hunter2" not in str(refusal.value)


def test_parsed_url_has_no_passwords_in_its_repr() -> None:
    assert "hunter2" not in repr(parse_sentinel_url("redis+sentinel://me:hunter2@a/s?sentinel_password=hunter2"))


def _options(url: str) -> tuple[dict[str, Any], dict[str, Any], str, str]:
    """Return the options of connections to the primary and to a Sentinel, and the classes of both."""
    pool: Any = redis_client(url).connection_pool
    of_sentinel = pool.sentinel_manager.sentinels[0].connection_pool
    classes = (pool.connection_class.__name__, of_sentinel.connection_class.__name__)
    return pool.connection_kwargs, of_sentinel.connection_kwargs, *classes


def test_logins_of_server_and_sentinel_are_separate() -> None:
    of_server, of_sentinel, *_ = _options(
        "redis+sentinel://me:a%40b@h/s/3?sentinel_username=you&sentinel_password=c%2Bd&socket_timeout=2"
    )

    assert [of_server[name] for name in ("username", "password", "db", "socket_timeout")] == ["me", "a@b", 3, 2]
    assert [of_sentinel[name] for name in ("username", "password")] == ["you", "c+d"]


def test_password_of_the_server_is_not_sent_to_sentinels() -> None:
    _, of_sentinel, *_ = _options("redis+sentinel://me:secret@h/s")

    assert not of_sentinel.get("username") and not of_sentinel.get("password")


def test_rediss_encrypts_the_connections_to_server_and_sentinels() -> None:
    of_server, of_sentinel, *encrypted = _options("rediss+sentinel://h/s?ssl_ca_certs=/ca.pem")
    *_, of_plain_server, of_plain_sentinel = _options("redis+sentinel://h/s")

    assert encrypted == ["SentinelManagedSSLConnection", "SSLConnection"]
    assert (of_plain_server, of_plain_sentinel) == ("SentinelManagedConnection", "Connection")
    assert of_server["ssl_ca_certs"] == of_sentinel["ssl_ca_certs"] == "/ca.pem"


def test_unreachable_sentinels_are_one_line_without_passwords() -> None:

    client = redis_client("redis+sentinel://me:hunter2@127.0.0.1:1,127.0.0.1:2/s?sentinel_password=hunter2")
    with pytest.raises(redis.ConnectionError) as error:
        client.ping()

    line = str(error.value)
    assert line.startswith("Sentinel names no primary of the service 's': ")
    assert line.count("Connection refused") == 2
    assert "hunter2" not in line and "\n" not in line


class _Answering:
    """Sentinel that names a primary, or does not answer."""

    def __init__(self, primary: str | None) -> None:
        self._primary = primary

    def sentinel_masters(self) -> Any:
        if self._primary is None:
            raise redis.ConnectionError("away")
        state = {"is_master": True, "is_sdown": False, "is_odown": False, "num-other-sentinels": 2}
        return {"s": {"ip": self._primary, "port": 1, **state}}


def test_sentinel_that_answers_is_asked_first_the_next_time() -> None:
    pool: Any = redis_client("redis+sentinel://a,b,c/s").connection_pool
    manager = pool.sentinel_manager
    one, two, three = _Answering(None), _Answering("p"), _Answering("q")
    manager.sentinels = [one, two, three]

    assert manager.discover_master("s") == ("p", 1)
    assert manager.sentinels == [two, one, three]


def test_threads_that_ask_at_once_lose_no_sentinel() -> None:
    pool: Any = redis_client("redis+sentinel://a,b,c/s").connection_pool
    manager = pool.sentinel_manager
    last = _Answering("p")

    class Meanwhile(_Answering):
        """Sentinel during whose silence another thread finds the last one."""

        def sentinel_masters(self) -> Any:
            manager.sentinels = [last, *(each for each in manager.sentinels if each is not last)]
            return super().sentinel_masters()

    every = [Meanwhile(None), _Answering(None), last]
    manager.sentinels = list(every)

    manager.discover_master("s")

    assert sorted(map(id, manager.sentinels)) == sorted(map(id, every))
