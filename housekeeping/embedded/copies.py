"""Copies of programs that the servers' account cannot run in place, for example from a venv below /root.

The originals and the folders above them keep their permissions; only the copies are opened up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from housekeeping.embedded.processes import Account

_COPIES: Final = "programs"
_VERSION_SECONDS: Final = 60


def runnable_program(program: Path, account: Account, folder: Path) -> Path:
    """Return `program`, or a copy of it in `folder` if `account` cannot run the original."""
    if _runs(program, account):
        return program
    copy = folder / _COPIES / program.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(program, copy)
    _open_up(copy.parent)
    return copy


def runnable_postgres(program: Path, account: Account, folder: Path) -> Path:
    """Return `program` or a copy as `runnable_program` does, together with ``initdb`` and PostgreSQL's files."""
    if _runs(program, account) and _runs(program.with_name("initdb"), account):
        return program

    # Programs find their libraries by relative paths, so the layout is kept: PACKAGE/INSTALL/bin, lib and share; and in
    # wheels PACKAGE.libs beside the package or PACKAGE/.dylibs within it.
    install = program.parent.parent
    package = install.parent
    copies = folder / _COPIES / "postgres"
    copy = copies / package.name / install.name
    (copy / "bin").mkdir(parents=True)
    for name in ("initdb", program.name):
        shutil.copy(program.with_name(name), copy / "bin")
    for part in (install / "lib", install / "share", package.with_name(f"{package.name}.libs"), package / ".dylibs"):
        if part.is_dir():
            target = copies / part.relative_to(package.parent)
            shutil.copytree(part, target, ignore=shutil.ignore_patterns("*.a"))
    _open_up(folder / _COPIES)
    return copy / "bin" / program.name


def _runs(program: Path, account: Account) -> bool:
    try:
        output = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return output.returncode == 0


def _open_up(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            os.chmod(path, 0o755)
