"""Parts of `housekeeping.demo` that tests use."""

from __future__ import annotations

from housekeeping.demo import scenes
from housekeeping.demo.demo import DemoInstallation, dashboard, runs_table, sums_table
from housekeeping.demo.scenes import FAMILIES, KEPT, count_refs, refs_settings, seed_refs
