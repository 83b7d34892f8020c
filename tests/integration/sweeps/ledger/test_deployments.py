"""Deployments in the action log: new versions, settings and declarations, once for the installation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
from pydantic import SecretStr

import housekeeping
from housekeeping import Settings
from tests.internals.core import ObjectStoreSettings
from tests.internals.database import Database, database
from tests.internals.insight import InstallationWatch, deployed
from tests.internals.ledger import logged_actions, record_deployment
from tests.internals.workers import status_sweep as sweep

SWEEPS = {sweep.name: sweep}


def boot(settings: Settings) -> None:
    InstallationWatch(settings, SWEEPS).look()


def results() -> list[str | None]:
    return [each.result for each in logged_actions(10) if each.action == "deploy"]


def test_changed_setting_is_recorded_once(settings: Settings, postgres: Database) -> None:
    boot(settings)
    boot(settings)
    first = results()
    changed = settings.model_copy(update={"grace_s": 45.0, "log_level": "ERROR"})

    for _ in range(3):
        boot(changed)
    boot(settings)

    assert first == []
    assert results() == [
        "HOUSEKEEPING_GRACE_S: 45.0 -> unset",
        "HOUSEKEEPING_GRACE_S: unset -> 45.0",
    ]


def test_processes_that_boot_together_record_one_deployment(settings: Settings, postgres: Database) -> None:
    boot(settings)
    changed = settings.model_copy(update={"catch_up": "none"})
    ready = Barrier(4)

    def start(_: int) -> None:
        watch = InstallationWatch(changed, SWEEPS)
        try:
            ready.wait()
            watch.look()
        finally:
            database.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start, range(4)))

    assert results() == ["HOUSEKEEPING_CATCH_UP: unset -> none"]


def test_new_version_and_declaration_are_recorded(
    settings: Settings, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot(settings)
    monkeypatch.setattr(housekeeping, "__version__", "99.1")
    InstallationWatch(settings, {sweep.name: replace(sweep, schedule="0 3 * * *")}).look()

    [result] = results()

    assert result is not None and "housekeeping: " in result and "-> 99.1" in result
    assert f"declaration of {sweep.name}: " in result


def test_no_secret_is_recorded(settings: Settings, postgres: Database) -> None:
    boot(settings)
    secrets = {
        "redis_url": f"{settings.redis_url}",
        "broker_url": "amqp://kim:hunter2@host/",
        "sentry_dsn": "https://hunter3@sentry/1",
        "ping_url": SecretStr("https://ping/hunter4"),
        "alert_webhook_url": SecretStr("https://hook/hunter7"),
        "alert_webhook_secret": SecretStr("whsec_hunter8"),
        "web_token": "hunter5-hunter5-hunter5",
        "object_stores": {"a": ObjectStoreSettings(url="s3://bucket/x", options={"sas": "hunter6"})},
    }
    record_deployment(deployed(settings.model_copy(update=secrets), SWEEPS), "kim@host")

    [result] = results()

    assert result is not None and "HOUSEKEEPING_BROKER_URL" in result
    assert "HOUSEKEEPING_WEB_TOKEN: unset -> ***" in result
    assert "HOUSEKEEPING_OBJECT_STORES" in result and "hunter" not in result
