"""Log of operators' actions."""

from __future__ import annotations

import json

import pytest

from housekeeping import Settings
from tests.internals.database import Database
from tests.internals.insight import as_json
from tests.internals.ledger import ActionRow, logged_actions, record_action


def test_action_is_logged_with_user_target_and_result(postgres: Database) -> None:
    with record_action("pause", "w", "kim") as outcome:
        outcome.result = "w is paused"

    [logged] = logged_actions(10)
    assert (logged.user, logged.action, logged.target, logged.result) == ("kim", "pause", "w", "w is paused")
    assert json.dumps(as_json(logged))


def test_failed_action_is_logged_with_its_error(postgres: Database) -> None:
    with pytest.raises(ValueError, match="no such key"), record_action("release_key", "k", "kim"):
        raise ValueError("no such key")

    assert logged_actions(1)[0].result == "failed: no such key"


def test_action_of_a_killed_process_is_logged_without_a_result(postgres: Database) -> None:
    with record_action("requeue", "m", "kim"):
        during = logged_actions(1)[0]

    assert during.result is None and "killed" in during.result_in_words
    assert logged_actions(1)[0].result == "done"


def test_action_is_carried_out_although_its_log_is_locked(postgres: Database, settings: Settings) -> None:
    other = Database(postgres.database, **postgres.connect_params)
    done = []
    with other.atomic():
        other.execute_sql(f"LOCK TABLE {settings.schema_name}.actions")
        with record_action("resume", "w", "kim"):
            done.append("w")
    other.close()

    assert (done, logged_actions(10)) == (["w"], [])


def test_hostile_texts_are_stored_escaped_and_bounded(postgres: Database) -> None:
    with record_action("requeue", "a\0\ud800\n" * 1000, "\x1b[31mkim") as outcome:
        outcome.result = "x\0" * 1000

    [logged] = logged_actions(10)
    assert logged.target.startswith(r"a\x00\ud800\na") and logged.user == r"\x1b[31mkim"
    assert max(len(logged.target), len(str(logged.result))) <= 500


def test_actions_are_filtered_and_paged_newest_first(postgres: Database) -> None:
    for number, user in enumerate(("kim", "bo", "kim", "kim")):
        with record_action("pause", f"w{number % 2}", user):
            pass

    newest = logged_actions(2)
    assert [each.target for each in newest] == ["w1", "w0"]
    assert [each.target for each in logged_actions(9, before=newest[-1].id)] == ["w1", "w0"]
    assert [each.user for each in logged_actions(9, target="w1")] == ["kim", "bo"]
    assert [each.target for each in logged_actions(9, since=newest[-1].at, until=newest[0].at)] == [newest[-1].target]
    assert [each.target for each in logged_actions(9, user="kim")] == ["w1", "w0", "w0"]
    assert logged_actions(9, user="k\0") == [] and ActionRow.select().count() == 4
