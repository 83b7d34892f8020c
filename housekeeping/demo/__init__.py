"""``housekeeping demo``: the whole of it on servers of its own, on made-up data, with nothing left behind."""

from __future__ import annotations

from housekeeping.demo.command import demo

__all__ = ["demo"]
