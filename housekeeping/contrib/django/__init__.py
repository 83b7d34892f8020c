"""Django app: settings, sweeps of ``<app>/sweeps.py``, ``manage.py housekeeping``, migrations, checks, dashboard.

Add ``"housekeeping.contrib.django"`` to ``INSTALLED_APPS``. `variables` converts Django's settings to those of the
library. The commands get them as environment variables, and code of the project by `load_settings`.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import quote, urlencode

from django.apps import apps as django_apps  # renamed, because this package has a module `apps`
from django.conf import settings as django_settings

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import PREFIX, Settings, reject_unknown, variable

#: Options of Django and its drivers. All others are libpq's (``sslmode``, ``options``, ``service``, ...).
_NOT_LIBPQS: Final = {
    *("assume_role", "context", "cursor_factory", "isolation_level", "pool", "prepare_threshold"),
    "server_side_binding",
}


def load_settings() -> Settings:
    """Return the library's settings of the Django project, for example for `housekeeping.install`.

    Django's setting ``HOUSEKEEPING`` contains them by their names without the prefix, such as ``REDIS_URL``. Its key
    ``DATABASES`` lists aliases of Django's ``DATABASES``, by default only ``default``. The first one is the database
    ``main``, the others keep their names. Environment variables apply to settings that are missing in
    ``HOUSEKEEPING``, except for databases and sweeps.

    Raises:
      SettingsError: A setting is missing or wrong.
    """
    given = variables()
    return Settings.load(**{name: given[variable(name)] for name in Settings.model_fields if variable(name) in given})


def variables() -> dict[str, str]:
    """Return the settings that Django's settings define, as environment variables.

    Raises:
      SettingsError: A name is not a setting, or an alias is not a PostgreSQL database.
    """
    given = dict(getattr(django_settings, "HOUSEKEEPING", {}))
    place = " (in HOUSEKEEPING of Django's settings)"
    reject_unknown((f"{PREFIX}{name}" for name in given), Settings.model_fields, place)
    sweeps = given.pop("SWEEPS", [])
    main, *others = aliases()
    values: dict[str, Any] = {
        "DATABASE_URL": database_url(main),
        **given,
        "DATABASES": {alias: database_url(alias) for alias in others},
        # Django's setup comes first, because every process that imports sweeps needs the models.
        "SWEEPS": [f"{__name__}.setup", *_discovered(), *([sweeps] if isinstance(sweeps, str) else sweeps)],
    }
    texts = {name: each if isinstance(each, str) else json.dumps(each, default=str) for name, each in values.items()}
    return {f"{PREFIX}{name}": text for name, text in texts.items() if values[name] is not None}


def aliases() -> tuple[str, ...]:
    """Return the aliases of the library's databases; the first one is ``main``.

    Raises:
      SettingsError: ``DATABASES`` in ``HOUSEKEEPING`` is not a list of aliases.
    """
    given = getattr(django_settings, "HOUSEKEEPING", {}).get("DATABASES", ["default"])
    if not isinstance(given, list | tuple) or not given:
        raise SettingsError(
            "HOUSEKEEPING['DATABASES'] should be a list of aliases of DATABASES, such as ['default', 'events']"
        )
    return tuple(given)


def database_url(alias: str = "default") -> str:
    """Return the URL of ``DATABASES[alias]``, with the server, user and options of Django's connections.

    Raises:
      SettingsError: The alias does not exist, or its database is not PostgreSQL.
    """
    database = django_settings.DATABASES.get(alias)
    if database is None:
        raise SettingsError(f"DATABASES of Django's settings has no {alias!r}, which HOUSEKEEPING['DATABASES'] names")
    if database["ENGINE"].startswith("django.db.backends.") and not database["ENGINE"].endswith(".postgresql"):
        raise SettingsError(
            f"DATABASES[{alias!r}] of Django's settings is {database['ENGINE']}; it should be PostgreSQL"
        )
    options = dict(database.get("OPTIONS", {}))
    if options.get("assume_role"):
        options["options"] = f"{options.get('options', '')} -c role={options['assume_role']}".strip()
    parameters = {
        "dbname": database.get("NAME"),
        "user": database.get("USER"),
        "password": database.get("PASSWORD"),
        "host": database.get("HOST"),  # may be a folder of sockets
        "port": database.get("PORT"),
        **{name: value for name, value in options.items() if name not in _NOT_LIBPQS},
    }
    set_ones = {name: value for name, value in parameters.items() if value not in (None, "")}
    # libpq reads parameters after the question mark. It needs %20 for a space, not +.
    return f"postgresql://?{urlencode(set_ones, quote_via=quote)}"


def _discovered() -> list[str]:
    names = [f"{config.name}.sweeps" for config in django_apps.get_app_configs()]
    return [name for name in names if find_spec(name) is not None]
