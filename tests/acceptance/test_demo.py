"""The command ``housekeeping demo``."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pyte
import pytest

from tests.acceptance.processes import read_terminal
from tests.internals.core import PREFIX

#: Starts many processes.
pytestmark = pytest.mark.slow

_PATIENCE_S: Final = 60
_FOOTER: Final = "Ctrl-C ends the demo; dashboard: http://127.0.0.1:"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder where the demo starts, with settings for real work that it must ignore."""
    (tmp_path / ".env").write_text(
        "HOUSEKEEPING_DATABASE_URL=postgresql://localhost:1/real\n"
        "HOUSEKEEPING_NAMESPACE=real\n"
        'HOUSEKEEPING_WORKERS={"user_status_cleanup.batch": {"enabled": false}}\n'
    )
    return tmp_path


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return the demo's temporary folder; its path is short, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def backends(temporary: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    embedded = {name: value for name, value in os.environ.items() if name.startswith(f"{PREFIX}EMBEDDED")}
    return kept | embedded | {"TMPDIR": str(temporary), f"{PREFIX}REDIS_URL": "redis://localhost:1/0"}


def _processes(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the demo's processes: servers, supervisor, worker, scheduler and their children."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        children: list[psutil.Process] = psutil.Process(demo.pid).children(recursive=True)
        commands = [_command(each) for each in children]
        # The worker twice: it has started a child process.
        if "housekeeping scheduler" in commands and commands.count("housekeeping worker") > 1:
            return children
        time.sleep(0.02)
    raise AssertionError("worker and scheduler did not start")


def _command(process: psutil.Process) -> str:
    try:
        program, *arguments = process.cmdline() or [""]
    except psutil.Error:  # it has just ended
        return ""
    return " ".join(arguments[1:]) if arguments[:1] == ["-m"] else program


def _assert_gone(processes: list[psutil.Process], temporary: Path) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_PATIENCE_S)
    # In a container whose first process reaps no zombies, ended processes stay listed.
    assert [_command(each) for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    deadline = time.monotonic() + _PATIENCE_S
    while list(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def test_finished_demo_shows_its_changes_and_removes_everything(
    folder: Path, backends: dict[str, str], temporary: Path
) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "housekeeping", "demo", "--once"],
        env=backends,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (finished.returncode, finished.stderr) == (0, "")
    (due,) = [line for line in finished.stdout.splitlines() if line.startswith("  due (")]
    before, after = (int(number.replace(",", "")) for number in due.split()[-2:])
    # The remaining rows are locked by another session, or became due in the meantime.
    assert before >= 40_000 and 250 <= after < 1_000
    assert " tables (housekeeping coverage): audit_events\n" in finished.stdout
    (items,) = [line.split()[-2:] for line in finished.stdout.splitlines() if line.startswith("  items of purchases")]
    assert items == ["60,000", "40,500"]
    erased = finished.stdout.partition("one customer erased (housekeeping receipt 1)")[2]
    table = erased.partition("\nproof: ")[0]  # after the receipt come steps, such as "  8.6 s  stopping"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines() if line.startswith("  ")}
    assert rows.pop("ROWS") == "KEPT BECAUSE"
    assert rows == {
        "account": "deleted 1 -",
        "purchase": "deleted 10 -",
        "purchase_item": "deleted 100 -",
        "invoice": "anonymised 1 tax law",
    }
    assert "proof: nothing is left in 4 tables\n" in erased
    assert max(len(line) for line in erased.splitlines()) <= 80
    assert list(temporary.iterdir()) == []


def test_interrupted_demo_does_not_exit_as_finished(folder: Path, backends: dict[str, str], temporary: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "demo", "--once"],
        env=backends | {"PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert demo.stdout is not None
    assert b" run in " in demo.stdout.readline()

    demo.terminate()
    said, _ = demo.communicate(timeout=_PATIENCE_S)

    assert (demo.returncode, b"Traceback" in said) == (130, False), said.decode()
    assert b"servers stopped, everything removed" in said
    assert list(temporary.iterdir()) == []


def test_killed_demo_leaves_nothing_behind(folder: Path, backends: dict[str, str], temporary: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "demo"], env=backends, cwd=folder, stdout=subprocess.DEVNULL
    )
    running = _processes(demo)

    demo.kill()
    demo.wait(_PATIENCE_S)

    _assert_gone(running, temporary)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (140, 45)])
def test_demo_fits_its_terminal_and_restores_it(
    folder: Path, backends: dict[str, str], temporary: Path, columns: int, lines: int
) -> None:
    controller, child_terminal = pty.openpty()
    fcntl.ioctl(child_terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    kept = {name: value for name, value in backends.items() if name not in ("COLUMNS", "LINES")}
    demo = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "demo"],
        env=kept | {"TERM": "xterm"},
        cwd=folder,
        stdout=child_terminal,
        stderr=child_terminal,
    )
    os.close(child_terminal)
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    shown = b""
    # An ended run, and a completely drawn screen.
    while not ("done" in "".join(_below("LAST RUNS OF", screen)) and _FOOTER in screen.display[-1]):
        shown += (piece := os.read(controller, 4096))
        stream.feed(piece)
    running = _processes(demo)

    drawn = list(screen.display)
    address, _, token = drawn[-1].split("dashboard: ")[1].strip().partition(" token: ")
    with urllib.request.urlopen(address, timeout=_PATIENCE_S) as page:
        answer = page.read().decode()
    pause = urllib.request.Request(
        f"{address}workers/ci.stuck_jobs/pause", b"reason=peak", {"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(pause, timeout=_PATIENCE_S) as page:  # raises an error if the token is wrong
        paused = page.status
    demo.send_signal(signal.SIGINT)
    while (more := read_terminal(controller)) != b"":
        shown += more

    assert demo.wait(_PATIENCE_S) == 0
    assert drawn[0].startswith("WORKER ")
    assert sum("user_status_cleanup.batch" in line for line in drawn) >= 1
    assert "user_status_cleanup" in answer and paused == 200
    assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown  # the alternate screen, and back
    assert b"Traceback" not in shown
    _assert_gone(running, temporary)


def _below(header: str, screen: pyte.Screen) -> list[str]:
    first = next((number for number, line in enumerate(screen.display) if line.startswith(header)), len(screen.display))
    return screen.display[first + 1 :]
