"""Tests of `HOUSEKEEPING_BUILT_IN`, which activates families of built-in workers, and of wrong worker settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from housekeeping import Settings
from tests.internals.core import SettingsError
from tests.internals.workers import FAMILIES, configured_sweeps

ALWAYS = ["housekeeping.old_runs", "housekeeping.outbox"]
STATUSES = "user_status_cleanup.batch"
IMPORTS = "bulk_imports.stale_import"
BUILDS = "ci.stuck_builds.drop_canceling"
UPLOADS = "object_storage.delete_stale_direct_uploads"


@pytest.fixture(autouse=True)
def declared_table_names() -> Iterator[None]:
    yield
    configured_sweeps(Settings())


@pytest.mark.parametrize(
    "value",
    [
        "user_status_cleanup,bulk_imports",
        " bulk_imports , user_status_cleanup ",
        '["user_status_cleanup", "bulk_imports"]',
    ],
)
def test_named_families_are_always_active(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BUILT_IN", value)

    sweeps = configured_sweeps(Settings.load())

    assert [*sweeps] == [STATUSES, IMPORTS, *ALWAYS]
    assert [each.setup.problem for each in sweeps.values()] == [None] * 4


@pytest.mark.parametrize("value", ["none", "[]"])
def test_none_leaves_only_maintenance_workers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BUILT_IN", value)

    assert [*configured_sweeps(Settings.load())] == ALWAYS


def test_all_activates_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BUILT_IN", "all")

    sweeps = configured_sweeps(Settings.load())

    assert len(sweeps) == sum(len(module.SWEEPS) for module in FAMILIES.values()) + len(ALWAYS)
    assert not any(each.setup.problem for each in sweeps.values())


def test_default_activates_families_with_tables() -> None:
    sweeps = configured_sweeps(Settings())

    assert [name for name, each in sweeps.items() if each.setup.problem is None] == ALWAYS


def test_family_with_a_configured_table_requires_it() -> None:
    sweeps = configured_sweeps(Settings.load(workers={"ci.stuck_jobs": {"table": "p_ci_builds"}}))

    assert sweeps["ci.stuck_builds.drop_running"].setup.problem is None
    assert sweeps[STATUSES].setup.problem is not None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("user_statuses", "names 'user_statuses', which is not a built-in family; did you mean user_status"),
        ("x", "names 'x', .*; the families are user_status_cleanup, bulk_imports, object_storage, "),
        ("old_runs", "names 'old_runs', which is not a built-in family"),
    ],
)
def test_unknown_family_is_rejected_in_one_line(value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"^HOUSEKEEPING_BUILT_IN {said}") as refused:
        configured_sweeps(Settings.load(built_in=value))

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["all,bulk_imports", "bulk_imports,none", "[7]", "[", "bulk imports"])
def test_value_other_than_a_list_of_families_is_rejected(value: str) -> None:
    with pytest.raises(SettingsError, match="^HOUSEKEEPING_BUILT_IN is .*; it should be "):
        Settings.load(built_in=value)


@pytest.mark.parametrize(
    ("worker", "given", "said"),
    [
        (STATUSES, {"schedule": "x"}, """["schedule"] is 'x'; schedule "x": the number of fields"""),
        (STATUSES, {"batch_size": 5, "database": "ci"}, """["database"] is 'ci'; the databases are main"""),
        (STATUSES, {"alarms": 3}, '["alarms"] is 3; it should be a JSON object'),
        (
            BUILDS,
            {"max_runtime_s": 3000, "log_records": False},
            '["max_runtime_s"] is 3000.0; limits.runtime must be below',
        ),
        (BUILDS, {"max_runtime_s": 40, "lease_ttl_s": 30}, '["lease_ttl_s"] is 30.0; limits.runtime must be below'),
        (UPLOADS, {"table": "x"}, """["table"] is 'x', but this worker has no table to name"""),
        (UPLOADS, {"tables": {"x": "y"}}, """["tables"] names 'x'; this worker has no table to name"""),
    ],
)
def test_wrong_setting_of_a_worker_is_named_with_its_key(worker: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        configured_sweeps(Settings.load(database_url="postgresql://host/db", workers=json.dumps({worker: given})))

    assert str(refused.value).startswith(f'HOUSEKEEPING_WORKERS["{worker}"]{said}')
    assert str(refused.value).count(worker) == 1
