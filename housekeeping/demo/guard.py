"""Wrapper process for a command that must not outlive the demo, even after SIGKILL.

It holds the reading end of a pipe to the demo. When that closes while the command runs, it kills the command with all
its children. SIGTERM is passed on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main(command: list[str]) -> int:
    """Run the command in its own session; return its exit status, or the signal that ended it."""
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while running.poll() is None:
        ready, _, _ = select.select([sys.stdin, signals], [], [])
        if sys.stdin in ready:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        elif signal.SIGTERM in os.read(signals, 64):
            # Only the first process: a worker that gets the signal twice, also by its group, ends without finishing.
            running.terminate()
    exit_status: int = running.wait()
    return abs(exit_status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
