"""Values of the settings that are objects by name: workers with their limits, and object stores."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from housekeeping.core.settings.types import FUNCTION, NOT_NULL, STORE, TABLE

_MAX_DURATION_S: Final = 7 * 86_400  # a week; a longer time is probably in the wrong unit
_MAX_AGE_S: Final = 100 * 366 * 86_400  # a hundred years; a greater age may be no date in PostgreSQL


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
    #: Most rows per second; None for no limit.
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
