"""Tests of `HOUSEKEEPING_BUILT_IN`, which activates families of built-in workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings
from housekeeping.workers import FAMILIES, configured_sweeps

ALWAYS = ["housekeeping.old_runs", "housekeeping.outbox"]
STATUSES = "user_status_cleanup.batch"
IMPORTS = "bulk_imports.stale_import"


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
    assert [each.setup_problem for each in sweeps.values()] == [None] * 4


@pytest.mark.parametrize("value", ["none", "false", "[]"])
def test_none_leaves_only_maintenance_workers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BUILT_IN", value)

    assert [*configured_sweeps(Settings.load())] == ALWAYS


def test_all_activates_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BUILT_IN", "all")

    sweeps = configured_sweeps(Settings.load())

    assert len(sweeps) == sum(len(module.SWEEPS) for module in FAMILIES.values()) + len(ALWAYS)
    assert not any(each.setup_problem for each in sweeps.values())


def test_default_activates_families_with_tables() -> None:
    sweeps = configured_sweeps(Settings())

    assert [name for name, each in sweeps.items() if each.setup_problem is None] == ALWAYS


def test_family_with_a_configured_table_requires_it() -> None:
    sweeps = configured_sweeps(Settings.load(workers={"ci.stuck_jobs": {"table": "p_ci_builds"}}))

    assert sweeps["ci.stuck_builds.drop_running"].setup_problem is None
    assert sweeps[STATUSES].setup_problem is not None


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
