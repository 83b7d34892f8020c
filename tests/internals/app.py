"""Parts of `housekeeping.app` that tests use."""

from __future__ import annotations

from housekeeping import app as installation
from housekeeping import serve
from housekeeping.app import broker_without_database
from housekeeping.serve import Service
