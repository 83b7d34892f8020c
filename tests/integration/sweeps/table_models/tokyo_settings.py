"""Settings of a Django application in Tokyo, as a module: Django then moves the process to that time zone, too."""

from __future__ import annotations

import os
from typing import Any, Final

from psycopg2.extensions import parse_dsn

_NAMES: Final = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
_given: Final = parse_dsn(os.environ["APPLICATION_URL"])

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        **{_NAMES[name]: _given.pop(name) for name in _NAMES if name in _given},
        "OPTIONS": _given,
    }
}
TIME_ZONE = "Asia/Tokyo"
USE_TZ = os.environ["USE_TZ"] == "on"
