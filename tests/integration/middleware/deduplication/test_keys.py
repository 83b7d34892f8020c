"""Transitions of a deduplication key, with text and bytes clients of Redis (D1 to D8)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping.core.redis.client import milliseconds, text
from housekeeping.core.settings import Settings
from housekeeping.middleware.deduplication import keys as deduplication_keys
from housekeeping.middleware.deduplication import scripts
from housekeeping.middleware.deduplication.keys import DeduplicationKeys
from tests.sentinel_servers import applications_client

TTL = timedelta(minutes=10)
KEY = "報告:1"


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def keys(request: pytest.FixtureRequest, settings: Settings, redis_client: redis.Redis) -> Iterator[DeduplicationKeys]:
    client = applications_client(settings.require_redis_url(), decode_responses=request.param)
    yield DeduplicationKeys(client, settings.namespace)
    client.close()


def claim(keys: DeduplicationKeys, message_id: str, **options: Any) -> str:
    return keys.take(deduplication_keys.claim(KEY, message_id, TTL, **options))


def release(keys: DeduplicationKeys, message_id: str, run: str, **options: Any) -> str:
    return keys.release(deduplication_keys.release(KEY, message_id, run, TTL, **options))


def retain(keys: DeduplicationKeys, message_id: str, run: str, **options: Any) -> None:
    keys.take(deduplication_keys.retain(KEY, message_id, run, TTL, **options))


def start(keys: DeduplicationKeys, key: str, message_id: str, run: str, ttl: timedelta) -> str:
    """Begin a run by the part of the admission's script that concerns the key."""
    script: Any = keys.client.register_script(scripts.START)
    return text(script(keys=[keys.prefix + key], args=[message_id, milliseconds(ttl), run, 1000, "", "", ""]))


def test_key_belongs_to_its_first_claimant_until_released(keys: DeduplicationKeys) -> None:
    # D1, D5
    assert claim(keys, "a") == ""
    assert claim(keys, "b") == "a"
    assert claim(keys, "a") == "", "its own message may claim it again"

    release(keys, "b", "")
    release(keys, "b", "a run")
    assert claim(keys, "b") == "a", "only its holder releases a key"
    assert release(keys, "a", "") == "free"
    assert claim(keys, "b") == ""


def test_only_the_run_that_holds_a_key_renews_and_releases_it(keys: DeduplicationKeys) -> None:
    # D5
    start(keys, KEY, "a", "first run", TTL)
    start(keys, KEY, "a", "second run", TTL)

    assert not keys.renew(KEY, "first run", TTL)
    release(keys, "a", "first run")
    release(keys, "a", "")
    retain(keys, "a", "first run")
    assert keys.renew(KEY, "second run", TTL), "the second run holds it all along"


def test_start_distinguishes_a_waiting_holder_from_a_running_one(keys: DeduplicationKeys) -> None:
    # D7
    claim(keys, "a")
    assert start(keys, KEY, "b", "r", TTL) == "waiting"
    assert start(keys, KEY, "a", "r", TTL) == "ours"
    assert start(keys, KEY, "b", "r2", TTL) == "running"
    release(keys, "a", "r")
    claim(keys, "c", fresh=True)
    assert start(keys, KEY, "b", "r2", TTL) == "reserved", "it may never come: not one to yield to"


def test_second_delivery_that_is_requeued_does_not_affect_the_run(keys: DeduplicationKeys) -> None:
    # D7, D8
    start(keys, KEY, "a", "run", TTL)

    assert claim(keys, "a") == ""

    assert start(keys, KEY, "b", "r", TTL) == "running"


def test_retained_message_keeps_its_key_and_takes_no_other(keys: DeduplicationKeys) -> None:
    # D5, D7
    retain(keys, "a", "")
    assert claim(keys, "b") == "", "what never ran and holds nothing takes nothing"
    retain(keys, "a", "run")
    assert claim(keys, "a") == "b"
    release(keys, "b", "")

    retain(keys, "a", "run")
    assert claim(keys, "b") == "a", "a run that lost its key takes it for its retry when it is free"


def test_late_confirmation_changes_nothing(
    keys: DeduplicationKeys, redis_client: redis.Redis, settings: Settings
) -> None:
    # D6: the worker started before the sender confirmed
    name = f"{settings.namespace}:dedup:v1:{KEY}"
    step = deduplication_keys.claim(KEY, "a", TTL, fresh=True)
    keys.take(step)
    start(keys, KEY, "a", "run", TTL)
    keys.confirm(step)
    assert start(keys, KEY, "b", "r", TTL) == "running"

    release(keys, "a", "run")
    keys.confirm(step)
    assert not redis_client.exists(name)


@pytest.mark.parametrize("steps", [["claim"], ["claim", "start"], ["claim", "start", "retain"]])
def test_rerun_is_owed_only_for_a_duplicate_during_the_run(keys: DeduplicationKeys, steps: list[str]) -> None:
    # D8
    claim(keys, "a")
    if "start" in steps:
        start(keys, KEY, "a", "run", TTL)
    claim(keys, "b", again=True)
    if "retain" in steps:
        retain(keys, "a", "run")

    left = release(keys, "a", "run" if steps[-1] == "start" else "")
    assert left == ("again" if steps[-1] == "start" else "free")


def test_redelivered_and_requeued_runs_still_owe_the_rerun(keys: DeduplicationKeys) -> None:
    # D8: these runs resume, or find that the first one has completed
    start(keys, KEY, "a", "killed", TTL)
    claim(keys, "b", again=True)
    start(keys, KEY, "a", "put back", TTL)
    retain(keys, "a", "put back", still_again=True)
    start(keys, KEY, "a", "run", TTL)

    assert release(keys, "a", "run") == "again"


def test_rerun_is_owed_until_its_message_holds_the_key(keys: DeduplicationKeys) -> None:
    # D8: after lost answers the same calls are repeated
    start(keys, KEY, "a", "run", TTL)
    claim(keys, "b", again=True)

    assert [release(keys, "a", "run") for _ in range(3)] == ["again"] * 3
    assert claim(keys, "another", again=True) == "a"
    assert [claim(keys, "c", after=("a", "run")) for _ in range(2)] == ["", ""]
    assert release(keys, "a", "run") == "lost"
    assert claim(keys, "d") == "c"


def test_only_the_run_that_owes_a_rerun_is_followed_by_it(keys: DeduplicationKeys) -> None:
    # D5
    start(keys, KEY, "a", "another run", TTL)

    assert claim(keys, "c", after=("a", "run")) == "a"


def test_key_that_is_released_at_once_owes_no_rerun(keys: DeduplicationKeys) -> None:
    # D4: that run was refused by another middleware
    start(keys, KEY, "a", "run", TTL)
    claim(keys, "b", again=True)

    assert release(keys, "a", "run", at_once=True) == "free"
    assert claim(keys, "c") == ""


def test_run_that_lost_its_key_learns_it(keys: DeduplicationKeys) -> None:
    # D8: whether a rerun was requested is unknown then
    start(keys, KEY, "a", "run", TTL)
    start(keys, KEY, "a", "another delivery", TTL)
    assert release(keys, "a", "run") == "free", "the other delivery answers for it"
    release(keys, "a", "another delivery")

    assert release(keys, "a", "another delivery") == "lost"
    assert release(keys, "b", "") == "free", "what never ran has lost nothing"
