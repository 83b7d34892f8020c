"""Faults of dead letters (promises R6 and R1)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from housekeeping.brokers.dead_letters import models, on_redis, search
from housekeeping.brokers.dead_letters.search import Position
from housekeeping.core import sanitize
from housekeeping.middleware import dead_letters, retries
from tests.twins import Twin
from tests.twins.planting import in_text, instead

_FOLDER: Final = "tests/integration/middleware/"
_RETRIES: Final = f"{_FOLDER}test_retries.py::"
_LOOKING: Final = "tests/integration/brokers/dead_letters/test_looking.py::"
_REQUEUEING: Final = "tests/integration/brokers/dead_letters/test_requeueing.py::"
_MANY: Final = "tests/integration/brokers/dead_letters/test_many.py::"
_COMMAND: Final = "tests/acceptance/test_dead_letters_command.py::"


def _count_no_retry(patch: pytest.MonkeyPatch) -> None:
    after = retries.Retries.after_process_message

    def after_process_message(self: Any, broker: Any, message: Any, **outcome: Any) -> None:
        message.options["retries"] = message.options.get("retries", 0) - 1
        after(self, broker, message, **outcome)

    patch.setattr(retries.Retries, "after_process_message", after_process_message)


def _leave_out_unreadable_letters(patch: pytest.MonkeyPatch) -> None:
    newest = on_redis.RedisDeadLetters.newest
    patch.setattr(
        on_redis.RedisDeadLetters, "newest", lambda self, limit: [each for each in newest(self, limit) if each.message]
    )


def _requeue_existing_letters_only(patch: pytest.MonkeyPatch) -> None:
    def found(store: Any, ids: Any) -> list[Any]:
        return [letter for letter in store.find(set(ids)).values() if letter.message]

    patch.setattr(models, "found", found)


def _skip_letters_of_the_same_millisecond(patch: pytest.MonkeyPatch) -> None:
    behind = search._behind
    patch.setattr(
        search,
        "_behind",
        lambda letters, place: (each for each in behind(letters, place) if Position.of(each).died_ms < place.died_ms),
    )


TWINS: Final[list[Twin]] = [
    Twin(
        "R1",
        "retries_without_end",
        f"{_RETRIES}test_last_failed_retry_makes_a_dead_letter",
        _count_no_retry,
    ),
    Twin(
        "R1",
        "keeps_an_eleventh_dead_letter",
        f"{_RETRIES}test_scheduled_actor_keeps_its_last_ten_dead_letters",
        instead(dead_letters, "KEPT", 11),
    ),
    Twin(
        "R6",
        "forgets_the_last_error",
        f"{_LOOKING}test_dead_letter_names_its_error",
        instead(dead_letters.DeadLetters, "before_nack", lambda self, broker, message: None),
    ),
    Twin(
        "R6",
        "leaves_unreadable_dead_letters_out",
        f"{_LOOKING}test_unreadable_letter_is_listed_by_broker_id_with_the_reason",
        _leave_out_unreadable_letters,
    ),
    Twin(
        "R6",
        "requeues_with_the_options_of_earlier_attempts",
        f"{_REQUEUEING}test_requeued_message_keeps_its_id",
        instead(models, "_PAST_ATTEMPTS", frozenset()),
    ),
    Twin(
        "R6",
        "requeues_a_duplicate",
        f"{_REQUEUEING}test_duplicate_of_a_live_message_stays_a_dead_letter",
        instead(models, "as_new", lambda message: message),
    ),
    Twin(
        "R6",
        "requeues_the_valid_ids_only",
        f"{_REQUEUEING}test_one_wrong_id_leaves_all_letters_untouched",
        _requeue_existing_letters_only,
    ),
    Twin(
        "R6",
        "copies_instead_of_moving",
        f"{_REQUEUEING}test_of_two_concurrent_operators_one_requeues",
        in_text(on_redis, "_MOVE", 'redis.call("zrem", KEYS[1], ARGV[1]) == 0', 'ARGV[1] == ""'),
    ),
    Twin(
        "R6",
        "requeues_again_after_a_lost_answer",
        f"{_REQUEUEING}test_lost_answer_duplicates_no_message",
        in_text(on_redis, "_MOVE", 'redis.call("hexists", KEYS[4], ARGV[2])', "0"),
    ),
    Twin(
        "R6",
        "prints_unescaped_and_unmasked",
        f"{_COMMAND}test_dead_letter_is_shown_masked_and_escaped",
        instead(sanitize, "_visible", lambda character: character),
        in_processes=True,
        slow=True,
    ),
    Twin(
        "R6",
        "skips_letters_of_the_same_millisecond",
        f"{_MANY}test_letters_of_one_millisecond_are_all_paged_through",
        _skip_letters_of_the_same_millisecond,
    ),
    Twin(
        "R6",
        "lets_a_broken_letter_stop_the_others",
        f"{_MANY}test_broken_letter_in_a_bulk_requeue_fails_alone",
        instead(models, "_BROKEN", ()),
    ),
    Twin(
        "R6",
        "deletes_letters_that_do_not_match",
        f"{_MANY}test_bulk_delete_removes_only_its_letters",
        instead(search.LetterFilter, "matches", lambda self, letter: True),
    ),
]
