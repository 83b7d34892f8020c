"""Settings from the environment and a ``.env`` file, validated before anything starts."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

import pydantic
from dotenv.parser import parse_stream
from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from housekeeping.core.errors import SettingsError
from housekeeping.core.sanitize import mask_secrets
from housekeeping.core.setting_types import (
    BROKER,
    DATABASE,
    FAMILIES,
    FUNCTION,
    HEADER,
    KEY,
    MODULES,
    NETWORK,
    NETWORKS,
    NOT_NULL,
    POSTGRES,
    REDIS,
    REPLICAS,
    SCHEMA,
    SENTRY,
    STORE,
    TABLE,
    TOKEN,
    ZONE,
    json_object,
)

PREFIX: Final = "HOUSEKEEPING_"
FILE: Final = ".env"
#: Name of the database of ``HOUSEKEEPING_DATABASE_URL``.
MAIN: Final = "main"
_MAX_SHOWN: Final = 200  # characters of a wrong value
#: Variables of the embedded servers and of the tests.
_OTHER_PREFIXES: Final = ("HOUSEKEEPING_TEST_", "HOUSEKEEPING_EMBEDDED")


_MAX_DURATION_S: Final = 7 * 86_400  # a week; a longer time is probably in the wrong unit
_MAX_AGE_S: Final = 100 * 366 * 86_400  # a hundred years; a greater age may be no date in PostgreSQL


_Urls = tuple[Annotated[str, POSTGRES], ...]


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

    A worker accepts only the keys that apply to it; its declaration rejects the others.
    """

    # Strict, because JSON has types: true is no batch size.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = True
    schedule: str | None = None
    batch_size: Annotated[Annotated[int, Field(ge=1, le=10_000)] | None, NOT_NULL] = None
    #: Number of runs that share the work of one message. `parts` is its name in older releases.
    shards: Annotated[
        Annotated[int, Field(ge=1, le=64)] | None, NOT_NULL, Field(validation_alias=AliasChoices("shards", "parts"))
    ] = None
    max_runtime_s: Annotated[Annotated[float, Field(gt=0, le=_MAX_DURATION_S)] | None, NOT_NULL] = None
    #: Most rows per second; None: no limit.
    max_rows_per_s: Annotated[float, Field(gt=0)] | None = None
    #: Pause after each batch, as a multiple of its duration.
    rest: Annotated[Annotated[float, Field(ge=0, le=1000)] | None, NOT_NULL] = None
    stale_after_s: Annotated[Annotated[float, Field(gt=0, le=_MAX_AGE_S)] | None, NOT_NULL] = None
    # A lease shorter than 3 s cannot be renewed in time.
    lease_ttl_s: Annotated[Annotated[float, Field(ge=3, le=_MAX_DURATION_S)] | None, NOT_NULL] = None
    page_size: Annotated[Annotated[int, Field(ge=1, le=10_000)] | None, NOT_NULL] = None
    max_projects: Annotated[Annotated[int, Field(ge=1)] | None, NOT_NULL] = None
    max_deletes: Annotated[Annotated[int, Field(ge=1)] | None, NOT_NULL] = None
    git_batch_size: Annotated[Annotated[int, Field(ge=1, le=10_000)] | None, NOT_NULL] = None
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


