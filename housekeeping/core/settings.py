"""Settings from the environment and a ``.env`` file, validated before anything starts.

The error of each type describes the right form in words. URLs are checked by urlsplit and libpq, not by pydantic's URL
types: ``postgresql:///database`` is valid here, and an unescaped ``@`` in a password is not.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import ipaddress
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    model_validator,
)

from housekeeping.core.errors import SettingsError
from housekeeping.core.logs import is_secret, mask_secrets
from housekeeping.core.urls import (
    AMQP,
    url_type,
    well_formed,
    well_formed_each,
    well_formed_for_libpq,
    well_formed_server,
    without_login,
)

#: Words in place of names of families.
_KEYWORDS: Final[dict[str, tuple[str, ...]]] = {"all": ("all",), "none": ()}


def _zone(value: Any) -> Any:
    try:
        return ZoneInfo(value) if isinstance(value, str) else value
    except (KeyError, ValueError, OSError):
        raise ValueError("a time zone such as UTC or Europe/Berlin") from None


def _parsed(text: str, or_else: str = "") -> Any:
    """Parse a JSON text. `or_else` is the start of the error: the other forms that are allowed."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{or_else}JSON ({error})") from None


def json_object(keys: str) -> Any:
    """Return the type of a JSON object.

    Parameters:
      keys: What its keys are, with an example.
    """

    def read(value: Any) -> Any:
        parsed = _parsed(value) if isinstance(value, str) else value
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
    return _parsed(text, f"{items} separated by commas, or ")


def _urls(value: Any) -> Any:
    # Split only before a scheme: libpq's URLs can contain commas between hosts.
    return _listed(value, "URLs", r"\s*,\s*(?=\w+://)")


def _replicas(value: Any) -> Any:
    """Parse a list of URLs, or a JSON object of such lists by database."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return _urls(value)
    return {name: _urls(urls) for name, urls in _parsed(value, "URLs separated by commas, or ").items()}


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


def _outside(example: str) -> Any:
    """Return the type of a service's URL, which is a secret: anyone with it can pose as the installation."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            parts = urlsplit(value) if well_formed(value) else None
            is_plain = value.isascii() and value.isprintable() and " " not in value
            is_http = parts is not None and parts.scheme in ("http", "https")
            if not (is_plain and is_http and parts and parts.hostname) or parts.username:
                raise ValueError(f"a URL such as {example}")
        return value

    return BeforeValidator(check)


#: How the secret of the webhook begins. The rest is base64.
SECRET_PREFIX: Final = "whsec_"
_SIGNING_SECRET: Final = f"{SECRET_PREFIX} and 24 to 64 random bytes in base64 (openssl rand -base64 32)"


def _signing_secret(value: Any) -> Any:
    if isinstance(value, str):
        prefix, _, encoded = value.partition("_")
        try:
            key = base64.b64decode(encoded, validate=True) if f"{prefix}_" == SECRET_PREFIX else b""
        except binascii.Error:
            key = b""
        if not 24 <= len(key) <= 64:
            raise ValueError(_SIGNING_SECRET)
    return value


def _erasure_key(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[!-+\--~]{32,200}(,[!-+\--~]{32,200})*", value):
        raise ValueError("32 to 200 random letters, digits and signs (openssl rand -base64 32); old ones after commas")
    return value


def _families(value: Any) -> Any:
    """Parse names of families; ``all`` becomes the tuple of that word, ``none`` the empty tuple."""
    if value is None:
        return None
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
NOT_NULL: Final = BeforeValidator(_not_null)
HEADER: Final = _matching(r"[A-Za-z][A-Za-z0-9-]{0,63}", "the name of a header, such as X-Forwarded-User")
NETWORKS: Final = BeforeValidator(lambda value: _listed(value, "networks"))
TOKEN: Final = _matching(r"[!-~]{16,200}", "16 to 200 random letters, digits and signs")
POSTGRES: Final = url_type(
    "postgresql://user:password@host:5432/database", "postgresql", "postgres", well_formed=well_formed_for_libpq
)
REDIS: Final = url_type("redis://:password@host:6379/0", "redis", "rediss", "unix", well_formed=well_formed_server)
BROKER: Final = url_type(
    "redis://:password@host:6379/0 or amqp://user:password@host:5672/vhost",
    *("redis", "rediss", "unix", "amqp", "amqps"),
    well_formed=well_formed_each,
)
SENTRY: Final = url_type("https://key@host/1", "http", "https", well_formed=well_formed_server)
PING: Final = _outside("https://hc-ping.com/00000000-0000-0000-0000-000000000000")
WEBHOOK: Final = _outside("https://alerts.example.com/housekeeping")
STORE: Final = url_type(
    "s3://bucket/prefix or file:///folder", "file", "s3", "gs", "az", "memory", well_formed=well_formed
)

_MAX_DURATION_S: Final = 7 * 86_400  # a week; a longer time is probably in the wrong unit
_MAX_AGE_S: Final = 100 * 366 * 86_400  # a hundred years; a greater age may be no date in PostgreSQL
#: Most rows or refs of one transaction, in settings, declarations, purges and overrides. A batch locks its rows until
#: it commits, and a crash undoes it.
LARGEST_BATCH: Final = 10_000

_BatchSize = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]


