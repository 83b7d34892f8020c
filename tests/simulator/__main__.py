"""Command ``python -m tests.simulator --schedules 10000 --seed 0``."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime

from tests.simulator import locks

locks.install()

from tests.simulator.runner import Tally, play_many, play_one  # noqa: E402
from tests.simulator.schedule import Verdict  # noqa: E402
from tests.simulator.twins import TWINS  # noqa: E402

_SHOWN = 60  # events of a schedule that broke an invariant


def main() -> int:
    """Play schedules. Return 1 if an invariant was broken or a twin was not caught."""
    options = _options()
    if options.replay is not None:
        return _replay(options.replay, options.twin, options.verbose)
    if options.twins:
        names = options.only.split(",") if options.only else list(TWINS)
        return max(_catch(name, options.seed, options.schedules, options.processes) for name in names)
    tally = Tally()
    for tally in play_many(options.seed, options.schedules, options.processes, options.twin):
        if options.verbose:
            _say(f"{tally.schedules} schedules, {tally.schedules / tally.seconds * 60:.0f} a minute", end="\r")
    _say(f"{tally.schedules} schedules in {tally.seconds:.1f} s: {tally.schedules / tally.seconds * 60:.0f} a minute")
    _say(f"{tally.points} points of I/O; faults: {dict(sorted(tally.struck.items()))}")
    for verdict in tally.broken:
        _show(verdict)
    return 1 if tally.broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--twin", choices=list(TWINS), help="play with this broken twin")
    parser.add_argument("--twins", action="store_true", help="play with each broken twin until it is caught")
    parser.add_argument("--only", help="of the twins, these, with commas between")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one schedule, and show all of it")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def _catch(name: str, seed: int, schedules: int, processes: int) -> int:
    """Play with a broken twin until a schedule fails that passes without it. Return 1 if none does."""
    first, end = seed, seed + schedules
    while first < end:
        *_, tally = play_many(first, end - first, processes, name)
        if not tally.broken:
            break
        caught = min(tally.broken, key=lambda verdict: verdict.seed)
        *_, without = play_many(caught.seed, 1, 1)
        if not without.broken:
            by = ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in caught.broken))
            _say(f"caught within {caught.seed - seed + 1:5} schedules: {name} ({by})")
            return 0
        _say(f"seed {caught.seed} is broken without the twin {name}, too")
        first = caught.seed + 1
    _say(f"NOT CAUGHT within {schedules} schedules: {name}")
    return 1


def _replay(seed: int, twin: str | None, verbose: bool) -> int:
    verdict = play_one(seed, twin)
    _show(verdict, len(verdict.history) if verbose else _SHOWN)
    _say(f"history {verdict.digest}")
    return 1 if verdict.broken else 0


def _show(verdict: Verdict, events: int = _SHOWN) -> None:
    _say(f"seed {verdict.seed}: {len(verdict.broken)} broken")
    for when, where, what, *details in verdict.history[-events:]:
        moment = datetime.fromtimestamp(when, UTC).strftime("%H:%M:%S.%f")[:-3]
        _say(f"  {moment} {where:12} {what}: {' '.join(map(str, details))}")
    for reason in verdict.broken:
        _say(f"  BROKEN {reason}")
    if verdict.broken:
        _say(f"again: python -m tests.simulator --replay {verdict.seed} --verbose")


def _say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets must depend on the seed alone.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulator", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
