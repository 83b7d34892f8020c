"""Tables of the application."""

from __future__ import annotations

from django.db import models


class Reminder(models.Model):
    """Reminder to send once when it is due."""

    text = models.TextField()
    due_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True)