class ThrottleSettings(BaseModel):
    """The key ``gates`` of a worker: its throttles. A missing key keeps the default, null disables that throttle."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    replication_lag_s: Annotated[float, Field(gt=0)] | None = None
    waiting_locks: Annotated[int, Field(ge=0)] | None = None
    vacuum: bool = False
    batch_s: Annotated[float, Field(gt=0)] | None = None
    wal_mb_per_s: Annotated[float, Field(gt=0)] | None = None
    slot_lag_mb: Annotated[float, Field(gt=0)] | None = None
    #: Dotted name of a function that returns None, or the reason to wait as text.
    custom: Annotated[str, FUNCTION] | None = None
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 0


class BreakerSettings(BaseModel):
    """The key ``breaker`` of a worker. A missing key keeps the default, null disables that limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    times_history: Annotated[float, Field(ge=1)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    action: Literal["alert", "limit", "stop"] = "alert"


class WorkerSettings(BaseModel):
    """One worker in ``HOUSEKEEPING_WORKERS``; a missing key keeps the worker's default.

    A declaration has the same bounds. A worker accepts only the keys that apply to it, and rejects the others.
    """

    # Strict, because JSON has types: true is no batch size.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = True
    schedule: str | None = None
    batch_size: Annotated[_BatchSize | None, NOT_NULL] = None
    max_runtime_s: Annotated[Annotated[float, Field(gt=0, le=_MAX_DURATION_S)] | None, NOT_NULL] = None
    #: Most rows per second; None for no limit.
    max_rows_per_s: Annotated[float, Field(gt=0)] | None = None
    #: Pause after each batch, as a multiple of its duration.
    rest: Annotated[Annotated[float, Field(ge=0, le=1000)] | None, NOT_NULL] = None
    stale_after_s: Annotated[Annotated[float, Field(gt=0, le=_MAX_AGE_S)] | None, NOT_NULL] = None
    # A lease shorter than 3 s cannot be renewed in time.
    lease_ttl_s: Annotated[Annotated[float, Field(ge=3, le=_MAX_DURATION_S)] | None, NOT_NULL] = None
    page_size: Annotated[_BatchSize | None, NOT_NULL] = None
    max_projects: Annotated[Annotated[int, Field(ge=1)] | None, NOT_NULL] = None
    max_deletes: Annotated[Annotated[int, Field(ge=1)] | None, NOT_NULL] = None
    git_batch_size: Annotated[_BatchSize | None, NOT_NULL] = None
    log_records: Annotated[bool | None, NOT_NULL] = None
    #: Alert thresholds by name; null disables an alert.
    alarms: Annotated[dict[str, Annotated[float, Field(ge=0)] | None] | None, NOT_NULL] = None
    #: Seconds that a batch should take; None keeps the batch size fixed.
    target_batch_s: Annotated[float, Field(gt=0, le=60)] | None = None
    gates: Annotated[ThrottleSettings | None, NOT_NULL] = None
    breaker: Annotated[BreakerSettings | None, NOT_NULL] = None
    #: Name of the worker's database; all workers of a built-in family have the same one.
    database: Annotated[str | None, NOT_NULL] = None
    table: Annotated[Annotated[str, TABLE] | None, NOT_NULL] = None
    tables: Annotated[dict[str, Annotated[str, TABLE]] | None, NOT_NULL] = None
    #: Requested after each run that did work; None for no pings.
    ping_url: Annotated[SecretStr, PING] | None = None


class ObjectStoreSettings(BaseModel):
    """One location of ``HOUSEKEEPING_OBJECT_STORES``: a URL alone, or an object with these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: Annotated[str, STORE]
    #: Prefix of every object's key, after the path of the URL.
    prefix: str = ""
    enabled: bool = True
    #: Options of the store's client by their own names (``aws_access_key_id``, ``endpoint``, ...); may be secret.
    options: Annotated[dict[str, str], Field(repr=False)] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_url_alone(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


#: How the environment variables of the settings begin.
PREFIX: Final = "HOUSEKEEPING_"
_MAX_SHOWN: Final = 200  # characters of a wrong value
#: Variables of the embedded servers and of the tests.
_OTHER_PREFIXES: Final = ("HOUSEKEEPING_TEST_", "HOUSEKEEPING_EMBEDDED")


def variable(field: str) -> str:
    """Return the variable of a field of `Settings`."""
    return f"{PREFIX}SCHEMA" if field == "schema_name" else f"{PREFIX}{field.upper()}"


def values_in_file(path: Path) -> dict[str, str | None]:
    """Return what a ``.env`` file sets. Malformed lines without the prefix are ignored."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    try:
        with path.open(encoding="utf-8") as stream:
            entries = list(parse_stream(stream))
    except UnicodeDecodeError:
        raise SettingsError(f"{path} cannot be read; it should be UTF-8 text") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.error and PREFIX in entry.original.string.upper():
            raise SettingsError(f"{path}, line {entry.original.line} is malformed; it should be NAME=value")
    return dotenv_values(path, encoding="utf-8")


def reject_unknown(names: Iterable[str], fields: Iterable[str], place: str = "") -> None:
    """Raise SettingsError for a name with the library's prefix that is no setting.

    Parameters:
      fields: The fields of `Settings`.
      place: Where the names come from, for the error.
    """
    known = [variable(field).removeprefix(PREFIX) for field in fields]
    for name in sorted(names):
        setting = name.upper().removeprefix(PREFIX)  # names in lower case are read as well
        if not name.upper().startswith(PREFIX) or setting in known or name.upper().startswith(_OTHER_PREFIXES):
            continue
        near = difflib.get_close_matches(setting, known, n=1)
        all_settings = ", ".join(f"{PREFIX}{each}" for each in known)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"the settings are {all_settings}"
        raise SettingsError(f"{name} is not a setting{place}; {hint}")


#: Plain words for types of errors that pydantic describes in terms of Python.
_EXPECTED: Final = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "model_type": "a JSON object",
    "dict_type": "a JSON object",
    "tuple_type": "a list of URLs",
}
#: Keys of a worker that are objects.
_NESTED: Final[dict[str, type[BaseModel]]] = {"gates": ThrottleSettings, "breaker": BreakerSettings}
#: Parts of the place of an error that are no key of a setting.
_NO_KEYS: Final = ("[key]", "[list]", "[object]")


