"""Dashboard and alert rules compared with the metrics that real processes export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.processes import eventually
from tests.acceptance.queues import Queues
from tests.integration.metrics.pages import STATUSES, Page, due_statuses, metered, read, shows
from tests.integration.metrics.promql import faults
from tests.internals.core import Cron, metrics
from tests.internals.database import Database
from tests.internals.insight import alerts
from tests.internals.workers import BUILT_IN

#: Starts many processes.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "monitoring"
#: Exported by a scheduler; another test scrapes it.
SCHEDULERS = {metrics.LAST_TICK.name, metrics.TICKS_SENT.name, metrics.TICKS_MISSED.name}


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels() for target in panel["targets"]]


def with_a_schedulers(page: Page) -> Page:
    ticks = {(name, frozenset({("worker", STATUSES)})): 0.0 for name in SCHEDULERS}
    labels = {"kind": "scheduler", "process": "a:1", "queues": "", "version": "1"}
    heartbeat = {(metrics.PROCESS_HEARTBEAT.name, frozenset(labels.items())): 0.0}
    return Page(page.samples | ticks | heartbeat)


def test_dashboard_and_alerts_use_only_exported_metrics(
    environment: dict[str, str], queues: Queues, tmp_path: Path, postgres: Database
) -> None:
    due_statuses(postgres, 3)
    # Only an application's own sweep can wait for the confirmation of its first run.
    environment["HOUSEKEEPING_SWEEPS"] = "tests.integration.own_sweeps.shop"
    with metered(environment, tmp_path) as (process, port):
        queues.put("cronjob", STATUSES)
        eventually(shows(port, "housekeeping_oldest_stale_age_seconds", 0, worker=STATUSES), process)
        eventually(shows(port, "housekeeping_worker_open_runs", 0, worker=STATUSES), process)
        page = with_a_schedulers(read(port))

    assert [fault for expression in expressions() for fault in faults(expression, page, recorded())] == []
    exported = {name.removesuffix("_bucket") for name in page.names()}
    only_with_several_databases = {"housekeeping_worker_database"}
    assert {metric.name for metric in metrics.ALL} - exported == only_with_several_databases


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("housekeeping_run_total", "no process exports housekeeping_run_total"),
        ('housekeeping_runs_total{queue="x"}', "housekeeping_runs_total has no label queue"),
        ('housekeeping_runs_total{outcome=~"done|dead"}', "housekeeping_runs_total never has outcome 'dead'"),
        ("sum by (actor) (housekeeping_runs_total)", "nothing in 'sum by (actor) (housekeeping_runs_total)' has"),
    ],
)
def test_expression_with_an_unknown_metric_is_found(expression: str, fault: str) -> None:
    page = Page({("housekeeping_runs_total", frozenset({("worker", "w"), ("outcome", "done")})): 1})

    [found] = faults(expression, page, {})

    assert found.startswith(fault)


def test_no_chart_has_a_line_for_each_of_a_hundred_workers() -> None:
    charts = [panel for panel in panels() if panel["type"] == "timeseries"]
    lines = [target["expr"] for panel in charts for target in panel["targets"]]

    assert [
        each for each in lines if re.search(r"by \((worker|actor_name|kind)", each) and "topk(10, " not in each
    ] == []
    assert {panel["options"]["legend"]["sortBy"] for panel in charts} == {"Max"}


def test_each_documented_alert_has_a_rule() -> None:
    text = (ROOT / "docs/howto/alerts.md").read_text(encoding="utf-8")
    documented = {
        name for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    ruled = {rule.get("labels", {}).get("alarm") for rule in rules()}
    everything = " ".join(expressions())

    assert {name for name in documented if not name.startswith("most_")} - ruled == set()
    assert 'alarm=~"most_.+"' in everything


def test_limits_in_the_rules_match_the_documents(exported: Any) -> None:
    for family in BUILT_IN:
        for sweep in family.SWEEPS:
            alerts.declare_metrics(sweep, Cron(sweep.schedule) if sweep.schedule else None)

    def limit(worker: str, alarm: str) -> Any:
        return exported("housekeeping_alarm_limit", worker=worker, alarm=alarm)

    assert limit(STATUSES, "longest_run") == 60
    assert limit(STATUSES, "backlog") == 10_000
    assert limit(STATUSES, "overdue") == 3 * 60
    assert limit(STATUSES, "stuck") == 30 + 60
    assert limit("object_storage.delete_stale_direct_uploads", "longest_run") == 250
    assert limit("object_storage.delete_stale_direct_uploads", "backlog") == 10_000
    assert limit("object_storage.delete_stale_direct_uploads", "overdue") == 3 * 6 * 60
    assert limit("ci.stuck_builds.drop_canceling", "longest_run") == 30 * 60
    assert limit("bulk_imports.stale_import", "failed_rows") == 0


def test_rules_fire_one_beyond_each_limit_and_not_at_it() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, Prometheus's own checker of rules, is not installed")

    said = subprocess.run(
        [promtool, "test", "rules", str(Path(__file__).with_name("alerts_ring.yml"))], capture_output=True, text=True
    )

    assert said.returncode == 0, said.stdout + said.stderr
