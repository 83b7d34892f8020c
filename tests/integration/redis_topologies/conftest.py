"""Fixtures of the tests of Sentinel and Redis Cluster."""

from __future__ import annotations

from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
