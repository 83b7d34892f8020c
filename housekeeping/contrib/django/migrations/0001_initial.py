"""The library's own tables, and the permissions of the dashboard."""

from __future__ import annotations

from django.db import migrations, models

from housekeeping.contrib.django.operations import UpgradeHousekeeping


class Migration(migrations.Migration):
    """Version 1 of the tables."""

    initial = True
    operations = [
        UpgradeHousekeeping(to=1),
        migrations.CreateModel(
            name="Dashboard",
            fields=[("id", models.BigAutoField(primary_key=True, serialize=False))],
            options={"managed": False, "default_permissions": ("view", "change")},
        ),
    ]
