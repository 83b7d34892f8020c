"""Types of settings: URLs, names, JSON. The error of each type describes the right form in words.

URLs are checked by urlsplit and libpq, not by pydantic's URL types: ``postgresql:///database`` is valid here, and an
unescaped ``@`` in a password is not.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import psycopg2
from psycopg2.extensions import parse_dsn
from pydantic import AfterValidator, BeforeValidator

from housekeeping.core.redis import sentinel_url

_AMQP: Final = ("amqp://", "amqps://")
#: Words in place of names of families.
_KEYWORDS: Final[dict[str, tuple[str, ...]]] = {"all": ("all",), "none": (), "true": ("all",), "false": ()}
_ESCAPES: Final = "in a user or password, / is written %2F, : %3A, @ %40"


def _url(example: str, *schemes: str, well_formed: Callable[[str], bool]) -> Any:
    def check(value: str) -> str:
        scheme, _, rest = value.partition("://")
        if scheme in sentinel_url.CLUSTER_SCHEMES and "redis" in schemes:
            raise ValueError(f"the URL of another server: {sentinel_url.NO_CLUSTER}")
        if scheme in sentinel_url.SCHEMES and "redis" in schemes:
            sentinel_url.parse_sentinel_url(value)
            return value
        if scheme not in schemes or not rest or not well_formed(value):
            raise ValueError(f"a URL such as {example} ({_ESCAPES})")
        return value

    return AfterValidator(check)


# A malformed URL is rejected here, because later errors would quote the part of its password that was parsed as a host
# or port.


def _well_formed(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.port != 0 and parts.netloc.count("@") < 2
    except ValueError:
        return False


def _well_formed_each(urls: str) -> bool:
    """Check the URLs of several RabbitMQ nodes, separated by semicolons, or one other URL."""
    if not urls.startswith(_AMQP):
        return _well_formed(urls)
    return all(url.startswith(_AMQP) and url not in _AMQP and _well_formed(url) for url in urls.split(";"))


def _well_formed_for_libpq(url: str) -> bool:
    try:
        parameters = parse_dsn(url)
    except psycopg2.ProgrammingError:
        return False
    ports = parameters.get("port", "").split(",")
    return all(port.isdecimal() or not port for port in ports) and "@" not in parameters.get("host", "")


def _zone(value: Any) -> Any:
    try:
        return ZoneInfo(value) if isinstance(value, str) else value
    except (KeyError, ValueError, OSError):
        raise ValueError("a time zone such as UTC or Europe/Berlin") from None


def json_object(keys: str) -> Any:
    """Return the type of a JSON object.

    Parameters:
      keys: What its keys are, with an example.
    """

    def read(value: Any) -> Any:
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise ValueError(f"JSON ({error})") from None
        if not isinstance(parsed, dict):
            raise ValueError(f"a JSON object by {keys}")
        return parsed

    return BeforeValidator(read)


def _matching(pattern: str, description: str) -> Any:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(description)
        return value

    return AfterValidator(check)


def _listed(value: Any, items: str, comma: str = r"\s*,\s*") -> Any:
    """Split a text at its commas, or parse it as a JSON list; return any other value as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip(" ,")
    if not text.startswith("["):
        return [item for item in re.split(comma, text) if item]
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{items} separated by commas, or JSON ({error})") from None


def _urls(value: Any) -> Any:
    # Split only before a scheme: libpq's URLs can contain commas between hosts.
    return _listed(value, "URLs", r"\s*,\s*(?=\w+://)")


def _replicas(value: Any) -> Any:
    """Parse a list of URLs, or a JSON object of such lists by database."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return _urls(value)
    try:
        return {name: _urls(urls) for name, urls in json.loads(value).items()}
    except json.JSONDecodeError as error:
        raise ValueError(f"URLs separated by commas, or JSON ({error})") from None


def _modules(value: Any) -> Any:
    names = _listed(value, "names of modules")
    if any(not all(part.isidentifier() for part in str(name).split(".")) for name in names):
        raise ValueError("names of modules separated by commas, such as shop.sweeps,shop.archive")
    return names


def _network(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value))
    except ValueError:
        raise ValueError("addresses or networks separated by commas, such as 10.0.0.5,192.168.7.0/24") from None


def _families(value: Any) -> Any:
    """Parse names of families; ``all`` becomes the tuple of that word, ``none`` the empty tuple."""
    if value is None or isinstance(value, bool):  # the setting used to be true or false
        return None if value is None else _KEYWORDS[str(value).lower()]
    names = _listed(value, "names of families")
    if len(names) == 1 and names[0] in _KEYWORDS:
        return _KEYWORDS[names[0]]
    if any(not isinstance(name, str) or name in _KEYWORDS or not name.isidentifier() for name in names):
        raise ValueError("all, none, or families separated by commas, such as user_status_cleanup,bulk_imports")
    return tuple(names)


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("a value; leave the key out to keep the default")
    return value


KEY: Final = _matching(r"[A-Za-z0-9_.-]{1,64}", "at most 64 letters, digits and the characters _ . -")
SCHEMA: Final = _matching(r"[a-z_][a-z0-9_]{0,62}", "a plain PostgreSQL name: small letters, digits and _")
TABLE: Final = _matching(r"([A-Za-z_][\w$]{0,62}\.)?[A-Za-z_][\w$]{0,62}", "a table's name, or schema.table")
FUNCTION: Final = _matching(
    r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", "a function's dotted name, such as shop.health.reason_to_wait"
)
DATABASE: Final = _matching(
    r"(?!main$)[A-Za-z][A-Za-z0-9_-]{0,39}",
    "at most 40 letters, digits, _ and -; main is the database of HOUSEKEEPING_DATABASE_URL",
)
REPLICAS: Final = BeforeValidator(_replicas)
MODULES: Final = BeforeValidator(_modules)
FAMILIES: Final = BeforeValidator(_families)
NOT_NULL: Final = BeforeValidator(_not_null)
ZONE: Final = BeforeValidator(_zone)
HEADER: Final = _matching(r"[A-Za-z][A-Za-z0-9-]{0,63}", "the name of a header, such as X-Forwarded-User")
NETWORK: Final = AfterValidator(_network)
NETWORKS: Final = BeforeValidator(lambda value: _listed(value, "networks"))
TOKEN: Final = _matching(r"[!-~]{16,200}", "16 to 200 random letters, digits and signs")
POSTGRES: Final = _url(
    "postgresql://user:password@host:5432/database", "postgresql", "postgres", well_formed=_well_formed_for_libpq
)
REDIS: Final = _url("redis://:password@host:6379/0", "redis", "rediss", "unix", well_formed=_well_formed)
BROKER: Final = _url(
    "redis://:password@host:6379/0 or amqp://user:password@host:5672/vhost",
    *("redis", "rediss", "unix", "amqp", "amqps"),
    well_formed=_well_formed_each,
)
SENTRY: Final = _url("https://key@host/1", "http", "https", well_formed=_well_formed)
STORE: Final = _url(
    "s3://bucket/prefix or file:///folder", "file", "s3", "gs", "az", "memory", well_formed=_well_formed
)
