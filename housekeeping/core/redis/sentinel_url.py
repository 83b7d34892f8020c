"""URLs of a Redis behind Sentinel: ``redis+sentinel://user:password@host1:26379,host2:26379/service/db``.

User and password are those of the data servers. The Sentinels' own are the parameters ``sentinel_username`` and
``sentinel_password``. All other parameters are redis-py's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
EXAMPLE: Final = "redis+sentinel://host1:26379,host2:26379,host3:26379/service/0"
#: Schemes that users try for Redis Cluster.
CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
#: Why and what instead; the end of a sentence about the server.
NO_CLUSTER: Final = f"a Redis Cluster loses messages when it moves slots; use one primary with Sentinel: {EXAMPLE}"

_PORT: Final = 26_379
_HOST: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:\[\]/@,]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """Parsed URL.

    Attributes:
      sentinels: Host and port of each Sentinel.
      sentinel_login: ``username`` and ``password`` for the Sentinels, where given.
      server_url: redis-py's URL of the data server, with the host ``primary``.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    sentinel_login: dict[str, str] = field(repr=False)
    server_url: str = field(repr=False)


def is_sentinel_url(url: str) -> bool:
    """Return whether the URL's scheme is one of `SCHEMES`."""
    return url.partition("://")[0] in SCHEMES


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Return the parts of the URL.

    Raises:
      ValueError: When the URL is malformed. The text says what it should be, and quotes nothing of the URL.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    place, _, path = address.partition("/")
    login, at, hosts = place.rpartition("@")
    sentinels = tuple(_host(each) for each in hosts.split(","))
    service, _, db = path.rstrip("/").partition("/")
    if not service or (service.isdecimal() and not db):
        raise ValueError(f"a URL with the name of Sentinel's service after the hosts, such as {EXAMPLE}")
    if "@" in login or not (db or "0").isdecimal():
        raise ValueError(f"a URL such as {EXAMPLE}")
    parameters, own = [], {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in ("sentinel_username", "sentinel_password"):
            own[name.removeprefix("sentinel_")] = value
        else:
            parameters.append((name, value))
    server = f"{scheme.partition('+')[0]}://{login}{at}primary/{db or 0}?{urlencode(parameters)}"
    return SentinelUrl(sentinels, unquote(service), own, server)


def _host(text: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    port = int((found and found["port"]) or _PORT)
    if found is None or not 0 < port < 65_536:
        raise ValueError(
            "a URL with hosts separated by commas, IPv6 addresses in brackets, such as "
            "redis+sentinel://host1:26379,[::1]:26379/service/0"
        )
    return found["six"] or found["name"], port