def one_line(error: pydantic.ValidationError) -> str:
    """Describe the first error: name, value and expected form."""
    first = error.errors(include_url=False)[0]
    field, *path = (part for part in first["loc"] if part not in _NO_KEYS)
    where = variable(str(field)) + "".join(f"[{json.dumps(part)}]" for part in path)
    if first["type"] == "extra_forbidden":
        model = WorkerSettings if field == "workers" else ObjectStoreSettings
        keys = (_NESTED[str(path[1])] if len(path) == 3 else model).model_fields
        near = difflib.get_close_matches(str(path[-1]), keys, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
        return f"{where} is not a valid key; {hint}"
    expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, ").removeprefix("Input should be "))
    secret = any(is_secret(str(part)) for part in (field, *path[-1:]))
    return f"{where} is {'***' if secret else _shown(first['input'])}; it should be {expected}"


def _shown(value: Any) -> str:
    """Return the value on one line, without passwords."""
    text = without_login(value if isinstance(value, str) else json.dumps(value, default=str))
    if not isinstance(value, str):
        return text
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


FILE: Final = ".env"
#: Name of the database of ``HOUSEKEEPING_DATABASE_URL``.
MAIN: Final = "main"

_Urls = tuple[Annotated[str, POSTGRES], ...]


class Settings(BaseModel):
    """All settings; the variable of a field is ``HOUSEKEEPING_`` and its name in capitals.

    Raises:
      SettingsError: From `load`, one line about the first wrong value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True)

    database_url: Annotated[str, POSTGRES] | None = None
    #: URLs of further databases by name. `database_url` is the database ``main``.
    databases: Annotated[
        dict[Annotated[str, DATABASE], Annotated[str, POSTGRES]],
        json_object('database, such as {"ci": "postgresql://host/ci"}'),
    ] = {}
    #: Whether connections to PostgreSQL are direct; ``auto`` tests it.
    prepared_statements: Literal["auto", "on", "off"] = "auto"
    #: Read by actors whose ``data_consistency`` allows it: replicas of ``main``, or a list for each database by name.
    replica_urls: Annotated[
        Annotated[_Urls, Tag("[list]")] | Annotated[dict[str, _Urls], Tag("[object]")],
        Discriminator(lambda value: "[object]" if isinstance(value, dict) else "[list]"),
        BeforeValidator(_replicas),
    ] = ()
    redis_url: Annotated[str, REDIS] | None = None
    broker_url: Annotated[str, BROKER] | None = None
    rabbitmq_queue_type: Literal["classic", "quorum"] = "classic"
    namespace: Annotated[str, KEY] = "housekeeping"
    schema_name: Annotated[str, SCHEMA] = "housekeeping"
    catch_up: Literal["latest", "none"] = "latest"
    grace_s: Annotated[float, Field(ge=1, le=600)] = 30  # promise R5
    timezone: Annotated[ZoneInfo, BeforeValidator(_zone)] = ZoneInfo("UTC")
    log_format: Literal["json", "console"] | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    sentry_dsn: Annotated[str, SENTRY] | None = None
    #: Requested after each tick of the scheduler.
    ping_url: Annotated[SecretStr, PING] | None = None
    #: Receiver of the beginning and the end of each alert, and the secret that signs them.
    alert_webhook_url: Annotated[SecretStr, WEBHOOK] | None = None
    alert_webhook_secret: Annotated[SecretStr, BeforeValidator(_signing_secret)] | None = None
    #: Secret that turns the keys of erased subjects into HMACs, and signs receipts; former ones after commas.
    erasure_key: Annotated[SecretStr, BeforeValidator(_erasure_key)] | None = None
    #: Time after which an erasure that was requested and is not done raises an alert.
    erasure_late_s: Annotated[float, Field(gt=0, le=_MAX_AGE_S)] = 86_400
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    scheduler_metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    metrics_host: str = "127.0.0.1"
    #: Secret that logs in to the dashboard.
    web_token: Annotated[str, TOKEN] | None = Field(default=None, repr=False)
    #: Secret that logs in to the dashboard without the right to change anything.
    web_read_token: Annotated[str, TOKEN] | None = Field(default=None, repr=False)
    #: Header in which a trusted proxy names the user, for the action log.
    web_user_header: Annotated[str, HEADER] | None = None
    #: Addresses or networks of the proxies whose headers are read. None, because everyone on a trusted machine can send
    #: these headers.
    web_trusted_proxies: Annotated[tuple[Annotated[str, AfterValidator(_network)], ...], NETWORKS] = ()
    #: Whether everyone who reaches a dashboard on a loopback address may read it without a login.
    web_open_to_read: bool = False
    #: Whether browsers reach the dashboard by TLS only, so that its cookie is Secure.
    web_https: bool = False
    object_stores: Annotated[
        dict[str, ObjectStoreSettings], json_object('location, such as {"uploads": "s3://bucket/prefix"}')
    ] = {}
    repositories_root: Path | None = None
    #: Active families of built-in workers: ("all",) or their names. None for those whose tables fit.
    built_in: Annotated[tuple[str, ...] | None, BeforeValidator(_families)] = None
    #: Modules with the application's own sweeps.
    sweeps: Annotated[tuple[str, ...], BeforeValidator(_modules)] = ()
    #: Tables that keep their rows, and why; in addition to those of `Kept` in these modules.
    kept: Annotated[dict[str, str], json_object('table, such as {"country": "reference data"}')] = {}
    workers: Annotated[
        dict[str, WorkerSettings],
        json_object('worker name, such as {"user_status_cleanup.batch": {"batch_size": 50}}'),
    ] = {}

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read settings from keyword arguments, then the environment, then the ``.env`` file.

        Raises:
          SettingsError: If a value is wrong, an argument or a ``HOUSEKEEPING_`` variable is no setting, or the file
            cannot be read.
        """
        reject_unknown(os.environ, cls.model_fields)
        in_file = values_in_file(Path(FILE))
        reject_unknown(in_file, cls.model_fields, f" (in {FILE})")
        reject_unknown(map(variable, overrides), cls.model_fields)
        # An empty variable counts as unset, also beside a value in the file.
        given = {name.upper(): value for source in (in_file, os.environ) for name, value in source.items() if value}
        from_variables = {name: given[variable(name)] for name in cls.model_fields if variable(name) in given}
        try:
            settings = cls(**from_variables | overrides)
        except pydantic.ValidationError as error:
            raise SettingsError(one_line(error)) from None
        if settings.databases and settings.database_url is None:
            raise SettingsError(
                f"{PREFIX}DATABASES is set without {PREFIX}DATABASE_URL; set this too: it is the database {MAIN}"
            )
        if settings.alert_webhook_url is not None and settings.alert_webhook_secret is None:
            raise SettingsError(
                f"{PREFIX}ALERT_WEBHOOK_URL is set without {PREFIX}ALERT_WEBHOOK_SECRET, which signs what is sent; set "
                f"this too: {_SIGNING_SECRET}"
            )
        if settings.web_read_token is not None and settings.web_read_token == settings.web_token:
            raise SettingsError(
                f"{PREFIX}WEB_READ_TOKEN is {PREFIX}WEB_TOKEN; it should be another one, because it only allows reading"
            )
        if settings.web_user_header is not None and not settings.web_trusted_proxies:
            raise SettingsError(
                f"{PREFIX}WEB_USER_HEADER is set without {PREFIX}WEB_TRUSTED_PROXIES; set this too: it should be the "
                "address of the proxy that sends the header, such as 10.0.0.5"
            )
        for name in settings.replicas:
            if name not in settings.database_names:
                raise SettingsError(
                    f"{PREFIX}REPLICA_URLS names the database {name!r}; the databases are "
                    f"{', '.join(settings.database_names)} ({PREFIX}DATABASES)"
                )
        return settings

    def __repr__(self) -> str:
        return mask_secrets(super().__repr__())

    __str__ = __repr__

    def require_database_url(self) -> str:
        """Return the database's URL.

        Raises:
          SettingsError: If it is not set.
        """
        return self.database_url or _missing(
            "DATABASE_URL", "a URL such as postgresql://user:password@host:5432/database"
        )

    def require_erasure_key(self) -> SecretStr:
        """Return the secret of erasures.

        Raises:
          SettingsError: If it is not set.
        """
        return self.erasure_key or _missing("ERASURE_KEY", "a secret that openssl rand -base64 32 prints")

    @property
    def database_names(self) -> tuple[str, ...]:
        """The names of all databases, `MAIN` first."""
        return (MAIN, *self.databases)

    def database_urls(self) -> dict[str, str]:
        """Return the URL of each database by name, `MAIN` first.

        Raises:
          SettingsError: If the database's URL is not set.
        """
        return {MAIN: self.require_database_url(), **self.databases}

    @property
    def replicas(self) -> dict[str, tuple[str, ...]]:
        """The URLs of the replicas by database."""
        if isinstance(self.replica_urls, dict):
            return self.replica_urls
        return {MAIN: self.replica_urls} if self.replica_urls else {}

    def require_redis_url(self) -> str:
        """Return Redis's URL.

        Raises:
          SettingsError: If it is not set.
        """
        hint = ""
        if self.on_rabbitmq:
            hint = "; RabbitMQ carries only the messages, and leases and keys need Redis"
        elif self.database_url is not None and self.broker_url is None:
            hint = "; without Redis (housekeeping serve) there are no messages"
        return self.redis_url or _missing("REDIS_URL", f"a URL such as redis://host:6379/0{hint}")

    @property
    def on_rabbitmq(self) -> bool:
        """Whether the broker is RabbitMQ, and not Redis."""
        return (self.broker_url or "").startswith(AMQP)


def _missing(name: str, form: str) -> NoReturn:
    raise SettingsError(f"{PREFIX}{name} is not set; it should be {form}")
