from __future__ import annotations

from pathlib import Path

import pytest

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings

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
