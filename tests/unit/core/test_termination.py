"""A process ends on a signal, wherever the signal meets it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import signal, time
from housekeeping.core.interrupts import exit_on

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

done = exit_on(signal.SIGTERM)
try:
    Dying()
    print("still running", flush=True)
    time.sleep(60)
finally:
    done()
    signal.raise_signal(signal.SIGTERM)
    print("cleaned up")
"""


def test_signal_within_a_destructor_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50)

    assert (ended.returncode, ended.stdout) == (0, "still running\ncleaned up\n")
    assert "SystemExit" in ended.stderr, "Python ignored the first one"
