"""Processes of the command line that start with its imports done.

A Python process spends most of a short command's time on imports. So one process imports everything once and forks a
process for each command. The fork then runs ``python -m housekeeping`` with the arguments, environment, folder and
open files of the program ``housekeeping`` that asked for it, and that program ends as the fork does.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

_TOP: Final = Path(__file__).parents[1]
_PREPARED: Final = ("housekeeping.cli", "housekeeping.workers", "housekeeping.brokers", "housekeeping.sweeps")
#: Started without the packages of site and without the environment's own wishes, in a fiftieth of a second.
_PROGRAM: Final = """#!{python} -IS
import json, os, signal, socket, sys

own = {{name: value for name, value in os.environ.items() if name.startswith("PYTHON") or name == "BROKEN_TWIN"}}
# A fork would miss what Python and a startup hook read before the command; and servers fork or run for long.
if own != {own!r} or not {{"worker", "scheduler", "serve", "web", "demo"}}.isdisjoint(sys.argv):
    os.execv({python!r}, [{python!r}, "-m", "housekeeping", *sys.argv[1:]])
passed_on = {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP}}
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
asked = socket.socket(socket.AF_UNIX)
asked.connect({address!r})
socket.send_fds(asked, [b"x"], [0, 1, 2])
asked.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\\n")
answers = asked.makefile()
process = int(answers.readline())
for number in passed_on:
    signal.signal(number, lambda number, _: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class CommandProcesses:
    """A program ``housekeeping`` for as long as this object is not closed.

    Attributes:
      folder: The program's folder, for the ``PATH``.
    """

    def __init__(self) -> None:
        self._kept = TemporaryDirectory()
        self.folder: Final = Path(self._kept.name)
        self._program: Final = self.folder / "housekeeping"
        address = f"{self.folder}/socket"
        own = {name: value for name, value in os.environ.items() if name.startswith("PYTHON") or name == "BROKEN_TWIN"}
        self._program.write_text(_PROGRAM.format(python=sys.executable, own=own, address=address))
        self._program.chmod(stat.S_IRWXU)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()  # programs wait until the imports are done
            self._forking = subprocess.Popen(
                [sys.executable, "-m", "tests.command_processes", str(listening.fileno())],
                cwd=_TOP,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )

    def run(
        self, arguments: list[str], environment: Mapping[str, str], folder: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``housekeeping`` until it ends and return what it printed."""
        return subprocess.run(
            [str(self._program), *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def close(self) -> None:
        """Kill the forking process and unfinished commands."""
        os.killpg(self._forking.pid, signal.SIGKILL)
        self._forking.wait()
        self._kept.cleanup()


def _import_everything() -> None:
    """Import what any command may use, but leave to the forks what reads the environment or the terminal."""
    for package in _PREPARED:
        for module in pkgutil.walk_packages(pkgutil.resolve_name(package).__path__, f"{package}."):
            __import__(module.name)
    for name in [name for name in sys.modules if name.startswith("housekeeping.cli")]:
        del sys.modules[name]
    gc.freeze()  # else the end of a fork visits and copies all of it


def _fork_for_each_program(listening: socket.socket) -> tuple[list[Any], list[int]]:
    """Accept programs for ever. Return the request and the open files in the fork that serves them, nowhere else."""
    while True:
        asked, _ = listening.accept()
        if not os.fork():
            listening.close()
            files = socket.recv_fds(asked, 1, 3)[1]
            with asked.makefile() as requests:
                request: list[Any] = json.loads(requests.readline())
            forked = os.fork()
            if not forked:
                asked.close()
                return request, files
            for each in files:
                os.close(each)
            _await(asked, forked)
        asked.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _await(asked: socket.socket, forked: int) -> None:
    """Tell the program how the fork ends. The fork is killed if the program is."""

    def kill_with_the_program() -> None:
        asked.recv(1)
        os.kill(forked, signal.SIGKILL)

    asked.sendall(f"{forked}\n".encode())
    threading.Thread(target=kill_with_the_program, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    asked.sendall(f"{status}\n".encode())
    os._exit(0)


def _become(request: list[Any], files: list[int]) -> None:
    arguments, environment, folder = request
    for number, opened in enumerate(files):
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    sys.path[0] = os.getcwd()
    sys.argv[1:] = arguments
    runpy.run_module("housekeeping", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _import_everything()
    _become(*_fork_for_each_program(socket.socket(fileno=int(sys.argv[1]))))
