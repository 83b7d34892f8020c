"""Parts of `housekeeping.testing` that tests use."""

from __future__ import annotations

from housekeeping.testing import plugin
from housekeeping.testing.points import run_in_process
