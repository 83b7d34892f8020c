"""Fields of the log lines of real runs."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from housekeeping import ExclusiveLease, Settings
from tests.acceptance.processes import eventually
from tests.acceptance.queues import Queues
from tests.integration.conftest import AddStatuses
from tests.integration.metrics.pages import STATUSES, due_statuses, metered
from tests.internals.core import WaitTimes, wait_times, waiting_for
from tests.internals.core import redis_client as made_client
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.workers import status_sweep as sweep

PAGE: Final = Path(__file__).parents[3] / "docs/reference/log-lines.md"
OF_RUNS: Final = ("Run started", "Run ended", "Alert", "Lease is held elsewhere")
END: Final = {"outcome", "duration_s", "db_s", "redis_s", "data_consistency_used", "worker", "message_id"}


@pytest.mark.slow
def test_every_field_of_run_log_lines_is_documented(
    environment: dict[str, str], queues: Queues, redis_client: redis.Redis, tmp_path: Path, postgres: Database
) -> None:
    due_statuses(postgres, 20)
    small = {"batch_size": 5, "max_runtime_s": 0.000001, "alarms": {"backlog": 3}}
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({STATUSES: small})
    ExclusiveLease("taken", timedelta(minutes=5), redis_client).try_obtain()
    with metered(environment, tmp_path) as (process, _):
        queues.put("cronjob", STATUSES)
        for name in ("ask", "fail", "meet_a_held_lease"):
            queues.put("metered", name)
        eventually(lambda: set(OF_RUNS) <= {line["event"] for line in process.lines()}, process)
        assert process.terminate() == 0
        lines = [line for line in process.lines() if line["event"] in OF_RUNS]

    documented = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8").partition("## The lines")[0]))
    assert {line["event"] for line in lines} == set(OF_RUNS)
    assert {field for line in lines for field in line} - documented - set(sweep.counts) == set()
    ends = [line for line in lines if line["event"] == "Run ended"]
    assert [line for line in ends if not set(line) >= END] == []
    [swept] = [line for line in ends if line["worker"] == STATUSES]
    assert set(swept) >= {"run_id", "reason", *sweep.counts}


def ended(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    [line] = [vars(record) for record in caplog.records if record.getMessage() == "Run ended"]
    return line


def test_run_reports_its_wait_times_and_its_reads(
    add_statuses: AddStatuses, postgres: Database, caplog: pytest.LogCaptureFixture, redis_client: redis.Redis
) -> None:
    caplog.set_level("INFO")
    add_statuses(1, "now()")
    # The only slow statement; the server reports its duration.
    postgres.execute_sql(
        "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.3); RETURN OLD; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER slow BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION be_slow()")

    run_sweep(sweep)

    line = ended(caplog)
    assert 0.3 <= line["db_s"] <= line["duration_s"]
    assert line["redis_s"] == 0
    assert line["data_consistency_used"] == "primary"


def test_second_run_does_not_include_wait_times_of_the_first(
    add_statuses: AddStatuses, postgres: Database, caplog: pytest.LogCaptureFixture, redis_client: redis.Redis
) -> None:
    caplog.set_level("INFO")
    postgres.execute_sql("SELECT pg_sleep(0.5)")
    before = wait_times().database_s

    run_sweep(sweep)

    line = ended(caplog)
    assert before >= 0.5
    assert line["db_s"] == pytest.approx(wait_times().database_s - before, abs=0.4)
    assert line["db_s"] < 0.5 <= before


def test_waiting_for_redis_is_counted_by_command_script_and_pipeline(settings: Settings) -> None:
    client = made_client(settings.require_redis_url())
    script: Any = client.register_script("return 1")
    pipeline: Any = client.pipeline()
    pipeline.ping()
    counted = []

    for ask in (client.ping, script, pipeline.execute):
        before = wait_times()
        ask()
        counted.append(wait_times().since(before).redis_s)
    client.close()

    assert min(counted) > 0


def test_nested_waits_count_once_for_the_outer_server() -> None:
    before = wait_times()

    with waiting_for("database"):
        with waiting_for("redis"):
            pass

    assert wait_times().since(before).redis_s == 0
    assert wait_times().since(before).database_s > 0


def test_interrupted_wait_is_counted_and_leaves_the_thread_usable() -> None:
    before = wait_times()
    with pytest.raises(KeyboardInterrupt), waiting_for("redis"):
        raise KeyboardInterrupt
    between = wait_times()

    with waiting_for("database"):
        pass

    assert between.since(before).redis_s > 0
    assert wait_times().since(between).database_s > 0


def test_times_are_logged_in_seconds_with_three_decimals() -> None:
    assert WaitTimes(0.12345, 0.0004).as_fields() == {"db_s": 0.123, "redis_s": 0.0}


def test_interrupted_run_has_its_end_line(
    add_statuses: AddStatuses, caplog: pytest.LogCaptureFixture, redis_client: redis.Redis
) -> None:
    caplog.set_level("INFO")
    add_statuses(1, "now()")

    def interrupted(counts: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, on_batch=interrupted)

    line = ended(caplog)
    assert line["deleted_rows"] == 1
