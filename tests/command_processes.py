"""Processes of the command line that start with its imports done.

A Python process spends most of a short command's time on imports. So one process imports everything once and forks a
process for each command. The fork then runs ``python -m housekeeping`` with its own arguments, environment, folder and
output, and ends like any other process.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

_TOP: Final = Path(__file__).parents[1]
_PREPARED: Final = ("housekeeping.cli", "housekeeping.workers", "housekeeping.brokers", "housekeeping.sweeps")


class CommandProcesses:
    """Run commands, one at a time. The forking process starts with the first command."""

    def __init__(self) -> None:
        self._interpreter: Final = _read_by_the_interpreter(os.environ)
        self._forking: subprocess.Popen[str] | None = None

    def run(
        self, arguments: list[str], environment: Mapping[str, str], folder: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``housekeeping`` until it ends and return what it printed."""
        command = [sys.executable, "-m", "housekeeping", *arguments]
        if _read_by_the_interpreter(environment) != self._interpreter:
            return subprocess.run(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        forking = self._forking = self._forking or _start()
        assert forking.stdin is not None and forking.stdout is not None
        with TemporaryDirectory() as outputs:
            forking.stdin.write(f"{json.dumps([arguments, dict(environment), str(folder), outputs])}\n")
            forking.stdin.flush()
            if not select.select([forking.stdout], [], [], timeout_s)[0]:
                self.close()
                raise subprocess.TimeoutExpired(command, timeout_s)
            status = int(forking.stdout.readline())
            printed = [Path(outputs, name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(command, status, *printed)

    def close(self) -> None:
        """Kill the forking process and an unfinished command."""
        if self._forking is not None:
            os.killpg(self._forking.pid, signal.SIGKILL)
            self._forking.communicate()
            self._forking = None


def _read_by_the_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Python and a startup hook read before the command: a fork would miss it."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON") or name == "BROKEN_TWIN"}


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.command_processes"],
        cwd=_TOP,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _import_everything() -> None:
    """Import what any command may use, but leave to the forks what reads the environment or the terminal."""
    for package in _PREPARED:
        for module in pkgutil.walk_packages(pkgutil.resolve_name(package).__path__, f"{package}."):
            __import__(module.name)
    for name in [name for name in sys.modules if name.startswith("housekeeping.cli")]:
        del sys.modules[name]
    gc.freeze()  # else the end of a fork visits and copies all of it


def _fork_for_each_request() -> list[Any]:
    """Read requests until stdin ends. Return the request in the fork that serves it, and nowhere else."""
    for line in sys.stdin:
        forked = os.fork()
        if not forked:
            request: list[Any] = json.loads(line)
            return request
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])}\n")
        sys.stdout.flush()
    sys.exit()


def _become(arguments: list[str], environment: dict[str, str], folder: str, outputs: str) -> None:
    for number, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{outputs}/stdout", os.O_WRONLY | os.O_CREAT),
        (2, f"{outputs}/stderr", os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, mode)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    sys.path[0] = os.getcwd()
    sys.argv[1:] = arguments
    runpy.run_module("housekeeping", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _import_everything()
    _become(*_fork_for_each_request())
