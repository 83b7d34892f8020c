"""Faults for the chaos suite: takeover, paused workers, lost answers, lost servers, ticks, mixed releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from housekeeping.database.connection import Database, database
from housekeeping.leases.renewal import Renewal
from housekeeping.middleware.connections import Connections
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.middleware.schedule.middleware import Schedule
from housekeeping.purge import request
from housekeeping.sweeps.ledger import history, run_queries, runs
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.partitions import detaching, marks, removal, stage
from housekeeping.sweeps.partitions.candidate import Candidate
from housekeeping.sweeps.partitions.candidates import Candidates
from housekeeping.workers.object_storage import claims
from tests.twins import Twin
from tests.twins.archives import leaves_restored_rows_in_the_archive

_KILLS: Final = "tests/chaos/test_kill_points.py::"
_ZOMBIES: Final = "tests/chaos/test_zombies.py::"
_RETENTION: Final = "tests/chaos/test_retention.py::"
_CONNECTIONS: Final = "tests/chaos/test_lost_connections.py::"


def _commits_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    def write(run_id: int, lease: tuple[str, int] | None, **columns: Any) -> None:
        Run.update(**columns).where(Run.id == run_id).execute()

    patch.setattr(runs, "_write", write)


def _counts_a_begun_run_as_done(patch: pytest.MonkeyPatch) -> None:
    def begun(message_id: str) -> bool:
        return bool(Run.select(Run.id).where(Run.message_id == message_id).exists())

    patch.setattr(run_queries, "completed", begun)


def _repeats_completed_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_queries, "completed", lambda message_id: False)


def _discards_counts_of_a_failed_run(patch: pytest.MonkeyPatch) -> None:
    original = runs.fail

    def fail(run_id: int, *arguments: Any) -> Any:
        closed = original(run_id, *arguments)
        with database.atomic():
            Run.update(counts={}).where(Run.id == run_id).execute()
        return closed

    patch.setattr(runs, "fail", fail)


def _keeps_a_dead_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "_on_a_live_connection", lambda self, step: step())
    patch.setattr(Connections, "after_process_message", lambda *arguments, **more: None)


def _trusts_a_lease_it_could_not_renew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Renewal, "lost", property(lambda self: False))


def _ignores_the_applications_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Idempotency, "_name", lambda self, message: f"{message.actor_name}:{message.message_id}")


def _never_considers_a_run_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_queries, "holder_is_gone", lambda *arguments: False)


def _never_takes_over_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims, "_TAKE", claims._TAKE.replace("if not free then", "if false then"))


def _detaches_without_a_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(marks, "set_mark", lambda *given: None)


def _drops_before_the_batch(patch: pytest.MonkeyPatch) -> None:
    def detach_and_drop(candidates: Candidates, candidate: Candidate, check: Callable[[], None]) -> None:
        removal.detach_first(candidates, candidate, check)
        with database.atomic():
            detaching.drop(candidate.partition)

    patch.setattr(stage, "detach_first", detach_and_drop)


def _resumes_a_purge_with_its_whole_limit(patch: pytest.MonkeyPatch) -> None:
    def whole(run_id: int) -> request.PurgeRequest:
        rest = rest_of(run_id)
        record = history.find(run_id)
        assert record is not None
        return replace(rest, max_rows=request.recorded_request(record).max_rows)

    rest_of = request.request_of
    patch.setattr(request, "request_of", whole)


def _claims_no_tick(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Schedule, broker: Any, message: Any) -> Any:
        if "scheduled_at" in message.options:
            message.options["tick"] = message.options.pop("scheduled_at")[:17] + "00+00:00"
        return message

    patch.setattr(Schedule, "claim", claim)
    patch.setattr(Schedule, "sent", lambda self, claimed: None)
    patch.setattr(Schedule, "dropped", lambda self, claimed, skip: None)


TWINS: Final = [
    Twin(
        "F1",
        "chaos_commits_after_a_takeover",
        f"{_ZOMBIES}test_worker_paused_past_its_ttl_cannot_commit_after_a_takeover",
        _commits_without_the_lease,
        in_processes=True,
    ),
    Twin(
        "F2",
        "chaos_commits_without_the_lease_after_redis_is_emptied",
        f"{_ZOMBIES}test_empty_redis_doubles_attempts_but_not_effects",
        _commits_without_the_lease,
        in_processes=True,
    ),
    Twin(
        "F2",
        "chaos_commits_without_the_lease_after_a_failover",
        "tests/chaos/test_sentinel_failover.py::test_failover_that_loses_leases_doubles_attempts_but_not_effects",
        _commits_without_the_lease,
        in_processes=True,
    ),
    Twin(
        "L2",
        "chaos_trusts_a_lease_it_could_not_renew",
        f"{_ZOMBIES}test_redis_frozen_past_the_ttl_ends_runs_and_loses_nothing",
        _trusts_a_lease_it_could_not_renew,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_counts_a_begun_run_as_done_early",
        f"{_KILLS}test_runs_killed_before_their_first_batch_reach_the_same_state",
        _counts_a_begun_run_as_done,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_counts_a_begun_run_as_done",
        f"{_KILLS}test_runs_killed_within_a_batch_reach_the_same_state",
        _counts_a_begun_run_as_done,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_never_takes_over_claims",
        f"{_KILLS}test_claimed_uploads_of_a_killed_run_are_taken_over",
        _never_takes_over_claims,
        in_processes=True,
    ),
    Twin(
        "I1",
        "chaos_repeats_completed_messages",
        f"{_KILLS}test_completed_runs_killed_before_the_ack_do_not_repeat",
        _repeats_completed_messages,
        in_processes=True,
    ),
    Twin(
        "F4",
        "chaos_discards_counts_of_a_failed_run",
        f"{_CONNECTIONS}test_commit_with_a_lost_answer_is_counted_once",
        _discards_counts_of_a_failed_run,
        in_processes=True,
    ),
    Twin(
        "F4",
        "chaos_keeps_a_dead_connection",
        f"{_CONNECTIONS}test_postgresql_outage_loses_only_the_current_batch",
        _keeps_a_dead_connection,
        in_processes=True,
    ),
    Twin(
        "F10",
        "chaos_ignores_the_applications_key",
        "tests/chaos/test_mixed_versions.py::test_rolling_restart_with_other_arguments_has_each_effect_once",
        _ignores_the_applications_key,
        in_processes=True,
    ),
    Twin(
        "F4",
        "chaos_miscounts_by_chance",
        "tests/chaos/test_random_faults.py::test_random_faults_lose_and_repeat_nothing",
        _discards_counts_of_a_failed_run,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_never_considers_a_run_dead",
        "tests/chaos/test_default_settings.py::test_killed_worker_is_taken_over_within_90_seconds",
        _never_considers_a_run_dead,
        in_processes=True,
    ),
    Twin(
        "A1",
        "chaos_restores_a_copy",
        f"{_RETENTION}test_random_faults_leave_each_row_in_one_of_both_tables",
        leaves_restored_rows_in_the_archive,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_drops_a_partition_before_its_batch",
        f"{_RETENTION}test_random_faults_drop_each_old_partition_once",
        _drops_before_the_batch,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_detaches_without_a_mark",
        f"{_RETENTION}test_worker_killed_between_detach_and_drop_is_taken_over",
        _detaches_without_a_mark,
        in_processes=True,
    ),
    Twin(
        "F3",
        "chaos_resumes_a_purge_with_its_whole_limit",
        f"{_RETENTION}test_random_faults_purge_as_many_rows_as_allowed",
        _resumes_a_purge_with_its_whole_limit,
        in_processes=True,
    ),
    Twin(
        "F7",
        "chaos_claims_no_tick",
        "tests/chaos/test_default_settings.py::test_two_killed_and_restarted_schedulers_send_each_tick_once",
        _claims_no_tick,
        in_processes=True,
    ),
]
