"""Validation of actor options at declaration, with messages that show a valid value."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from tests.internals.brokers import InvalidOption
from tests.internals.middleware import Admission, Deduplication, DeduplicationConfig, config_of

JUST = timedelta(seconds=3)
LESS = timedelta(seconds=2.999)


@pytest.fixture
def broker() -> StubBroker:
    client = redis.Redis()  # never connected
    deduplication = Deduplication(client, "t")
    return StubBroker(middleware=[deduplication, Admission(client, "t", deduplication)])


def lease(**changes: Any) -> dict[str, Any]:
    return {"exclusive_lease": {"key": "k", "ttl": JUST, **changes}}


def idempotent(deduplicate: Any = "until_executed", **deduplication: Any) -> dict[str, Any]:
    return {"idempotent": True, "deduplicate": deduplicate, "deduplication": deduplication}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"idempotent": True, "deduplicate": "while_executing"},
            'deduplicate is \'while_executing\'; it should be "until_executed", "until_executing" or None',
        ),
        ({"deduplicate": "until_executed"}, "needs idempotent=True"),
        ({"deduplication": {}}, "needs idempotent=True"),
        (idempotent(None), 'deduplicate="until_executed" or "until_executing"'),
        ({"idempotent": True, "deduplication": 5}, "deduplication is 5; its keys should be among .*, ttl"),
        (idempotent(colour=1), "its keys should be among if_deduplicated, including_scheduled, key, ttl"),
        (idempotent(ttl=LESS), "it should be a timedelta of at least 3 seconds"),
        (idempotent(ttl=60), "ttl is 60; it should be a timedelta of at least 3 seconds"),
        (idempotent(if_deduplicated="again"), 'is \'again\'; it should be "drop" or "reschedule_once"'),
        (idempotent(including_scheduled=1), "including_scheduled is 1; it should be True or False"),
        (idempotent(key=lambda: 1), "its parameters, in their order"),
        ({"idempotent": "yes"}, "idempotent is 'yes'; it should be True or False"),
        ({"idempotency": {"ttl": JUST}}, "needs idempotent=True"),
        ({"idempotent": True, "idempotency": 24}, r"should be such as {\"ttl\": timedelta\(hours=24\)}"),
        ({"idempotent": True, "idempotency": {}}, "should be such as"),
        ({"idempotent": True, "idempotency": {"ttl": LESS}}, "of at least 3 seconds"),
        ({"exclusive_lease": "k"}, "should be such as {.key.: "),
        ({"exclusive_lease": {"key": "k"}}, "should be such as"),
        (lease(colour=1), "should be such as"),
        (lease(ttl=LESS), "ttl is .*; it should be a timedelta of at least 3 seconds"),
        (lease(ttl=30), "ttl is 30; it should be a timedelta of at least 3 seconds"),
        (lease(if_held="wait"), 'if_held is \'wait\'; it should be "skip" or "retry"'),
        (lease(fenced="yes"), "fenced is 'yes'; it should be True or False"),
        (lease(key=""), "key is ''; it should be a text or a callable"),
        (lease(key=["number"]), "it should be a text or a callable"),
        (lease(key=lambda: 1), r"in their order \(number\)"),
    ],
)
def test_invalid_option_is_refused(broker: StubBroker, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=f"^work: .*{words}"):
        dramatiq.actor(broker=broker, actor_name="work", **options)(lambda number: None)

    assert "work" not in broker.actors


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"idempotent": True},
        {"idempotent": True, "deduplicate": None},
        {"deduplicate": None},
        idempotent(ttl=JUST, key=["number"], if_deduplicated="reschedule_once", including_scheduled=True),
        {"idempotent": True, "idempotency": {"ttl": JUST}},
        lease(),
        lease(key=lambda number: number, if_held="retry", fenced=True),
    ],
)
def test_valid_option_is_accepted(broker: StubBroker, options: dict[str, Any]) -> None:
    dramatiq.actor(broker=broker, actor_name="work", **options)(lambda number: None)

    assert "work" in broker.actors


def test_idempotent_actor_waits_at_most_once_for_an_hour_by_default(broker: StubBroker) -> None:
    actor = dramatiq.actor(broker=broker, actor_name="work", idempotent=True)(lambda: None)
    plain = dramatiq.actor(broker=broker, actor_name="plain")(lambda: None)

    assert config_of(actor) == DeduplicationConfig(False, timedelta(hours=1), None, False, False)
    assert config_of(plain) is None
