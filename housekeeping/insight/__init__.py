"""What operators see: plan, status, alerts, and explanations of outcomes. Start with `status`."""

from __future__ import annotations
