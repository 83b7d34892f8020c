"""Process of one contestant's turn, started by ``rounds.py``."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    """Read the contestant from stdin; prepare and measure its work."""
    # Imported here, because the interpreters of `queue_programs` lack the imports of these contestants.
    from benchmarks.catalogue import TURNS
    from benchmarks.comparison import Place

    told = json.loads(sys.stdin.readline())
    contestant = TURNS[told["comparison"]].contestants[told["contestant"]]
    measured(contestant(Place(told["database_url"], told["redis_url"], told["rows"], Path(told["folder"]))))


def measured(work: Callable[[], object]) -> None:
    """Report readiness, wait for a line, do the work, and print the costs as JSON."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    _say("ready")
    sys.stdin.readline()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Kilobytes, but bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    _say(json.dumps({"seconds": seconds, "own_seconds": own, "resident_bytes": after.ru_maxrss * unit}))
    sys.stdin.readline()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
