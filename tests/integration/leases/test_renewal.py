"""Background renewal of leases (L2), in real threads and processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from tests.internals.core import RedisUnavailable
from tests.internals.leases import Renewal, Renewals, elapsed, renewal

TTL = timedelta(seconds=30)
DUE_S = 10  # a third of the ttl: asked for so long ago, it is due now and good for long enough
PATIENCE_S = 60

_SLEEPER = """
import sys, threading
from datetime import timedelta
from housekeeping.leases.renewal import elapsed
from housekeeping.leases.renewal import renewals
kept = renewals.start("lease", lambda: True, timedelta(seconds=0.6), elapsed())
print("held", flush=True)
sys.stdin.readline()
print("lost" if kept.lost else "ours", flush=True)
"""

_FORKER = """
import os, sys
from datetime import timedelta
from housekeeping.leases.renewal import elapsed
from housekeeping.leases.renewal import renewals
kept = renewals.start("parent's", lambda: True, timedelta(seconds=30), elapsed())
if os.fork() == 0:
    import threading
    renewed = threading.Event()
    own = renewals.start("own", lambda: renewed.set() or True, timedelta(seconds=30), elapsed() - 10)
    os._exit(0 if kept.lost and renewed.wait(60) and not own.lost else 1)
status = os.waitstatus_to_exitcode(os.wait()[1])
sys.exit(status or kept.lost)
"""


@pytest.fixture
def now() -> list[float]:
    """The time, in a list so that it can be set."""
    return [100.0]


class _Logged(logging.Handler):
    """Handler that sets its event when a line with the text is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.event.set()


def said(say: Callable[[], object]) -> Callable[[], bool]:
    """A renewal that succeeds, and says so."""

    def renew() -> bool:
        say()
        return True

    return renew


def kept_at(now: list[float], answers: Sequence[bool | Exception]) -> Renewal:
    left = list(answers)

    def renew() -> bool:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Renewal("lease", renew, TTL, now[0], lambda: now[0])


def test_key_is_renewed_at_a_third_of_its_ttl(now: list[float]) -> None:
    # L2
    kept = kept_at(now, [True])
    assert kept.due_at == 110

    now[0] = 111
    assert kept.step()

    assert kept.due_at == 121
    now[0] = 111 + 27
    lost_at_the_limit = kept.lost
    now[0] += 0.01
    assert (lost_at_the_limit, kept.lost) == (False, True)


def test_renewal_is_lost_after_nine_tenths_of_the_ttl(now: list[float]) -> None:
    # L2
    kept = kept_at(now, [RedisUnavailable("away")] * 2 + [True])

    now[0] = 110
    assert kept.step() and kept.due_at == 111
    now[0] = 127
    assert kept.step()
    lost_at_the_limit = kept.lost
    now[0] = 127.01

    assert (lost_at_the_limit, kept.lost) == (False, True)
    assert not kept.step(), "it is no longer renewed either"


def test_renewal_is_lost_at_once_if_another_holds_the_key(now: list[float]) -> None:
    # L2
    kept = kept_at(now, [False])

    assert not kept.step()
    assert kept.lost


def test_ttl_counts_from_the_request_not_from_a_late_answer(now: list[float]) -> None:
    # L2: the process may have been stopped in between
    def slow() -> bool:
        now[0] += 60
        return True

    kept = Renewal("lease", slow, TTL, now[0], lambda: now[0])
    kept.step()

    assert kept.lost


def test_many_keys_are_renewed_until_each_is_stopped() -> None:
    # L2
    renewals, renewed = Renewals(), [threading.Semaphore(0) for _ in range(20)]

    def once(number: int) -> bool:
        renewed[number].release()
        return True

    def keep(number: int) -> Renewal:
        return renewals.start(f"lease {number}", lambda: once(number), TTL, elapsed() - DUE_S)

    all_kept = [keep(number) for number in range(20)]

    assert all(each.acquire(timeout=PATIENCE_S) for each in renewed)
    assert not any(kept.lost for kept in all_kept)
    for kept in all_kept:
        renewals.stop(kept)
    assert not renewals._active, "what is stopped is forgotten at once, however long its ttl"


def test_short_ttl_is_renewed_before_long_ones() -> None:
    # L2
    renewals, renewed = Renewals(), threading.Event()
    long = renewals.start("long", lambda: True, timedelta(hours=1), elapsed())
    while renewals._renewing._wakes_at == 0:
        time.sleep(0.001)

    short = renewals.start("short", said(renewed.set), TTL, elapsed() - DUE_S + 0.1)

    assert renewed.wait(PATIENCE_S)
    renewals.stop(short)
    renewals.stop(long)


def test_an_error_of_one_does_not_end_the_renewal_of_others(caplog: pytest.LogCaptureFixture) -> None:
    renewals, failed, renewed = Renewals(), threading.Event(), threading.Event()

    def broken() -> bool:
        failed.set()
        raise ZeroDivisionError

    bad = renewals.start("bad", broken, TTL, elapsed() - DUE_S)
    assert failed.wait(PATIENCE_S)
    good = renewals.start("good", said(renewed.set), TTL, elapsed() - DUE_S)

    assert renewed.wait(PATIENCE_S)
    assert "Could not renew bad" in caplog.text
    renewals.stop(bad)
    renewals.stop(good)


def test_failing_lost_lease_callback_does_not_block_the_others() -> None:
    renewals, tried, told, logged = Renewals(), threading.Event(), threading.Event(), _Logged("Could not renew bad")
    logging.getLogger(renewal.__name__).addHandler(logged)

    def too_many_threads() -> None:
        tried.set()
        raise RuntimeError("can't start new thread")

    bad = renewals.start("bad", lambda: True, TTL, elapsed() - 2 * TTL.total_seconds(), on_lost=too_many_threads)
    assert tried.wait(PATIENCE_S)
    late = renewals.start("late", lambda: True, TTL, elapsed() - 2 * TTL.total_seconds(), on_lost=told.set)

    assert told.wait(PATIENCE_S)
    assert logged.event.wait(PATIENCE_S)
    logging.getLogger(renewal.__name__).removeHandler(logged)
    renewals.stop(bad)
    renewals.stop(late)


@pytest.mark.slow
def test_process_suspended_past_its_ttl_has_lost_its_lease() -> None:
    # L2, L3: it asks no server, and its own thread may not have run yet
    with subprocess.Popen(
        [sys.executable, "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.7)  # the operating system's clock decides
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()

        assert process.stdout.readline() == "lost\n"


def test_forked_child_renews_only_its_own_keys() -> None:
    # L1, L2
    assert subprocess.run([sys.executable, "-c", _FORKER], timeout=60, check=False).returncode == 0
