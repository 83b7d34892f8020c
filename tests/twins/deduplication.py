"""Faults of holders, ttls and drops in deduplication (promises D1 to D5, D9, D10)."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest

from housekeeping.core.telemetry import metrics
from housekeeping.middleware.admission import Admission
from housekeeping.middleware.deduplication import middleware
from housekeeping.middleware.deduplication.options import config_of
from housekeeping.middleware.deduplication.steps import name_key
from tests.twins import Twin
from tests.twins.planting import Breaks, in_script, instead_at

_FOLDER: Final = "tests/integration/middleware/"
_SENDING: Final = "tests/integration/middleware/deduplication/test_sending.py::"
_OUTLIVED: Final = "tests/integration/middleware/deduplication/test_outlived_keys.py::"
_ENDINGS: Final = "tests/integration/middleware/deduplication/test_endings.py::"
_KEYS: Final = "tests/integration/middleware/deduplication/test_keys.py::"
_LIMITS: Final = "tests/integration/middleware/deduplication/test_limits.py::"
_TICKS: Final = "tests/integration/middleware/deduplication/test_ticks.py::"


def _release_keys_only_after_success(patch: pytest.MonkeyPatch) -> None:
    after = Admission.after_process_message

    def after_process_message(
        self: Any, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if exception is None:
            after(self, broker, message, result=result)

    patch.setattr(Admission, "after_process_message", after_process_message)


def _config(**other: Any) -> Breaks:
    def broken(actor: Any) -> Any:
        config = config_of(actor)
        return config and dataclasses.replace(config, **other)

    return lambda patch: patch.setattr(middleware, "config_of", broken)


def _make_an_extra_round_trip(patch: pytest.MonkeyPatch) -> None:
    ask = Admission._ask

    def read_then_run(self: Any, script: Any, parts: Any, flag: bool) -> Any:
        self._deduplication.keys.client.exists(parts[1][0][0])
        return ask(self, script, parts, flag)

    patch.setattr(Admission, "_ask", read_then_run)


#: Check of a script before it grants a key or starts a message; `deduplication_turns` breaks it, too.
ANOTHER_HOLDS_IT: Final = "if holder and holder ~= message_id then"
_OF_ANOTHER_COPY: Final = 'if tick ~= "" and (redis.call("hget", KEYS[1], "tick") or tick) ~= tick then return 0 end'

TWINS: Final[list[Twin]] = [
    Twin(
        "D4",
        "names_keys_by_the_running_release",
        f"{_FOLDER}test_releases.py::test_key_taken_by_an_older_release_is_released_with_its_message",
        instead_at("housekeeping.middleware.deduplication.middleware.key_of", name_key),
    ),
    Twin(
        "D1",
        "ignores_the_holder_of_a_key",
        f"{_SENDING}test_of_many_concurrent_senders_one_enqueues",
        in_script("CLAIM", ANOTHER_HOLDS_IT, "if false then"),
    ),
    Twin(
        "D1",
        "releases_the_key_while_a_retry_waits",
        f"{_SENDING}test_waiting_until_executed_retry_holds_its_key",
        in_script("RETAIN", 'redis.call("del", KEYS[1])', 'redis.call("del", KEYS[1]) if true then return "" end'),
    ),
    Twin(
        "D1",
        "holds_the_key_after_the_start",
        f"{_SENDING}test_until_executing_releases_its_key_when_it_starts",
        in_script("START", 'redis.call("del", KEYS[1])', ""),
    ),
    Twin(
        "D1",
        "releases_the_key_of_a_ticks_other_copy",
        f"{_TICKS}test_refused_copy_of_a_tick_leaves_the_key_to_the_waiting_one",
        in_script("RELEASE", _OF_ANOTHER_COPY, ""),
    ),
    Twin(
        "D5",
        "releases_the_key_of_a_ticks_retry",
        f"{_TICKS}test_refused_copy_of_a_tick_leaves_the_key_to_a_waiting_retry",
        in_script("RETAIN", 'redis.call("hset", KEYS[1], "tick", tick)', ""),
    ),
    Twin(
        "D4",
        "leaves_the_key_of_a_refused_copy",
        f"{_TICKS}test_no_copy_of_a_tick_leaves_its_key_behind",
        in_script("RELEASE", _OF_ANOTHER_COPY, 'if tick ~= "" then return 0 end'),
    ),
    Twin(
        "D2",
        "raises_for_a_duplicate",
        f"{_SENDING}test_duplicate_is_returned_marked_and_not_enqueued",
        instead_at("housekeeping.middleware.enqueueing.path.returned_to_sender", None),
    ),
    Twin(
        "D2",
        "drops_messages_with_dependents",
        f"{_SENDING}test_pipe_target_is_never_dropped",
        instead_at("housekeeping.middleware.deduplication.steps.has_dependents", lambda message: False),
    ),
    Twin(
        "D2",
        "counts_no_duplicate",
        "tests/integration/middleware/deduplication/test_metric.py::test_each_dropped_duplicate_is_counted_once_wherever_it_is_dropped",
        instead_at("housekeeping.core.telemetry.metrics.DEDUPLICATED", metrics.RETRIES),
    ),
    Twin(
        "D4",
        "never_releases_a_key",
        f"{_SENDING}test_until_executed_holds_its_key_until_the_run_ends",
        in_script("RELEASE", 'redis.call("del", KEYS[1])', ""),
    ),
    Twin(
        "D4",
        "releases_keys_only_after_success",
        f"{_ENDINGS}test_failed_message_without_retry_releases_its_key",
        _release_keys_only_after_success,
    ),
    Twin(
        "D4",
        "leaves_a_key_to_an_ended_message",
        f"{_OUTLIVED}test_waiting_key_of_an_ended_message_stops_no_other",
        in_script("CLAIM", " and holder_has_ended() then", " and false then"),
    ),
    Twin(
        "D4",
        "takes_the_key_of_a_second_delivery",
        f"{_OUTLIVED}test_key_of_a_second_delivery_is_kept_while_it_runs",
        in_script("CLAIM", 'return not its[3] or redis.call("exists", its[3]) == 0', "return true"),
    ),
    Twin(
        "D4",
        "takes_the_key_of_a_due_retry",
        f"{_OUTLIVED}test_retry_that_is_due_keeps_its_key",
        in_script("WITH_ENQUEUEING", 'string.sub(messages, -8) == ".DQ.msgs" and "" or messages', "messages"),
    ),
    Twin(
        "D4",
        "sets_no_ttl_at_the_start",
        f"{_ENDINGS}test_key_of_killed_run_expires",
        in_script("START", 'redis.call("pexpire", KEYS[1], ttl)', ""),
    ),
    Twin(
        "D5",
        "releases_the_key_of_another_delivery",
        f"{_ENDINGS}test_second_delivery_keeps_the_key_of_the_running_first",
        in_script("RELEASE", 'if (redis.call("hget", KEYS[1], "run") or "") ~= run then return 0 end', ""),
    ),
    Twin(
        "D5",
        "renews_the_key_of_another",
        f"{_KEYS}test_only_the_run_that_holds_a_key_renews_and_releases_it",
        in_script("RENEW", 'if redis.call("hget", KEYS[1], "run") ~= ARGV[1] then return 0 end', ""),
    ),
    Twin(
        "D9",
        "counts_delayed_messages_as_live",
        f"{_SENDING}test_delayed_message_holds_no_key_before_it_is_due",
        _config(including_scheduled=True),
    ),
    Twin(
        "D9",
        "counts_no_delayed_message_as_live",
        f"{_SENDING}test_delayed_message_with_including_scheduled_holds_its_key_at_once",
        _config(including_scheduled=False),
    ),
    Twin(
        "D10",
        "never_deletes_keys",
        f"{_LIMITS}test_each_live_message_has_one_key_that_expires",
        in_script("CLAIM", 'redis.call("pexpire", KEYS[1], ttl)', ""),
    ),
    Twin(
        "D10",
        "makes_an_extra_round_trip",
        f"{_LIMITS}test_message_costs_no_more_round_trips_than_its_steps",
        _make_an_extra_round_trip,
    ),
]
