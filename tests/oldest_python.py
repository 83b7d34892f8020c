"""Check that every extra installs with constraints.txt on the oldest releases of each supported Python.

``python -m tests.oldest_python`` lets pip resolve all extras on the oldest interpreter of this machine, without
installing anything. It then compares each package's Requires-Python with the first release of each supported Python, so
that a pin that needs a later patch release is found on any machine.
"""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
_CONSTRAINTS: Final = ROOT / "constraints.txt"
_VERSION: Final = "import sys; print(*sys.version_info[:3], sep='.')"


@dataclass(frozen=True)
class Package:
    """A package that pip would install."""

    name: str
    version: str
    requires_python: str


def supported() -> list[str]:
    """Return the supported versions of Python, such as ``3.11``, oldest first."""
    classifiers = _setup()["metadata"]["classifiers"].split("\n")
    return [each.rsplit(" ", 1)[1] for each in classifiers if each.startswith("Programming Language :: Python :: 3.")]


def interpreters(path: str) -> Iterator[tuple[tuple[int, ...], Path]]:
    """Yield version and file of each supported Python in the folders of `path`, in pyenv, and in /usr/bin."""
    folders = [Path(folder) for folder in path.split(os.pathsep) if folder]
    pyenv = [found for folder in folders if folder.name == "shims" for found in folder.parent.glob("versions/*/bin")]
    for program in {
        folder / f"python{minor}" for folder in [*folders, *pyenv, Path("/usr/bin")] for minor in supported()
    }:
        if not os.access(program, os.X_OK):
            continue
        ended = subprocess.run([program, "-c", _VERSION], capture_output=True, text=True, timeout=60)
        # A shim of pyenv fails where its version is not switched on.
        if ended.returncode == 0:
            yield tuple(int(part) for part in ended.stdout.split(".")), program


def resolve(python: Path) -> list[Package]:
    """Return what pip would install on `python` for all extras together.

    The constraints name one version of each package, so what installs together installs one by one.

    Raises:
      SystemExit: When pip finds no versions that fit; its own words say why.
    """
    extras = ",".join(_setup()["options.extras_require"])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*pip, "--ignore-installed", "-c", str(_CONSTRAINTS), "--report", str(report), f"{ROOT}[{extras}]"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if ended.returncode:
            sys.exit(f"{ended.stderr}{ended.stdout}")
        described = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return [Package(each["name"], each["version"], each.get("requires_python", "")) for each in described]


def faults(packages: Iterable[Package], pinned: Iterable[str], releases: Iterable[str]) -> Iterator[str]:
    """Yield a line for each package that is not pinned, or that one of the releases of Python cannot install."""
    names = {canonicalize_name(name) for name in pinned}
    for package in packages:
        if canonicalize_name(package.name) not in names:
            yield f"{package.name} {package.version} is not in {_CONSTRAINTS.name}"
        refused = [release for release in releases if not SpecifierSet(package.requires_python).contains(release)]
        if refused:
            yield f"{package.name} {package.version} needs Python {package.requires_python}, not {', '.join(refused)}"


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def main() -> None:
    """Print what was resolved, and end with status 1 when a pin does not fit."""
    version, python = min(interpreters(os.environ.get("PATH", os.defpath)))
    packages = resolve(python)
    releases = [f"{minor}.0" for minor in supported()]
    own = _setup()["metadata"]["name"]
    lines = _CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    found = list(faults(packages, [own, *(line.split("==")[0] for line in lines)], releases))
    if found:
        sys.exit("\n".join(found))
    sys.stdout.write(
        f"{len(packages)} packages resolve on Python {'.'.join(map(str, version))} ({python}) "
        f"and accept Python {', '.join(releases)}\n"
    )


if __name__ == "__main__":
    main()
