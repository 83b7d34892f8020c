"""Settings of a Django application in Tokyo, as a module: Django then moves the process to that time zone, too."""

from __future__ import annotations

import os
from typing import Any, Final

from psycopg2.extensions import parse_dsn

_NAMES: Final = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
_given: Final = parse_dsn(os.environ["HOUSEKEEPING_DATABASE_URL"])

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        **{_NAMES[name]: value for name, value in _given.items() if name in _NAMES},
        "OPTIONS": {"options": _given["options"]},
    }
}
TIME_ZONE = "Asia/Tokyo"
USE_TZ = os.environ["USE_TZ"] == "on"
