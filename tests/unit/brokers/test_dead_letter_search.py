"""Filters and pages of dead letters, without a broker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dramatiq import Message

from housekeeping.testing.stubs import ManualClock
from tests.internals.brokers import (
    DeadLetter,
    LetterAction,
    LetterFilter,
    LetterPosition,
    LetterResult,
    apply,
    describe_choice,
    search,
)
from tests.internals.core import RedisUnavailable, WrongArgument

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


def letter(broker_id: str, *, ago_s: float | None = 0, actor: str = "charge", error: str = "timed out") -> DeadLetter:
    died_ms = 0 if ago_s is None else (NOW - timedelta(seconds=ago_s)).timestamp() * 1000
    message: Message[Any] = Message("default", actor, (), {}, {"traceback": f"ValueError: {error}"})
    return DeadLetter(broker_id, "default", died_ms, message.encode())


class Store:
    """Store of these letters, newest first."""

    def __init__(self, *letters: DeadLetter) -> None:
        self.letters = list(letters)

    def counts(self) -> dict[str, int]:
        return {"default": len(self.letters)}

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        for each in self.letters:
            if died_until is None or each.died_at is None or each.died_at <= died_until:
                yield each

    def change_each(self, action: LetterAction, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        for each in letters:
            if each.broker_id == "c":
                raise RedisUnavailable("Redis did not answer")
            yield LetterResult(each.broker_id, "requeued")


def ids(letters: Sequence[DeadLetter]) -> list[str]:
    return [each.broker_id for each in letters]


@pytest.mark.parametrize(
    ("sought", "found"),
    [
        (LetterFilter(), ["c", "b", "a"]),
        (LetterFilter(actor="charge"), ["c", "a"]),
        (LetterFilter(error="TIMED"), ["b", "a"]),
        (LetterFilter(since=NOW - timedelta(seconds=10)), ["b", "a"]),
        (LetterFilter(until=NOW - timedelta(seconds=10)), ["c"]),
        (LetterFilter(queue="other"), []),
        (LetterFilter(actor="charge", error="disk"), ["c"]),
    ],
)
def test_filter_finds_the_letters_that_meet_all_conditions(sought: LetterFilter, found: list[str]) -> None:
    store = Store(letter("a"), letter("b", ago_s=10, actor="mail"), letter("c", ago_s=20, error="disk full"))

    assert ids(search(store, sought).letters[::-1]) == found


@pytest.mark.parametrize(
    ("sought", "text"),
    [
        (LetterFilter(), "2 dead letters: all"),
        (LetterFilter("mail", "charge"), "2 dead letters: queue 'mail', actor 'charge'"),
        (LetterFilter(error="a://b:hunter2@c"), "2 dead letters: error 'a://b:***@c'"),
        (
            LetterFilter(since=NOW - timedelta(days=1), until=NOW),
            "2 dead letters: since 2026-11-22 12:00:00 UTC, until 2026-11-23 12:00:00 UTC",
        ),
        (None, "a, b"),
    ],
)
def test_choice_of_letters_is_described_for_the_log_of_actions(sought: LetterFilter | None, text: str) -> None:
    broken = DeadLetter("a", "default", 0, b"")

    assert describe_choice([broken, dataclasses.replace(broken, broker_id="b")], sought) == text


def test_masked_secret_cannot_be_searched_for() -> None:
    store = Store(letter("a", error="no answer from amqp://me:hunter2@host/"))

    assert search(store, LetterFilter(error="hunter2")).letters[::-1] == []
    assert ids(search(store, LetterFilter(error="me:***@host")).letters[::-1]) == ["a"]


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_pages_show_each_letter_once(size: int) -> None:
    store = Store(*(letter(str(number), ago_s=number // 3) for number in range(9)), letter("last", ago_s=None))
    seen: list[str] = []
    page = search(store, LetterFilter(), size)
    while page.older is not None:
        seen += ids(page.letters)
        page = search(store, LetterFilter(), size, LetterPosition.parse(str(page.older)))

    assert [*seen, *ids(page.letters)] == [*(str(number) for number in range(9)), "last"]


def test_page_continues_although_its_last_letter_was_requeued() -> None:
    store = Store(*(letter(str(number), ago_s=number) for number in range(4)))
    page = search(store, LetterFilter(), 2)
    del store.letters[1]

    assert ids(search(store, LetterFilter(), 2, page.older).letters) == ["2", "3"]


def test_page_after_a_newer_place_keeps_the_end_of_the_filter() -> None:
    store = Store(letter("a"), letter("b", ago_s=10))
    sought = LetterFilter(until=NOW - timedelta(seconds=9))

    assert ids(search(store, sought, 10, LetterPosition.of(letter("gone", ago_s=-1))).letters) == ["b"]


def test_search_for_a_rare_error_ends_at_its_time_limit_and_continues() -> None:
    store = Store(*(letter(str(number), ago_s=number) for number in range(5)), letter("x", ago_s=9, error="disk"))
    sought, second = LetterFilter(error="disk"), timedelta(seconds=1)

    # The clock advances by a second with each letter; exactly the limit is not too late.
    first = search(store, sought, 10, max_time=4 * second, clock=ManualClock(tick=second))
    last = search(store, sought, 10, first.older, max_time=4 * second, clock=ManualClock(tick=second))

    assert (first.letters, first.searched, first.complete) == ([], 5, False)
    assert (ids(last.letters), last.older, last.searched, last.complete) == (["x"], None, 1, True)


def test_note_to_a_very_long_error_can_be_searched_for() -> None:
    store = Store(letter("a", error="x" * 30_000), letter("b"))

    assert ids(search(store, LetterFilter(error="CHARACTERS)")).letters[::-1]) == ["a"]


@pytest.mark.parametrize("text", ["", "7", "x-7", "1-", "999999999999999-x"])
def test_malformed_place_is_rejected(text: str) -> None:
    with pytest.raises(WrongArgument, match="not a place"):
        LetterPosition.parse(text)


def test_unavailable_broker_ends_a_bulk_change_and_says_what_is_left() -> None:
    store = Store(*(letter(name) for name in "abcde"))

    result = apply(store, "requeue", store.letters)

    assert [each.id for each in result.results] == ["a", "b"]
    assert str(result) == "2 requeued; 3 dead letters not tried: Redis did not answer"
