"""Distribution as it is uploaded: built, installed into an empty environment and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

import housekeeping
from tests.internals.core import PREFIX

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
_SOURCES: Final = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg")
_PATIENCE_S: Final = 600  # a package index may be slow


@dataclass(frozen=True)
class Built:
    """Source distribution, and the wheel built from it."""

    sdist: Path
    wheel: Path

    def files(self) -> set[str]:
        """Return the wheel's files by path."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name for name in archive.namelist() if not name.endswith("/")}


@dataclass(frozen=True)
class Environment:
    """Python with the wheel installed without extras, and an empty working folder."""

    python: Path
    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment without any settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "PYTHON"))}
        program = self.python.with_name(command[0])
        return subprocess.run(
            [program, *command[1:]],
            env=kept,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for name in _SOURCES:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "housekeeping", source / "housekeeping", ignore=shutil.ignore_patterns("__pycache__"))
    # Files that an editor or a crash leaves behind must not be distributed.
    (source / "housekeeping/web/.secrets.env").write_text("TOKEN=x")
    (source / "housekeeping/cli/main.py.orig").write_text("")
    command = [sys.executable, "-W", "ignore", "-m", "build", "--outdir", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_S)
    [sdist], [wheel] = made.glob("*.tar.gz"), made.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv", with_pip=True)
    (folder / "here").mkdir()
    environment = Environment(folder / "venv/bin/python", folder / "here")
    constraints = str(ROOT / "constraints.txt")
    done = environment.run("python", "-m", "pip", "install", "--quiet", "-c", constraints, str(built.wheel))
    assert done.returncode == 0, done.stderr
    return environment


def test_distribution_has_its_own_name_and_the_command_stays(built: Built, installed: Environment) -> None:
    done = installed.run("housekeeping", "--version")

    assert built.wheel.name == f"dramatiq_housekeeping-{housekeeping.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"dramatiq_housekeeping-{housekeeping.__version__}.tar.gz"
    assert (done.returncode, done.stdout) == (0, f"housekeeping, version {housekeeping.__version__}\n")
    names = installed.run("python", "-m", "pip", "list", "--format=freeze").stdout.split()
    assert [name for name in names if "housekeeping" in name] == [f"dramatiq-housekeeping=={housekeeping.__version__}"]


def test_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    in_wheel = {name for name in built.files() if ".dist-info/" not in name}

    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "housekeeping"]
    known = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert in_wheel == {name for name in known if (ROOT / name).exists()}


def test_source_distribution_has_the_files_it_refers_to(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix() for name in archive.getnames()}

    assert {*_SOURCES, "housekeeping/py.typed"} <= names


def test_command_line_works_without_any_extra(installed: Environment) -> None:
    done = installed.run("housekeeping", "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert "doctor" in done.stdout


def test_worker_process_names_a_missing_setting_in_one_line(installed: Environment) -> None:
    done = installed.run("dramatiq", "housekeeping.app", "-p", "1")

    assert [line for line in done.stderr.splitlines() if line.startswith("housekeeping:")] == [
        "housekeeping: HOUSEKEEPING_REDIS_URL is not set; it should be a URL such as redis://host:6379/0"
    ]


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        (("plan", "user_status_cleanup.batch"), "HOUSEKEEPING_DATABASE_URL is not set"),
        (("worker",), "is not set; it should be a URL such as"),
        (("demo",), "pip install '.[embedded]'"),
        (("web",), "pip install '.[web]'"),
    ],
)
def test_missing_extra_is_one_line_with_its_install_command(
    installed: Environment, command: tuple[str, ...], way_out: str
) -> None:
    done = installed.run("housekeeping", *command)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert way_out in done.stderr


def test_type_checkers_find_the_types_of_the_installed_package(installed: Environment) -> None:
    code = """
from datetime import timedelta
from typing import assert_type
import housekeeping

assert_type(housekeeping.throttle("a", 1, timedelta(minutes=1)), bool)
housekeeping.throttle("a", "1", timedelta(minutes=1))  # type: ignore[arg-type]
"""
    (installed.folder / "theirs.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={installed.python}", "theirs.py"]

    done = subprocess.run(command, cwd=installed.folder, capture_output=True, text=True, timeout=_PATIENCE_S)

    assert done.returncode == 0, done.stdout
