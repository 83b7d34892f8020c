"""Startup hook that plants the fault named by ``BROKEN_TWIN`` in a Python process of a test."""

from __future__ import annotations

import os

import pytest

from tests.twins.registry import twin_named

if "BROKEN_TWIN" in os.environ:
    twin_named(os.environ["BROKEN_TWIN"]).breaks(pytest.MonkeyPatch())
