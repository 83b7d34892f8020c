"""Permissions ``housekeeping.view_dashboard`` and ``housekeeping.change_dashboard``."""

from __future__ import annotations

from django.db import models


class Dashboard(models.Model):
    """The dashboard; it has permissions and no table."""

    class Meta:
        managed = False
        default_permissions = ("view", "change")
