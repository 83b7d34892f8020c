"""Runs a command that must not outlive the demo, however the demo ends, SIGKILL included.

A program of its own: it holds the reading end of a pipe to the demo, and when that closes while
the command runs, it kills the command with all its children. SIGTERM it passes on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main(command: list[str]) -> int:
    """Run the command in a session of its own; returns its exit status, or the signal that ended it."""
    signals, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while running.poll() is None:
        ready, _, _ = select.select([sys.stdin, signals], [], [])
        if sys.stdin in ready:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        elif signal.SIGTERM in os.read(signals, 64):
            # Only the first process: a worker that hears of it twice, from its group as well, ends at once.
            running.terminate()
    exit_status: int = running.wait()
    return abs(exit_status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