class Settings(BaseSettings):
    """All settings; the variable of a field is ``HOUSEKEEPING_`` and its name in capitals.

    Raises:
      SettingsError: From `load`, one line about the first wrong value.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=FILE,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
    )

    database_url: Annotated[str, POSTGRES] | None = None
    #: URLs of further databases by name. `database_url` is the database ``main``.
    databases: Annotated[
        dict[Annotated[str, DATABASE], Annotated[str, POSTGRES]],
        NoDecode,
        json_object('database, such as {"ci": "postgresql://host/ci"}'),
    ] = {}
    #: Whether connections to PostgreSQL are direct; ``auto`` tests it.
    prepared_statements: Literal["auto", "on", "off"] = "auto"
    #: Read by actors whose ``data_consistency`` allows it: replicas of ``main``, or a list for each database by name.
    replica_urls: Annotated[
        Annotated[_Urls, Tag("[list]")] | Annotated[dict[str, _Urls], Tag("[object]")],
        Discriminator(lambda value: "[object]" if isinstance(value, dict) else "[list]"),
        NoDecode,
        REPLICAS,
    ] = ()
    redis_url: Annotated[str, REDIS] | None = None
    broker_url: Annotated[str, BROKER] | None = None
    rabbitmq_queue_type: Literal["classic", "quorum"] = "classic"
    namespace: Annotated[str, KEY] = "housekeeping"
    schema_name: Annotated[str, SCHEMA, Field(validation_alias=f"{PREFIX}SCHEMA")] = "housekeeping"
    catch_up: Literal["latest", "none"] = "latest"
    grace_s: Annotated[float, Field(ge=1, le=600)] = 30  # promise R5
    timezone: Annotated[ZoneInfo, ZONE] = ZoneInfo("UTC")
    log_format: Literal["json", "console"] | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    sentry_dsn: Annotated[str, SENTRY] | None = None
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    scheduler_metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    metrics_host: str = "127.0.0.1"
    #: Secret that logs in to the dashboard.
    web_token: Annotated[str, TOKEN] | None = Field(default=None, repr=False)
    #: Secret that logs in to the dashboard without the right to change anything.
    web_read_token: Annotated[str, TOKEN] | None = Field(default=None, repr=False)
    #: Header in which a trusted proxy names the user, for the log of actions.
    web_user_header: Annotated[str, HEADER] | None = None
    #: Addresses or networks of the proxies whose header is read.
    web_trusted_proxies: Annotated[tuple[Annotated[str, NETWORK], ...], NoDecode, NETWORKS] = ("127.0.0.0/8", "::1")
    object_stores: Annotated[
        dict[str, ObjectStoreSettings], NoDecode, json_object('location, such as {"uploads": "s3://bucket/prefix"}')
    ] = {}
    repositories_root: Path | None = None
    #: Active families of built-in workers: ("all",) or their names. None: those whose tables fit.
    built_in: Annotated[tuple[str, ...] | None, NoDecode, FAMILIES] = None
    #: Modules with the application's own sweeps.
    sweeps: Annotated[tuple[str, ...], NoDecode, MODULES] = ()
    workers: Annotated[
        dict[str, WorkerSettings],
        NoDecode,
        json_object('worker name, such as {"user_status_cleanup.batch": {"batch_size": 50}}'),
    ] = {}

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read settings from keyword arguments, then the environment, then the ``.env`` file.

        Raises:
          SettingsError: If a value is wrong, a ``HOUSEKEEPING_`` variable is no setting, or the file cannot be read.
        """
        _reject_unknown(os.environ)
        _reject_unknown(_names_in_file(Path(FILE)), f" (in {FILE})")
        try:
            settings = cls(**overrides)
        except pydantic.ValidationError as error:
            raise SettingsError(_one_line(error)) from None
        if settings.databases and settings.database_url is None:
            raise SettingsError(
                f"{PREFIX}DATABASES is set without {PREFIX}DATABASE_URL; set this too: it is the database {MAIN}"
            )
        if settings.web_read_token is not None and settings.web_read_token == settings.web_token:
            raise SettingsError(
                f"{PREFIX}WEB_READ_TOKEN is {PREFIX}WEB_TOKEN; it should be another one, because it only allows reading"
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
        return self.database_url or _missing("DATABASE_URL", "postgresql://user:password@host:5432/database")

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
        hint = "; RabbitMQ carries only the messages, and leases and keys need Redis" if self.on_rabbitmq else ""
        return self.redis_url or _missing("REDIS_URL", f"redis://host:6379/0{hint}")

    @property
    def on_rabbitmq(self) -> bool:
        """Whether the broker is RabbitMQ, and not Redis."""
        return (self.broker_url or "").startswith(("amqp://", "amqps://"))


def _missing(name: str, example: str) -> str:
    raise SettingsError(f"{PREFIX}{name} is not set; it should be a URL such as {example}")


def _variable(field: str) -> str:
    return f"{PREFIX}SCHEMA" if field in ("schema_name", f"{PREFIX}SCHEMA") else f"{PREFIX}{field.upper()}"


def _names_in_file(path: Path) -> list[str]:
    """Return the names that a ``.env`` file sets. Malformed lines without the prefix are ignored."""
    if not path.is_file():
        return []
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
    return [entry.key for entry in entries if entry.key]


def _reject_unknown(names: Iterable[str], place: str = "") -> None:
    known = [_variable(field).removeprefix(PREFIX) for field in Settings.model_fields]
    for name in sorted(names):
        setting = name.upper().removeprefix(PREFIX)  # pydantic-settings reads lower case as well
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
    "tuple_type": "a list of URLs",
}


#: Keys of a worker that are objects.
_NESTED: Final[dict[str, type[BaseModel]]] = {"gates": ThrottleSettings, "breaker": BreakerSettings}


#: Parts of the place of an error that are no key of a setting.
_NO_KEYS: Final = ("[key]", "[list]", "[object]")


def _one_line(error: pydantic.ValidationError) -> str:
    """Describe the first error: name, value and expected form."""
    first = error.errors(include_url=False)[0]
    field, *path = (part for part in first["loc"] if part not in _NO_KEYS)
    where = _variable(str(field)) + "".join(f"[{json.dumps(part)}]" for part in path)
    if first["type"] == "extra_forbidden":
        model = WorkerSettings if field == "workers" else ObjectStoreSettings
        keys = (_NESTED[str(path[1])] if len(path) == 3 else model).model_fields
        near = difflib.get_close_matches(str(path[-1]), keys, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
        return f"{where} is not a valid key; {hint}"
    expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, ").removeprefix("Input should be "))
    secret = any(mask_secrets(f"{part}=x") != f"{part}=x" for part in (str(field), *path[-1:]))
    return f"{where} is {'***' if secret else _shown(first['input'])}; it should be {expected}"


def _shown(value: Any) -> str:
    """Return the value on one line, without passwords."""
    if not isinstance(value, str):
        return mask_secrets(json.dumps(value, default=str))
    # Text before an @ can be a password even if the scheme is missing.
    text = mask_secrets(value if "://" in value else re.sub(r"^\S*:\S*@", "***@", value))
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
