"""Tables whose locks and vacuum throttle a run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from housekeeping.database.catalog import quoted_name
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.stage import Explainable, Stage


def throttled_tables(stages: Sequence[Stage], now: datetime) -> list[str]:
    """Return the tables that the stages' statements use, quoted for SQL."""
    queries = [query for each in stages if isinstance(each, Explainable) for query in each.explain_queries(now)]
    models = {query.model for query in queries} | {each.model for each in stages if isinstance(each, PartitionStage)}
    return sorted({quoted_name(model) for model in models})
