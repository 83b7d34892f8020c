"""Minimal Django settings."""

import os

INSTALLED_APPS = ["housekeeping.contrib.django", "on_django"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": os.environ["PGDATABASE"],
        "USER": os.environ["PGUSER"],
        "PASSWORD": os.environ.get("PGPASSWORD", ""),
        "HOST": os.environ["PGHOST"],
        "PORT": os.environ.get("PGPORT", ""),
        "OPTIONS": {"options": os.environ.get("PGOPTIONS", "")},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
REDIS_URL = os.environ["REMINDERS_REDIS_URL"]
HOUSEKEEPING = {"REDIS_URL": REDIS_URL}
