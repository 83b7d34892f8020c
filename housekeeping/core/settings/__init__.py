"""Settings from the environment and a ``.env`` file, validated before anything starts.

Start with `Settings` here. `workers` has the keys of a worker and of an object store, `types` the forms of values, and
`errors` the texts for wrong ones.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from housekeeping.core.errors import SettingsError
from housekeeping.core.sanitize import mask_secrets
from housekeeping.core.settings.errors import PREFIX as PREFIX
from housekeeping.core.settings.errors import names_in_file, one_line, reject_unknown
from housekeeping.core.settings.types import (
    BROKER,
    DATABASE,
    FAMILIES,
    HEADER,
    KEY,
    MODULES,
    NETWORK,
    NETWORKS,
    POSTGRES,
    REDIS,
    REPLICAS,
    SCHEMA,
    SENTRY,
    TOKEN,
    ZONE,
    json_object,
)
from housekeeping.core.settings.workers import BreakerSettings as BreakerSettings
from housekeeping.core.settings.workers import ObjectStoreSettings as ObjectStoreSettings
from housekeeping.core.settings.workers import ThrottleSettings as ThrottleSettings
from housekeeping.core.settings.workers import WorkerSettings as WorkerSettings

FILE: Final = ".env"
#: Name of the database of ``HOUSEKEEPING_DATABASE_URL``.
MAIN: Final = "main"

_Urls = tuple[Annotated[str, POSTGRES], ...]


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
    #: Active families of built-in workers: ("all",) or their names. None for those whose tables fit.
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
        reject_unknown(os.environ, cls.model_fields)
        reject_unknown(names_in_file(Path(FILE)), cls.model_fields, f" (in {FILE})")
        try:
            settings = cls(**overrides)
        except pydantic.ValidationError as error:
            raise SettingsError(one_line(error)) from None
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
