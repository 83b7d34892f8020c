"""Validation of ref names, compared with git for thousands of names (document 58)."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.internals.workers import is_ref_name

_PIECES = ("a", ".", "..", "/", ".lock", "lock", "@", "{", "@{", "-", "~", " ", "\\", "*", "é", "\u2028", "^", "[", "]")


def git_takes(name: str) -> bool:
    """Return whether ``git check-ref-format`` accepts the name."""
    program = [b"git", b"check-ref-format", name.encode()]
    return subprocess.run(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def differing(names: list[str]) -> list[str]:
    """Return the names for which git and the library disagree."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        answers = list(pool.map(git_takes, names))
    return [name for name, taken in zip(names, answers, strict=True) if is_ref_name(name) != taken]


def test_characters_are_validated_as_by_git() -> None:
    characters = [chr(code) for code in (*range(1, 0x180), 0x7FF, 0x800, 0xFEFF, 0xFFFF, 0x1F600, 0x10FFFF)]
    forms = ("refs/heads/a{}b", "refs/heads/{}", "refs/heads/a{}")

    assert differing([form.format(character) for character in characters for form in forms]) == []


@pytest.mark.slow
def test_combinations_are_validated_as_by_git() -> None:
    combinations = ["refs/heads/" + "".join(pieces) for pieces in itertools.product(_PIECES, repeat=3)]

    assert differing(random.Random(58).sample(combinations, 2000)) == []


@pytest.mark.parametrize(
    "name",
    ["refs/heads/main", "refs/tags/v1.0", "refs/x", "refs/heads/-d", "refs/heads/@", "refs/heads/a.lockb"]
    + ["refs/merge-requests/1/head", "refs/keep-around/" + "0" * 40, "refs/heads/" + "x" * 1013, "refs/heads/日本"],
)
def test_valid_names_below_refs_are_accepted(name: str) -> None:
    assert is_ref_name(name) and git_takes(name)


@pytest.mark.parametrize(
    "name",
    ["", "HEAD", "main", "heads/main", "refs", "refs/", "refs//x", "/refs/heads/x", "refs/heads/x/", "Refs/heads/x"]
    + ["-d", "--stdin", "-refs/heads/x", " refs/heads/x", "refs/heads/x ", "refs/heads/x\n", "\nrefs/heads/x"]
    + ["refs/heads/x\ndelete refs/heads/y", "refs/heads/x\r", "refs/heads/x\t", "refs/heads/x\x7f"]
    + ["refs/heads/x\0", "refs/heads/x\0\0delete refs/heads/y\0\0", "refs/heads/\ud800", "refs/heads/a..b"]
    + ["refs/heads/.hidden", "refs/heads/a.lock", "refs/heads/a.lock/b", "refs/heads/a@{1}", "refs/heads/a."]
    + ["refs/../HEAD", "refs/heads/../../config", "refs/heads/a?", "refs/heads/a:b", "FETCH_HEAD", "@"],
)
def test_other_texts_are_rejected(name: str) -> None:
    assert not is_ref_name(name)
