"""Fixtures of the metrics tests."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client
import pytest

from tests.acceptance.queues import queues as queues
from tests.internals.core import metrics

#: Returns the value of a sample by its name and labels, or `None` if there is no such sample.
Exported = Callable[..., float | None]


@pytest.fixture
def exported(export_to: Callable[[metrics.Exporter], None]) -> Exported:
    """Export this process's metrics from now on."""
    registry = prometheus_client.CollectorRegistry()
    export_to(metrics.Exporter({"registry": registry}))
    return lambda name, **labels: registry.get_sample_value(name, labels)
