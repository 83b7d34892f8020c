"""Fields of a sweep that the settings of its worker change."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from housekeeping.core.errors import DeclarationError, SettingsError
from housekeeping.core.sanitize import described, typed_error_line
from housekeeping.core.settings import WorkerSettings
from housekeeping.sweeps.limits.declared import AlertThresholds
from housekeeping.sweeps.stages.table_stage import TableStage

if TYPE_CHECKING:
    from housekeeping.sweeps.declaration import Sweep

#: Settings with the name and type of a field.
_SAME_NAME: Final = ("enabled", "schedule", "batch_size", "database", "max_rows_per_s", "rest")
#: Settings in seconds, and their fields.
_DURATIONS: Final = {"max_runtime_s": "max_runtime", "stale_after_s": "stale_after"}


def setting_of(sweep: Sweep) -> str:
    """Return the worker's settings as errors write them, such as ``HOUSEKEEPING_WORKERS["demo.batch"]``."""
    return f'HOUSEKEEPING_WORKERS["{sweep.name}"]'


def configured(sweep: Sweep, settings: WorkerSettings) -> Sweep:
    """Return a copy of the sweep with its worker's settings applied.

    Raises:
      SettingsError: A setting does not apply to this worker, or its value cannot work.
    """
    try:
        return dataclasses.replace(sweep, **_changed_fields(sweep, settings))
    except DeclarationError as error:
        given = {name: getattr(settings, name) for name in settings.model_fields_set}
        raise SettingsError(f"{setting_of(sweep)} is {given!r}; {error}") from None


def _changed_fields(sweep: Sweep, settings: WorkerSettings) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if name in _SAME_NAME or (name == "shards" and sweep.divisible):
            fields[name] = value
        elif name == "max_runtime_s" or (name == "stale_after_s" and sweep.stale_after is not None):
            fields[_DURATIONS[name]] = timedelta(seconds=value)
        elif name == "lease_ttl_s" and sweep.lease is not None:
            fields["lease"] = dataclasses.replace(sweep.lease, ttl=timedelta(seconds=value))
        elif name == "alarms":
            fields["alerts"] = _alert_thresholds(sweep, value)
        elif name == "target_batch_s" and any(isinstance(each, TableStage) for each in sweep.declared_stages()):
            fields["target_batch"] = None if value is None else timedelta(seconds=value)
        elif name in ("gates", "breaker"):
            field_name = "throttle" if name == "gates" else name
            given = {key: getattr(value, key) for key in value.model_fields_set}
            if given.get("custom") is not None:
                given["custom"] = _function_named(given["custom"], f'{setting_of(sweep)}["gates"]["custom"]')
            fields[field_name] = dataclasses.replace(getattr(sweep, field_name), **given)
        elif name in sweep.options:
            fields["options"] = {**fields.get("options", sweep.options), name: value}
        elif name not in ("table", "tables"):  # the worker's models were bound to their tables before
            raise SettingsError(f'{setting_of(sweep)}["{name}"] is {value!r}, but this worker has no use for it')
    return fields


def _function_named(name: str, setting: str) -> Any:
    module, _, function_name = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), function_name)
    except Exception as error:
        raise SettingsError(
            f"{setting} is {name!r}, which cannot be imported: {typed_error_line(error)}; it should be the dotted name "
            "of a function, such as shop.health.reason_to_wait"
        ) from None
    if not callable(function):
        raise SettingsError(f"{setting} is {name!r}, which is no function but {described(function)}")
    return function


def _alert_thresholds(sweep: Sweep, given: Mapping[str, float | None]) -> AlertThresholds:
    try:
        return sweep.alerts.changed(given, sweep.counts)
    except DeclarationError as error:
        raise SettingsError(f'{setting_of(sweep)}["alarms"] is {given!r}; {error}') from None
