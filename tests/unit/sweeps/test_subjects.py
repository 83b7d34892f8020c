"""Declarations of what can be erased: refused if they cannot work, and found in the modules of sweeps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from pydantic import SecretStr

from housekeeping import Anonymise, Call, DeclarationError, Delete, Keep, Objects, Settings, Subject
from tests.internals.core import SettingsError
from tests.internals.erasures import subjects_of
from tests.internals.ledger import key_hmac


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: Subject("Person", "account"), "'Person' is no name; write a word of small letters"),
        (lambda: Subject("person", "account", tables={"a": Delete(archive_to="x")}), r"write Delete\(\)"),
        (lambda: Subject("person", "account", tables={"a": "delete"}), "tables is .*; write Delete"),  # type: ignore[dict-item]
        (lambda: Subject("person", "account", also=[Call(print, Delete())]), r"write Call\(function\)"),
        (lambda: Keep(" "), "Keep has no reason; write why the rows are kept"),
        (lambda: Anonymise(), "Anonymise has no columns; write the values"),
        (lambda: Objects("avatars", "users/"), 'names no column of the subject.*write "users/{id}/"'),
    ],
)
def test_declaration_that_cannot_work_is_refused(declare: Callable[[], Any], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        declare()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of ``HOUSEKEEPING_SWEEPS``."""
    made = ModuleType("shop_subjects")
    monkeypatch.setitem(sys.modules, "shop_subjects", made)
    return made


def test_subjects_stand_in_a_module_of_sweeps(module: ModuleType) -> None:
    person = Subject("person", "account")
    vars(module)["SUBJECTS"] = (person,)

    assert subjects_of(Settings(sweeps=("shop_subjects",))) == {"person": person}


@pytest.mark.parametrize(
    ("subjects", "error", "text"),
    [
        ([Subject("person", "account"), Subject("person", "member")], DeclarationError, "a subject 'person' already"),
        ([Subject("person", "account", database="ci")], SettingsError, "has the database 'ci'; the databases are main"),
        ("person", SettingsError, "SUBJECTS is 'person'; it should be a tuple of Subject"),
    ],
)
def test_subjects_that_do_not_fit_are_refused(module: ModuleType, subjects: Any, error: Any, text: str) -> None:
    vars(module)["SUBJECTS"] = subjects

    with pytest.raises(error, match=text):
        subjects_of(Settings(sweeps=("shop_subjects",)))


def test_hmac_depends_on_secret_kind_and_every_part_of_the_key() -> None:
    one, other = SecretStr("one" * 16), SecretStr("other" * 8)
    given = [(one, "person", ["4711"]), (other, "person", ["4711"]), (one, "tenant", ["4711"])]
    given += [(one, "person", ["47", "11"]), (one, "person", ["4711", ""])]

    found = {key_hmac(*each) for each in given}

    assert len(found) == len(given)
    assert all(re.fullmatch(r"[0-9a-f]{64}\.[0-9a-f]{8}", each) for each in found)
    assert len({each.partition(".")[2] for each in found}) == 2  # the mark tells only the secret
