"""Parts of `housekeeping.testing` that tests use."""

from __future__ import annotations

from housekeeping.testing import plugin
