"""Version, changelog and tag agree; the documented dependencies are those that are tested."""

from __future__ import annotations

import configparser
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import housekeeping

ROOT: Final = Path(__file__).parents[3]
#: Extras for contributors; no application needs their oldest versions.
_OURS: Final = ("dev", "docs", "recipes")


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def _requirements(*, with_ours: bool) -> Iterator[Requirement]:
    """Yield the requirements of the package and of its extras."""
    setup = _setup()
    extras = [text for extra, text in setup["options.extras_require"].items() if with_ours or extra not in _OURS]
    for text in (setup["options"]["install_requires"], *extras):
        lines = (line.strip() for line in text.splitlines())
        yield from (Requirement(line) for line in lines if line and not line.startswith(("#", "%")))


def _pinned(file: str) -> dict[str, Version]:
    """Name -> version of a file of constraints."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pins}


def _oldest(requirement: Requirement) -> Version:
    [bound] = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
    return bound


def _headings() -> list[tuple[str, str]]:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## \[(.+?)\] - (.+)$", changelog, flags=re.MULTILINE)


def _tags_at_head() -> list[str]:
    git = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return [tag for tag in done.stdout.split() if re.match(r"v?\d", tag)] if done.returncode == 0 else []


def test_the_top_of_the_changelog_is_this_version() -> None:
    assert _headings()[0][0] == housekeeping.__version__


def test_changelog_of_the_first_release_is_short() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()

    assert len(_headings()) > 1 or len(lines) <= 80
    assert [line for line in lines if len(line) > 160] == []


def test_a_tag_at_this_commit_is_this_version_and_released() -> None:
    tags = _tags_at_head()

    assert tags in ([], [f"v{housekeeping.__version__}"])
    assert not tags or _headings()[0][1] != "unreleased"


def test_the_python_versions_that_are_claimed_are_those_that_tox_runs() -> None:
    setup, tox = _setup(), configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")

    claimed = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    tried = re.findall(r"\bpy3(\d+)\b", tox["tox"]["env_list"])

    assert claimed == [f"3.{minor}" for minor in tried]
    assert setup["options"]["python_requires"] == f">={claimed[0]}"
    assert setup["mypy"]["python_version"] == claimed[0]


def test_the_oldest_versions_that_are_allowed_are_those_that_are_tried() -> None:
    allowed = {canonicalize_name(each.name): _oldest(each) for each in _requirements(with_ours=False)}

    assert _pinned("constraints-oldest.txt") == allowed


def test_packages_whose_private_parts_are_used_have_an_upper_bound() -> None:
    bounded = {
        each.name for each in _requirements(with_ours=False) if "<" in {part.operator for part in each.specifier}
    }

    assert bounded >= {"cronsim", "dramatiq", "peewee", "periodiq", "pika", "python-dotenv", "redis"}


def test_the_versions_that_are_used_here_are_allowed() -> None:
    pinned = _pinned("constraints.txt")

    missing = [each.name for each in _requirements(with_ours=True) if canonicalize_name(each.name) not in pinned]
    assert missing == []
    refused = [
        str(each)
        for each in _requirements(with_ours=True)
        if not each.specifier.contains(pinned[canonicalize_name(each.name)])
    ]
    assert refused == []
