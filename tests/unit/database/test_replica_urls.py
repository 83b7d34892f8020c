from __future__ import annotations

from pathlib import Path

import pytest

from housekeeping import Settings
from tests.internals.core import SettingsError

ONE, OTHER = "postgresql://u:hunter2@a:5432/d", "postgres://u:hunter2@b,c/d?target_session_attrs=standby"


@pytest.fixture(autouse=True)
def without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(monkeypatch: pytest.MonkeyPatch, value: str) -> Settings:
    monkeypatch.setenv("HOUSEKEEPING_REPLICA_URLS", value)
    return Settings.load()


@pytest.mark.parametrize(
    ("value", "urls"),
    [
        (ONE, (ONE,)),
        (f"{ONE},{OTHER}", (ONE, OTHER)),
        (f" {OTHER} , {ONE}, ", (OTHER, ONE)),
        (f'["{ONE}", "{OTHER}"]', (ONE, OTHER)),
        ("[]", ()),
        ("", ()),
    ],
)
def test_replicas_are_listed_with_commas_or_as_json(
    monkeypatch: pytest.MonkeyPatch, value: str, urls: tuple[str, ...]
) -> None:
    assert loaded(monkeypatch, value).replica_urls == urls


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (f"{ONE},mysql://u:hunter2@b/d", "HOUSEKEEPING_REPLICA_URLS[1] is 'mysql://u:***@b/d'; it should be a URL"),
        ("[", "HOUSEKEEPING_REPLICA_URLS is '['; it should be URLs separated by commas, or JSON"),
        ("[7]", "HOUSEKEEPING_REPLICA_URLS[0] is 7; it should be text"),
    ],
)
def test_wrong_replica_url_is_rejected_with_its_index(monkeypatch: pytest.MonkeyPatch, value: str, line: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        loaded(monkeypatch, value)

    assert str(refusal.value).startswith(line)
    assert "hunter2" not in str(refusal.value)


def test_passwords_of_replicas_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hunter2" not in repr(loaded(monkeypatch, f"{ONE},{OTHER}"))


@pytest.mark.parametrize(
    ("value", "replicas"),
    [
        (f"{ONE},{OTHER}", {"main": (ONE, OTHER)}),
        (f'{{"ci": ["{ONE}"], "main": "{OTHER}"}}', {"ci": (ONE,), "main": (OTHER,)}),
        ("", {}),
    ],
)
def test_replicas_are_those_of_main_or_of_the_named_databases(
    monkeypatch: pytest.MonkeyPatch, value: str, replicas: dict[str, tuple[str, ...]]
) -> None:
    monkeypatch.setenv("HOUSEKEEPING_DATABASE_URL", ONE)
    monkeypatch.setenv("HOUSEKEEPING_DATABASES", f'{{"ci": "{ONE}"}}')

    assert loaded(monkeypatch, value).replicas == replicas


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (f'{{"c": ["{ONE}"]}}', "HOUSEKEEPING_REPLICA_URLS names the database 'c'; the databases are main (HOUSE"),
        ('{"main": ["mysql://u:hunter2@b/d"]}', "HOUSEKEEPING_REPLICA_URLS[\"main\"][0] is 'mysql://u:***@b/d'; it"),
        ('{"main": 7}', 'HOUSEKEEPING_REPLICA_URLS["main"] is 7; it should be a list of URLs'),
        ("{", "HOUSEKEEPING_REPLICA_URLS is '{'; it should be URLs separated by commas, or JSON"),
    ],
)
def test_wrong_replicas_of_a_database_are_rejected(monkeypatch: pytest.MonkeyPatch, value: str, line: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_DATABASE_URL", ONE)

    with pytest.raises(SettingsError) as refusal:
        loaded(monkeypatch, value)

    assert str(refusal.value).startswith(line)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (f'{{"main": "{ONE}"}}', "HOUSEKEEPING_DATABASES[\"main\"] is 'main'; it should be at most 40 letters"),
        (f'{{"a:b": "{ONE}"}}', "HOUSEKEEPING_DATABASES[\"a:b\"] is 'a:b'; it should be at most 40 letters"),
        ('{"ci": "mysql://u:hunter2@b/d"}', "HOUSEKEEPING_DATABASES[\"ci\"] is 'mysql://u:***@b/d'; it should be a"),
        (f'["{ONE}"]', "HOUSEKEEPING_DATABASES is '[\"postgresql://u:***@a:5432/d\"]'; it should be a JSON object by"),
        (f'{{"ci": "{ONE}"}}', "HOUSEKEEPING_DATABASES is set without HOUSEKEEPING_DATABASE_URL"),
    ],
)
def test_wrong_databases_are_rejected(monkeypatch: pytest.MonkeyPatch, value: str, line: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_DATABASES", value)

    with pytest.raises(SettingsError) as refusal:
        Settings.load()

    assert str(refusal.value).startswith(line)
    assert "hunter2" not in str(refusal.value)
