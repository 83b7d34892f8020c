"""Metrics, read with OpenTelemetry's in-memory reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import metrics as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.internals.core import metrics

Read = Callable[[], dict[str, Any]]


@pytest.fixture
def provide(
    monkeypatch: pytest.MonkeyPatch, export_to: Callable[[metrics.Exporter], None]
) -> Iterator[Callable[[], Read]]:
    """Set up metrics in this process, and return how they are read: points by the name of the metric."""
    export_to(metrics.Exporter({"registry": None}))
    provided: list[MeterProvider] = []

    def set_up() -> Read:
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader], shutdown_on_exit=False)
        provided.append(provider)
        # Not as the global provider: OpenTelemetry accepts only one for the life of the process.
        monkeypatch.setattr(otel, "get_meter_provider", lambda: provider)

        def read() -> dict[str, Any]:
            found = reader.get_metrics_data()
            resources = [] if found is None else found.resource_metrics
            return {each.name: each for one in resources for scope in one.scope_metrics for each in scope.metrics}

        return read

    yield set_up
    for provider in provided:
        provider.shutdown()


def values(metric: Any, label: str) -> dict[Any, float]:
    return {point.attributes[label]: point.value for point in metric.data.data_points}


def test_counters_and_gauges_are_exported_each_time_with_their_latest_values(provide: Callable[[], Read]) -> None:
    read = provide()

    metrics.RUNS.add("swept", "done", number=0)
    metrics.RUNS.add("swept", "done")
    metrics.RUNS.add("swept", "failed", number=2)
    metrics.ALARM_LIMIT.set(3, "swept", "failed_runs")
    first, second = read(), read()

    for found in (first, second):
        assert values(found["housekeeping_runs_total"], "outcome") == {"done": 1, "failed": 2}
        assert found["housekeeping_runs_total"].data.is_monotonic
        assert values(found["housekeeping_alarm_limit"], "alarm") == {"failed_runs": 3}


def test_durations_are_exported_in_the_buckets_of_the_documents(provide: Callable[[], Read]) -> None:
    read = provide()

    metrics.DURATION.observe(61.5, "swept")

    metric = read()["housekeeping_run_duration_seconds"]
    [point] = metric.data.data_points
    assert (metric.unit, point.count, point.sum) == ("s", 1, 61.5)
    assert tuple(point.explicit_bounds) == metrics.Histogram.options["buckets"]


def test_values_from_before_the_provider_are_exported(provide: Callable[[], Read]) -> None:
    metrics.ALARM_LIMIT.set(3, "swept", "backlog")

    read = provide()
    metrics.RUNS.add("swept", "done")

    assert values(read()["housekeeping_alarm_limit"], "alarm") == {"backlog": 3}


def test_every_metric_has_an_instrument(provide: Callable[[], Read]) -> None:
    read = provide()

    for metric in metrics.ALL:
        labels = ("x",) * len(metric.labels)
        metrics.exporter.measure((metric, labels, "observe" if isinstance(metric, metrics.Histogram) else "set", 1))

    assert read().keys() == {metric.name for metric in metrics.ALL}


def test_broken_provider_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, export_to: Callable[[metrics.Exporter], None], caplog: pytest.LogCaptureFixture
) -> None:
    export_to(metrics.Exporter({"registry": None}))
    monkeypatch.setattr(otel, "get_meter_provider", object)

    metrics.RUNS.add("swept", "done")
    metrics.RUNS.add("swept", "done")

    assert [record.getMessage() for record in caplog.records] == ["Metrics are not exported by OpenTelemetry"]
