"""URLs of servers: their form, the parts of a Sentinel's, and what may be shown of a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import psycopg2
from psycopg2.extensions import parse_dsn
from pydantic import AfterValidator

from housekeeping.core.logs import mask_secrets

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


AMQP: Final = ("amqp://", "amqps://")
#: The part of a login that is shown: the scheme, and a user without characters that should have been escaped.
_LOGIN: Final = re.compile(r"(?P<scheme>[\s\[{\"]*[a-z][a-z0-9+.-]*://)(?:[\w.~%+-]*:)?", re.IGNORECASE)
#: A limit of PostgreSQL without a unit that ends almost every statement.
_TOO_SHORT: Final = re.compile(r"((?:statement|lock)_timeout)=([1-9]\d{0,2})(?!\w)")
_ESCAPES: Final = "in a user or password, / is written %2F, : %3A, @ %40, a space %20"


def url_type(example: str, *schemes: str, well_formed: Callable[[str], bool]) -> Any:
    def check(value: str) -> str:
        scheme, _, rest = value.partition("://")
        if scheme in CLUSTER_SCHEMES and "redis" in schemes:
            raise ValueError(f"the URL of another server: {NO_CLUSTER}")
        if scheme in SCHEMES and "redis" in schemes:
            parse_sentinel_url(value)
            return value
        if scheme not in schemes or not rest or not well_formed(value):
            raise ValueError(f"a URL such as {example} ({_ESCAPES})")
        return value

    return AfterValidator(check)


# A malformed URL is rejected here, because later errors would quote the part of its password that was parsed as a host
# or port.


def well_formed(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.port != 0 and parts.netloc.count("@") < 2
    except ValueError:
        return False


def well_formed_server(url: str) -> bool:
    """Check the URL of a server that may have a login, of which nothing may be read as a host, a path or a query."""
    if not well_formed(url) or re.search(r"\s", url):
        return False
    parts = urlsplit(url)
    return "@" not in parts.path + ("" if "@" in parts.netloc else parts.query + parts.fragment)


def well_formed_each(urls: str) -> bool:
    """Check the URLs of several RabbitMQ nodes, separated by semicolons, or one other URL."""
    if not urls.startswith(AMQP):
        return well_formed_server(urls)
    return all(url.startswith(AMQP) and url not in AMQP and well_formed_server(url) for url in urls.split(";"))


def well_formed_for_libpq(url: str) -> bool:
    try:
        parameters = parse_dsn(url)
    except psycopg2.ProgrammingError:
        return False
    if (short := _TOO_SHORT.search(parameters.get("options", ""))) is not None:
        name, number = short.groups()
        raise ValueError(f"a URL in which {name} has a unit, such as {name}%3D30s: {number} is in milliseconds")
    # A slash in a password ends the login for libpq, which reads what follows as the name of the database.
    authority, _, path = url.partition("://")[2].partition("/")
    if "@" in path.partition("?")[0] or re.search(r"\s", authority):
        return False
    ports = parameters.get("port", "").split(",")
    return all(port.isdecimal() or not port for port in ports) and "@" not in parameters.get("host", "")


def without_login(text: str) -> str:
    """Mask what may be a password of a wrong URL, which may be any text between a colon and the last @.

    The password may have characters that end a URL, and the scheme may be missing.
    """
    before, at, after = text.rpartition("@")
    start = _LOGIN.match(before)
    if at and ":" in before[start.end("scheme") if start else 0 :]:
        text = f"{start[0] if start else ''}***@{after}"
    return mask_secrets(text)
