"""Shared tables of the tests of stuck builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from dramatiq import Message

from housekeeping.workers.ci_stuck_builds.models import Build

AddBuilds = Callable[..., None]
Refuse = Callable[[str], None]
Delayed = Callable[[], list[Message[Any]]]

#: The manual clock's time as these columns hold it: UTC, without saying so.
NOW: Final = "timestamp '2026-01-01 00:00:00'"
HOUR_AGO: Final = f"{NOW} - interval '1 hour'"
#: One microsecond older than an hour, the finest difference the column knows.
STALE: Final = f"{HOUR_AGO} - interval '1 microsecond'"

#: The counts of a run of `drop_canceling` that found nothing.
NOTHING_DROPPED: Final = {"dropped": 0, "doomed": 0, "failed": 0, "out_of_time": False}

GITLAB_SHAPED: Final = """
CREATE SEQUENCE ci_builds_id_seq;
CREATE TABLE p_ci_builds (
    status character varying,
    finished_at timestamp without time zone,
    created_at timestamp without time zone,
    updated_at timestamp without time zone,
    started_at timestamp without time zone,
    coverage double precision,
    name character varying,
    options text,
    allow_failure boolean DEFAULT false NOT NULL,
    stage character varying,
    type character varying,
    erased_by_id bigint,
    environment character varying,
    "when" character varying,
    lock_version integer DEFAULT 0,
    scheduled_at timestamp with time zone,
    token_encrypted character varying,
    failure_reason integer,
    id bigint DEFAULT nextval('ci_builds_id_seq') NOT NULL,
    commit_id bigint,
    project_id bigint,
    runner_id bigint,
    partition_id bigint DEFAULT 100 NOT NULL,
    PRIMARY KEY (id, partition_id)
) PARTITION BY LIST (partition_id);
CREATE TABLE ci_builds PARTITION OF p_ci_builds FOR VALUES IN (100, 101);
CREATE TABLE ci_builds_102 PARTITION OF p_ci_builds FOR VALUES IN (102);
CREATE INDEX p_ci_builds_status_created_at_project_id_idx
    ON p_ci_builds (status, created_at, project_id) WHERE type = 'Ci::Build';
"""


def by_status() -> dict[str, list[int]]:
    """Return the ids of all builds by status."""
    found: dict[str, list[int]] = {}
    for build in Build.select().order_by(Build.id):
        found.setdefault(build.status, []).append(build.id)
    return found


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of each log line with this event."""
    return [vars(record) for record in caplog.records if record.message == event]
