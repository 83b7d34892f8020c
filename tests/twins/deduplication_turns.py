"""Faults of redeliveries, waiting runs and the further run (promises D7, D8, F6)."""

from __future__ import annotations

from typing import Any, Final

import pytest
from dramatiq import Message

from tests.twins import Twin
from tests.twins.deduplication import ANOTHER_HOLDS_IT
from tests.twins.planting import in_script, instead_at
from tests.twins.shutdown import give_up_after_three_tries

_KEYS: Final = "tests/integration/middleware/deduplication/test_keys.py::"
_TURNS: Final = "tests/integration/middleware/deduplication/test_turns.py::"
_ONE_MORE: Final = "tests/integration/middleware/deduplication/test_reschedule_once.py::"
_SUPERSEDED: Final = "tests/integration/middleware/deduplication/test_superseded_retries.py::"
_STAY: Final = "tests/integration/middleware/deduplication/test_retries_that_stay.py::"
_TWO_SERVERS: Final = "tests/integration/middleware/deduplication/test_two_servers.py::"


def _marks_the_given_message(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Message, "copy", lambda self, **given: self if not given else _copy(self, **given))


def _forgets_the_superseded_message(patch: pytest.MonkeyPatch) -> None:
    for script in ("CLAIM", "CONFIRM"):
        in_script(script, "mark_superseded(holder, message_id)", "")(patch)


_copy: Final[Any] = Message.copy

_ASKS: Final = 'if ask_for_rerun and running then redis.call("hset", KEYS[1], "again", "1") end'

TWINS: Final[list[Twin]] = [
    Twin(
        "D7",
        "treats_a_redelivery_as_a_duplicate",
        f"{_TURNS}test_redelivery_of_the_holder_runs",
        in_script("START", ANOTHER_HOLDS_IT, "if holder then"),
    ),
    Twin(
        "D7",
        "runs_beside_the_holder_of_its_key",
        f"{_TURNS}test_message_that_lost_its_key_waits_for_the_running_one",
        in_script("START", ANOTHER_HOLDS_IT, "if false then"),
    ),
    Twin(
        "D7",
        "leaves_the_key_with_a_retry_hours_away",
        f"{_SUPERSEDED}test_new_message_supersedes_waiting_retry_and_both_make_one_run",
        in_script("CLAIM", "retry_due_in() > tonumber(supersede_after)", "false"),
    ),
    Twin(
        "D7",
        "forgets_the_superseded_retry",
        f"{_SUPERSEDED}test_new_message_supersedes_waiting_retry_and_both_make_one_run",
        _forgets_the_superseded_message,
    ),
    Twin(
        "D1",
        "supersedes_a_message_that_is_not_a_retry",
        f"{_STAY}test_message_that_is_not_waiting_for_a_retry_is_not_superseded",
        in_script("CLAIM", "retry_due_in() > tonumber(supersede_after)", "true"),
    ),
    Twin(
        "D2",
        "supersedes_retries_with_dependents",
        f"{_STAY}test_retry_with_dependents_is_not_superseded",
        instead_at("housekeeping.middleware.deduplication.steps.has_dependents", lambda message: False),
    ),
    Twin(
        "D6",
        "supersedes_before_the_message_is_enqueued",
        f"{_TWO_SERVERS}test_retry_outlives_a_sender_that_died_before_superseding_it",
        in_script("CLAIM", 'if state == "reserved" then\n        -- A res', "if false then\n        -- A res"),
    ),
    Twin(
        "D8",
        "requests_no_rerun",
        f"{_TURNS}test_duplicates_during_a_run_make_one_rerun",
        in_script("CLAIM", _ASKS, ""),
    ),
    Twin(
        "D8",
        "reruns_for_a_duplicate_of_a_waiting_message",
        f"{_TURNS}test_duplicate_of_a_waiting_message_makes_no_rerun",
        in_script("CLAIM", "and running then", "then"),
    ),
    Twin(
        "D8",
        "forgets_the_rerun_when_the_answer_is_lost",
        f"{_KEYS}test_rerun_is_owed_until_its_message_holds_the_key",
        in_script("RELEASE", 'redis.call("pexpire", KEYS[1], ttl)', 'redis.call("del", KEYS[1])'),
    ),
    Twin(
        "D8",
        "gives_up_after_three_tries",
        f"{_ONE_MORE}test_rerun_is_enqueued_however_long_redis_is_unavailable",
        give_up_after_three_tries,
    ),
    Twin(
        "D8",
        "treats_a_lost_key_as_released",
        f"{_ONE_MORE}test_rerun_is_enqueued_although_redis_came_back_empty",
        in_script("RELEASE", 'run ~= "" and 2 or 0', "0"),
    ),
    Twin(
        "D8",
        "treats_a_requeued_run_as_a_retry",
        f"{_ONE_MORE}test_requeued_run_owes_the_rerun_afterwards",
        in_script("RETAIN", "still_wanted and redis.call", "false and redis.call"),
    ),
    Twin(
        "D8",
        "takes_over_the_key_before_the_rerun_is_enqueued",
        f"{_TWO_SERVERS}test_rerun_is_owed_until_its_message_is_on_the_other_server",
        in_script("CLAIM", 'if state == "reserved" then return "" end', ""),
    ),
    Twin(
        "D8",
        "never_takes_over_the_key",
        f"{_TWO_SERVERS}test_rerun_is_enqueued_where_keys_and_queue_are_on_different_servers",
        in_script("CONFIRM", "run and run == ended_run", "false"),
    ),
    Twin(
        "D8",
        "keeps_the_options_of_a_failed_send",
        f"{_TWO_SERVERS}test_message_that_could_not_be_sent_is_sent_as_new_the_next_time",
        _marks_the_given_message,
    ),
    Twin(
        "D4",
        "keeps_the_key_of_a_rejected_message",
        f"{_TWO_SERVERS}test_key_on_other_server_is_free_at_once_when_its_message_is_refused",
        instead_at("housekeeping.middleware.deduplication.middleware.Deduplication._free_reserved", lambda self: None),
    ),
    Twin(
        "F6",
        "ignores_a_duplicate_during_the_last_batch",
        f"{_ONE_MORE}test_run_starts_after_every_duplicate_whenever_it_arrives",
        in_script("CLAIM", _ASKS, ""),
    ),
]
