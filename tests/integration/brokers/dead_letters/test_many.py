"""Many dead letters at once: pages, bulk requeue and bulk delete."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dramatiq import Message
from dramatiq.common import current_millis

from tests.integration.brokers.dead_letters.conftest import Doomed
from tests.integration.brokers.dead_letters.test_looking import bury
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.brokers import DeadLetterStore, LetterFilter, LetterPosition, apply, newest, search


def body(number: int = 0, queue: str = "default", actor: str = "doomed") -> bytes:
    return Message(queue, actor, (number,), {}, {}).encode()


def test_letters_of_one_millisecond_are_all_paged_through(  # R6
    broker: Any, store: DeadLetterStore
) -> None:
    at = current_millis() // 1000 * 1000
    for number in range(230):  # more than two round trips
        bury(broker, body(number), str(number), ("default", "other")[number % 2], died_at=at)

    seen: list[str] = []
    page = search(store, LetterFilter(), 60)
    while page.older is not None:
        seen += [each.broker_id for each in page.letters]
        page = search(store, LetterFilter(), 60, page.older)
    seen += [each.broker_id for each in page.letters]

    assert sorted(seen, key=int) == [str(number) for number in range(230)]


def test_filter_by_queue_and_time_reads_those_only(broker: Any, store: DeadLetterStore) -> None:  # R6
    at = current_millis() // 1000 * 1000 - 60_000
    for number in range(4):
        bury(broker, body(number), str(number), ("default", "other")[number % 2], died_at=at + number * 1000)

    until = datetime.fromtimestamp(at / 1000 + 2, UTC)
    found = search(store, LetterFilter(queue="default", until=until)).letters[::-1]

    assert [each.broker_id for each in found] == ["0"]


def test_letter_with_an_impossible_time_hides_no_other(broker: Any, store: DeadLetterStore) -> None:  # R6
    bury(broker, body(1), "fine")
    for name in ("far", "farther"):
        bury(broker, body(2), name, died_at=2**62 * 1000)

    page = search(store, LetterFilter(), 1)
    pages = [page]
    while page.older is not None:
        page = search(store, LetterFilter(), 1, LetterPosition.parse(str(page.older)))
        pages.append(page)

    found = {each.broker_id: each.died_at is None for page in pages for each in page.letters}
    assert found == {"far": True, "farther": True, "fine": False}


def test_broken_letter_in_a_bulk_requeue_fails_alone(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    sent = doomed().send()
    step_worker.run()
    bury(broker, b"\xff unreadable", "broken", died_at=1000)
    bury(broker, body(queue="\ud800"), "odd", died_at=2000)

    result = apply(store, "requeue", search(store, LetterFilter()).letters[::-1])

    outcomes = {each.id: each.outcome for each in result.results}
    assert (outcomes["broken"], outcomes[sent.message_id]) == ("refused", "requeued")
    assert sent.message_id in [message.message_id for message in queued(broker)]
    assert [each.broker_id for each in newest(store, 10)] == ["broken"]
    assert str(result) == "2 requeued; 1 kept because it cannot be sent"


def test_bulk_delete_removes_only_its_letters(broker: Any, store: DeadLetterStore) -> None:  # R6
    for number in range(4):
        bury(broker, body(actor=("doomed", "mail")[number % 2]), str(number), died_at=(number + 1) * 1000)
    chosen = search(store, LetterFilter(actor="mail")).letters[::-1]

    first, again = (apply(store, "delete", chosen) for _ in range(2))

    assert (str(first), str(again)) == ("2 deleted", "2 already requeued or deleted")
    assert [each.broker_id for each in newest(store, 10)] == ["2", "0"]
    assert len(queued(broker, "default.XQ")) == 2
