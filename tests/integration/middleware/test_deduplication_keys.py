"""The rules of a key, step by step, whatever the client makes of Redis's answers (semantics.md, D1 to D8)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis

from housekeeping.foundation.settings import Settings
from housekeeping.middleware.deduplication_keys import DeduplicationKeys

TTL = timedelta(minutes=10)
KEY = "報告:1"


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def keys(request: pytest.FixtureRequest, settings: Settings, redis_client: redis.Redis) -> Iterator[DeduplicationKeys]:
    client = redis.Redis.from_url(settings.require_redis_url(), decode_responses=request.param)
    yield DeduplicationKeys(client, settings.namespace)
    client.close()


def claim(keys: DeduplicationKeys, message_id: str, *, again: bool = False) -> str:
    return keys.claim(KEY, message_id, "waiting", TTL, again=again)


def test_a_key_is_its_first_claimants_until_released(keys: DeduplicationKeys) -> None:
    # D1, D5
    assert claim(keys, "a") == ""
    assert claim(keys, "b") == "a"
    assert claim(keys, "a") == "", "its own message may claim it again"

    assert not keys.release(KEY, "b", "")
    assert claim(keys, "b") == "a", "nobody frees a key that another message holds"
    keys.release(KEY, "a", "")
    assert claim(keys, "b") == ""


def test_only_the_run_that_holds_a_key_renews_and_frees_it(keys: DeduplicationKeys) -> None:
    # D5
    keys.start(KEY, "a", "first run", TTL)
    keys.start(KEY, "a", "second run", TTL)

    assert not keys.renew(KEY, "first run", TTL)
    keys.release(KEY, "a", "first run")
    keys.release(KEY, "a", "")
    keys.hold_on(KEY, "a", "first run", TTL)
    assert keys.renew(KEY, "second run", TTL), "the second run holds it all along"


def test_a_start_tells_a_waiting_holder_from_one_that_runs(keys: DeduplicationKeys) -> None:
    # D7
    claim(keys, "a")
    assert keys.start(KEY, "b", "r", TTL) == "waiting"
    assert keys.start(KEY, "a", "r", TTL) == "ours"
    assert keys.start(KEY, "b", "r2", TTL) == "running"
    keys.release(KEY, "a", "r")
    keys.claim(KEY, "c", "reserved", TTL, again=False)
    assert keys.start(KEY, "b", "r2", TTL) == "reserved", "it may never come: not one to yield to"


def test_a_second_delivery_that_is_enqueued_again_leaves_the_run_as_it_is(keys: DeduplicationKeys) -> None:
    # D7, D8
    keys.start(KEY, "a", "run", TTL)

    assert claim(keys, "a") == ""

    assert keys.start(KEY, "b", "r", TTL) == "running"


def test_a_message_holds_on_to_what_it_has_and_takes_nothing_from_others(keys: DeduplicationKeys) -> None:
    # D5, D7
    keys.hold_on(KEY, "a", "", TTL)
    assert claim(keys, "b") == "", "what never ran and holds nothing takes nothing"
    keys.hold_on(KEY, "a", "run", TTL)
    assert claim(keys, "a") == "b"
    keys.release(KEY, "b", "")

    keys.hold_on(KEY, "a", "run", TTL)
    assert claim(keys, "b") == "a", "a run that lost its key takes it for its retry when it is free"


def test_a_late_confirmation_changes_nothing(
    keys: DeduplicationKeys, redis_client: redis.Redis, settings: Settings
) -> None:
    # D6: the worker was quicker than the sender
    name = f"{settings.namespace}:dedup:v1:{KEY}"
    keys.claim(KEY, "a", "reserved", TTL, again=False)
    keys.start(KEY, "a", "run", TTL)
    keys.confirm(KEY, "a", TTL)
    assert keys.start(KEY, "b", "r", TTL) == "running"

    keys.release(KEY, "a", "run")
    keys.confirm(KEY, "a", TTL)
    assert not redis_client.exists(name)


@pytest.mark.parametrize("steps", [["claim"], ["claim", "start"], ["claim", "start", "hold_on"]])
def test_one_more_run_is_owed_only_to_a_duplicate_that_came_while_it_ran(
    keys: DeduplicationKeys, steps: list[str]
) -> None:
    # D8
    claim(keys, "a")
    if "start" in steps:
        keys.start(KEY, "a", "run", TTL)
    claim(keys, "b", again=True)
    if "hold_on" in steps:
        keys.hold_on(KEY, "a", "run", TTL)

    assert keys.release(KEY, "a", "run" if steps[-1] == "start" else "") == (steps[-1] == "start")


def test_a_run_that_begins_after_the_duplicate_serves_it(keys: DeduplicationKeys) -> None:
    # D8: the first delivery was killed
    keys.start(KEY, "a", "killed", TTL)
    claim(keys, "b", again=True)
    keys.start(KEY, "a", "run", TTL)

    assert not keys.release(KEY, "a", "run")
