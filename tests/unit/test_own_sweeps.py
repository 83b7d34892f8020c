"""Tests of loading own sweeps from modules named by a setting."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peewee import SqliteDatabase, TextField

from housekeeping import BaseModel, Delete, Rows, Settings, Sweep, UtcDateTimeField
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.internals.core import DeclarationError, SettingsError
from tests.internals.workers import BUILT_IN, configured_sweeps, families, only
from tests.internals.workers import status_sweep as user_statuses

#: Function that writes a module and returns its name.
Written = Callable[..., str]

SESSIONS = """
from peewee import TextField
from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField

class UserSession(BaseModel):
    token = TextField(primary_key=True)
    expires_at = UtcDateTimeField()

def sweep(name, table=UserSession):
    rows = Rows(table, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete())
    return Sweep(name, rows)
"""
ONE = "one = Sweep('shop.one', Rows(UserSession, "


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shop").mkdir()

    def write(text: str, name: str = "sweeps") -> str:
        (tmp_path / f"shop/{name}.py").write_text(f"{SESSIONS}\n{text}\n")
        importlib.invalidate_caches()
        return f"shop.{name}"

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def given(*modules: str, **workers: Any) -> Settings:
    return Settings.load(sweeps=",".join(modules), workers=json.dumps(workers))


def test_named_sweeps_of_a_module_are_loaded(written: Written) -> None:
    module = written("one = sweep('shop.one')\nother = sweep('shop.other')")

    known = configured_sweeps(given(module))

    assert [*known][-2:] == ["shop.one", "shop.other"]
    assert len(known) == 2 + sum(len(family.SWEEPS) for family in BUILT_IN)


def test_module_can_list_its_sweeps(written: Written) -> None:
    module = written("one = sweep('shop.one')\nSWEEPS = (one, sweep('shop.two'))\nother = sweep('shop.other')")

    assert [*configured_sweeps(given(module))][-2:] == ["shop.one", "shop.two"]


def test_several_modules_are_separated_by_commas(written: Written) -> None:
    modules = written("one = sweep('shop.one')", "a"), written("two = sweep('shop.two')", "b")

    assert [*configured_sweeps(Settings.load(sweeps=f" {modules[0]} , {modules[1]},"))][-2:] == ["shop.one", "shop.two"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "shop.sweeps has no sweeps; it should have a Sweep, or SWEEPS, a tuple of them"),
        ("SWEEPS = ()", "shop.sweeps has no sweeps"),
        ("SWEEPS = sweep('shop.one')", "shop.sweeps.SWEEPS is Sweep"),
        ("SWEEPS = ['shop.one']", r"SWEEPS is \['shop.one'\]; it should be a tuple of Sweep"),
        ("1 / 0", r"HOUSEKEEPING_SWEEPS: shop.sweeps cannot be imported: ZeroDivisionError: division by zero"),
        ("import shop.nowhere", "shop.sweeps cannot be imported: ModuleNotFoundError: No module named 'shop.nowhere'"),
        ("one = sweep('a name')", "HOUSEKEEPING_SWEEPS: shop.sweeps: 'a name' is no name for a sweep"),
        ("one = Sweep('shop.one')", "shop.sweeps: shop.one: stages is missing"),
        (
            f"{ONE}stale=UserSession.expires_at < 1, action=Delete()))",
            "stale is an object of type Expression",
        ),
        (f"{ONE}stale=print, order=UserSession.token, action=Delete()))", "UserSession.token is no name of a column"),
        (f"{ONE}stale=print, order='expired_at', action=Delete()))", "UserSession has no column 'expired_at'"),
        (
            "one = sweep('shop.one')\nDISABLED = ('shop.on',)",
            "'shop.on', which is none of its sweeps; they are shop.one",
        ),
        ("one = sweep('shop.one')\nDISABLED = 'shop.one'", "DISABLED is 'shop.one'; it should be a tuple of str"),
        (f"{ONE}stale=print, action=Delete))", r"action should be Delete\(\), with brackets"),
    ],
)
def test_broken_module_is_rejected_in_one_line(written: Written, text: str, said: str) -> None:
    module = written(text)

    with pytest.raises(SettingsError, match=said) as refused:
        configured_sweeps(given(module))

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.at.all", "shop.nowhere"])
def test_missing_module_is_named(written: Written, name: str) -> None:
    with pytest.raises(SettingsError, match=f"^HOUSEKEEPING_SWEEPS names '{name}', which is not found"):
        configured_sweeps(given(name))


@pytest.mark.parametrize("value", ["shop/sweeps.py", "shop.sweeps:SWEEPS", "shop sweeps", "shop..sweeps"])
def test_invalid_module_name_is_rejected(value: str) -> None:
    with pytest.raises(
        SettingsError, match="^HOUSEKEEPING_SWEEPS is .*; it should be names of modules separated by commas"
    ):
        Settings.load(sweeps=value)


def test_two_sweeps_with_one_name_are_rejected(written: Written) -> None:
    first, second = written("one = sweep('shop.one')", "a"), written("one = sweep('shop.one')", "b")
    like_ours = written("one = sweep('user_status_cleanup.batch')", "c")

    with pytest.raises(DeclarationError, match=r"shop.b: there is a sweep shop.one already, of shop.a; give one of"):
        configured_sweeps(given(first, second))
    with pytest.raises(
        DeclarationError, match=r"shop.c: .* user_status_cleanup.batch already, of user_status_cleanup;"
    ):
        configured_sweeps(given(like_ours))


def test_sweep_named_twice_is_loaded_once(written: Written) -> None:
    module = written("one = sweep('shop.one')\nsame = one")
    settings = given(module, module)
    one = importlib.import_module(module).one

    assert [name for name in configured_sweeps(settings, [one, one]) if name.startswith("shop.")] == ["shop.one"]
    assert [sweep.name for family in families(settings, [one]) for sweep in family.sweeps].count("shop.one") == 1


def test_own_sweeps_use_and_validate_settings(written: Written) -> None:
    module = written("one = sweep('shop.one')")

    configured = configured_sweeps(given(module, **{"shop.one": {"batch_size": 7, "enabled": False}}))["shop.one"]

    assert (configured.limits.batch, configured.enabled) == (7, False)
    with pytest.raises(SettingsError, match=r'HOUSEKEEPING_WORKERS\["shop.one"\]\["max_deletes"\] is 7, but this'):
        configured_sweeps(given(module, **{"shop.one": {"max_deletes": 7}}))
    with pytest.raises(SettingsError, match=r"shop.two.* is not a worker; the workers are .*shop.one"):
        configured_sweeps(given(module, **{"shop.two": {}}))


def test_table_can_have_another_name(written: Written) -> None:
    module = written("one = sweep('shop.one')")
    there = {"shop.one": {"table": "app.sessions"}}

    configured_sweeps(given(module, **there))
    meta: Any = importlib.import_module(module).UserSession._meta
    elsewhere = (meta.schema, meta.table_name)
    configured_sweeps(given(module))

    assert (elsewhere, (meta.schema, meta.table_name)) == (("app", "sessions"), (None, "user_session"))
    assert [*families(given(module))[-2].models] == ["user_session"]


def test_table_has_one_name_for_all_models_of_it(written: Written) -> None:
    second = "class Same(UserSession):\n    class Meta:\n        table_name = 'user_session'"
    module = written(f"{second}\none = sweep('shop.one')\ntwo = sweep('shop.two', Same)")

    configured = configured_sweeps(given(module, **{"shop.one": {"table": "sessions"}}))

    stages: list[Any] = [stage for name in ("shop.one", "shop.two") for stage in configured[name].known_stages()]
    assert [stage.model._meta.table_name for stage in stages] == ["sessions", "sessions"]


def test_sweep_on_a_built_in_table_uses_its_configured_name() -> None:
    own = Sweep(
        "shop.loud_statuses", Rows(UserStatus, stale=lambda row: row.message == "", order="user_id", action=Delete())
    )
    meta: Any = UserStatus._meta

    configured_sweeps(given(**{user_statuses.name: {"table": "statuses"}}), [own])
    named = meta.table_name
    configured_sweeps(given())

    assert (named, meta.table_name) == ("statuses", "user_statuses")


def test_only_returns_the_applications_sweeps(written: Written) -> None:
    module = written("one = sweep('shop.one')")
    one = importlib.import_module(module).one
    settings = given("nowhere", **{"shop.one": {"batch_size": 7}, "another.process": {}})

    assert {name: sweep.limits.batch for name, sweep in only(settings, [one]).items()} == {"shop.one": 7}


def test_module_can_configure_itself_like_a_built_in_one(written: Written) -> None:
    module = written(
        "one = sweep('shop.one')\nseen = []\nconfigure = seen.append\nexamine = lambda: iter(())\n"
        "RIGHTS = {'user_session': ('SELECT',)}"
    )
    settings = given(module)

    configured_sweeps(settings)
    family = families(settings)[-2]

    assert importlib.import_module(module).seen == [settings]
    assert (family.rights, family.examine is not None) == ({"user_session": ("SELECT",)}, True)


def test_model_of_another_database_is_rejected() -> None:
    class Elsewhere(BaseModel):
        token = TextField(primary_key=True)
        expires_at = UtcDateTimeField()

        class Meta:
            database = SqliteDatabase(":memory:")

    with pytest.raises(DeclarationError, match="Elsewhere should be derived from housekeeping.BaseModel"):
        Sweep("shop.x", Rows(Elsewhere, stale=lambda row, now: row.expires_at <= now, order="token", action=Delete()))
