from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from housekeeping.testing import ManualClock
from housekeeping.web import rate_limit
from housekeeping.web.rate_limit import Guesses

HERE = "192.0.2.7"


@pytest.fixture
def tried(clock: ManualClock) -> Guesses:
    """Nine wrong tokens from one address."""
    tried = Guesses(clock.monotonic)
    for _ in range(9):
        tried.was_wrong(HERE)
    return tried


def test_after_ten_wrong_tokens_an_address_waits_for_a_minute(tried: Guesses, clock: ManualClock) -> None:
    before = tried.wait_s(HERE)
    tried.was_wrong(HERE)
    after = tried.wait_s(HERE)
    clock.advance(timedelta(seconds=59))
    nearly = tried.wait_s(HERE)
    clock.advance(timedelta(seconds=1))

    assert (before, after, nearly, tried.wait_s(HERE)) == (0, 60, 1, 0)


def test_other_addresses_do_not_wait(tried: Guesses) -> None:
    tried.was_wrong(HERE)

    assert [tried.wait_s(address) for address in ("192.0.2.8", "2001:db8::1", None)] == [0, 0, 0]


def test_one_networks_ipv6_addresses_are_one(clock: ManualClock) -> None:
    tried = Guesses(clock.monotonic)
    for number in range(10):
        tried.was_wrong(f"2001:db8::{number:x}")

    assert (tried.wait_s("2001:db8::ffff"), tried.wait_s("2001:db8:0:1::1")) == (60, 0)


def test_no_more_addresses_are_remembered_than_there_is_room_for(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit, "_ADDRESSES", 3)
    tried = Guesses(clock.monotonic)
    for number in range(5):
        tried.was_wrong(f"192.0.2.{number}")

    assert list(tried._wrong) == ["192.0.2.2", "192.0.2.3", "192.0.2.4"]


def test_threads_that_guess_at_once_are_all_counted(clock: ManualClock) -> None:
    tried, ready = Guesses(clock.monotonic), threading.Barrier(4, timeout=10)

    def guess() -> None:
        ready.wait()
        for _ in range(3):
            tried.was_wrong(HERE)

    threads = [threading.Thread(target=guess) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert tried.wait_s(HERE) == 60
