"""Parts of `housekeeping.app` that tests use."""

from __future__ import annotations

from housekeeping import app as installation
from housekeeping.app import broker_without_database
