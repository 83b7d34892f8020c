"""Settings from the environment (and a ``.env`` file), checked before anything starts."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from housekeeping.foundation.errors import SettingsError
from housekeeping.foundation.secrets import masked

PREFIX: Final = "HOUSEKEEPING_"
#: Read by the embedded servers and by the tests, not by an application.
_ELSEWHERE: Final = ("HOUSEKEEPING_TEST_", "HOUSEKEEPING_EMBEDDED")


def _url(*schemes: str) -> Any:
    """A URL of one of these schemes; more is left to the library that connects with it."""

    def check(value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if not separator or scheme not in schemes or not rest:
            raise ValueError(f"a URL that starts with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        return value

    return AfterValidator(check)


def _zone(value: Any) -> Any:
    try:
        return ZoneInfo(value) if isinstance(value, str) else value
    except (KeyError, ValueError, OSError):
        raise ValueError("a time zone such as UTC or Europe/Berlin") from None


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"JSON ({error})") from None


def _identifier(value: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", value):
        raise ValueError("a plain PostgreSQL name: small letters, digits and _")
    return value


def _table(value: str) -> str:
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_$]{0,62}\.)?[A-Za-z_][A-Za-z0-9_$]{0,62}", value):
        raise ValueError("a table's name, or schema.table")
    return value


class WorkerSettings(BaseModel):
    """What ``HOUSEKEEPING_WORKERS`` may say of one worker; what it does not say keeps the worker's default.

    A worker takes only the keys it has a use for; the others are refused when the worker is declared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    schedule: str | None = None
    batch_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    max_runtime_s: Annotated[float, Field(gt=0)] | None = None
    stale_after_s: Annotated[float, Field(gt=0)] | None = None
    lease_ttl_s: Annotated[float, Field(ge=3)] | None = (
        None  # semantics.md: below 3 s a lease cannot be renewed in time
    )
    page_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    max_projects: Annotated[int, Field(ge=1)] | None = None
    max_deletes: Annotated[int, Field(ge=1)] | None = None
    git_batch_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    log_records: bool | None = None
    table: Annotated[str, AfterValidator(_table)] | None = None
    tables: dict[str, Annotated[str, AfterValidator(_table)]] | None = None


class ObjectStoreSettings(BaseModel):
    """One location of ``HOUSEKEEPING_OBJECT_STORES``: a URL alone, or an object with these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, _url("file", "s3", "gs", "az", "memory")]
    #: Part of every object's key, before its path; what the URL has as its path comes first.
    prefix: str = ""
    enabled: bool = True
    #: For the store's client, by its own names (``aws_access_key_id``, ``endpoint``, ...); may hold secrets.
    options: Annotated[dict[str, str], Field(repr=False)] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_url_alone(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class Settings(BaseSettings):
    """Everything that can be set, by the name ``HOUSEKEEPING_`` + field in capitals.

    Raises:
      SettingsError: From `load`, for the first wrong value, in one line.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=".env", env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True
    )

    database_url: Annotated[str, _url("postgresql", "postgres")] | None = None
    redis_url: Annotated[str, _url("redis", "rediss", "unix")] | None = None
    broker_url: Annotated[str, _url("redis", "rediss", "unix")] | None = None
    namespace: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")] = "housekeeping"
    schema_name: Annotated[str, AfterValidator(_identifier), Field(validation_alias=f"{PREFIX}SCHEMA")] = "housekeeping"
    catch_up: Literal["latest", "none"] = "latest"
    grace_s: Annotated[float, Field(ge=1, le=600)] = 30  # semantics.md, R5
    timezone: Annotated[ZoneInfo, BeforeValidator(_zone)] = ZoneInfo("UTC")
    log_format: Literal["json", "console"] | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    sentry_dsn: Annotated[str, _url("http", "https")] | None = None
    object_stores: Annotated[dict[str, ObjectStoreSettings], NoDecode, BeforeValidator(_json)] = {}
    repositories_root: Path | None = None
    workers: Annotated[dict[str, WorkerSettings], NoDecode, BeforeValidator(_json)] = {}

    @classmethod
    def load(cls, **given: Any) -> Settings:
        """Read the environment; keyword arguments win over it.

        Raises:
          SettingsError: When a value is wrong or a ``HOUSEKEEPING_`` variable is no setting.
        """
        _refuse_unknown(os.environ)
        try:
            return cls(**given)
        except pydantic.ValidationError as error:
            raise SettingsError(_one_line(error)) from None

    def require_database_url(self) -> str:
        """The database's URL.

        Raises:
          SettingsError: When it is not set.
        """
        return self.database_url or _missing("DATABASE_URL", "postgresql://user:password@host:5432/database")

    def require_redis_url(self) -> str:
        """Redis's URL.

        Raises:
          SettingsError: When it is not set.
        """
        return self.redis_url or _missing("REDIS_URL", "redis://host:6379/0")


def _missing(name: str, example: str) -> str:
    raise SettingsError(f"{PREFIX}{name} is not set; it should be a URL such as {example}")


def _variable(field: str) -> str:
    return f"{PREFIX}SCHEMA" if field in ("schema_name", f"{PREFIX}SCHEMA") else f"{PREFIX}{field.upper()}"


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    known = [_variable(field) for field in Settings.model_fields]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not name.startswith(_ELSEWHERE):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
            raise SettingsError(f"{name} is not a setting; {hint}")


def _one_line(error: pydantic.ValidationError) -> str:
    """Name, value and what it should be, for the first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    field, *path = first["loc"]
    where = _variable(str(field)) + "".join(f"[{json.dumps(part)}]" for part in path)
    should = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        keys = ", ".join(WorkerSettings.model_fields)
        return f"{where} is not a key of a worker; the keys are {keys}"
    shown = first["input"] if isinstance(first["input"], str) else json.dumps(first["input"], default=str)
    if should.startswith(("Input", "String")):
        should = should.replace("Input should be", "").replace("String should", "text should").strip()
    return f"{where} is {masked(shown)!r}; it should be {should}"
