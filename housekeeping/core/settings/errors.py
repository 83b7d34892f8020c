"""Errors of settings in one line: the name of the variable, its value, and what it should be."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pydantic
from dotenv.parser import parse_stream
from pydantic import BaseModel

from housekeeping.core.errors import SettingsError
from housekeeping.core.sanitize import mask_secrets
from housekeeping.core.settings.workers import BreakerSettings, ObjectStoreSettings, ThrottleSettings, WorkerSettings

PREFIX: Final = "HOUSEKEEPING_"
_MAX_SHOWN: Final = 200  # characters of a wrong value
#: Variables of the embedded servers and of the tests.
_OTHER_PREFIXES: Final = ("HOUSEKEEPING_TEST_", "HOUSEKEEPING_EMBEDDED")


def variable(field: str) -> str:
    """Return the variable of a field of `Settings`."""
    return f"{PREFIX}SCHEMA" if field in ("schema_name", f"{PREFIX}SCHEMA") else f"{PREFIX}{field.upper()}"


def names_in_file(path: Path) -> list[str]:
    """Return the names that a ``.env`` file sets. Malformed lines without the prefix are ignored."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8") as stream:
            entries = list(parse_stream(stream))
    except UnicodeDecodeError:
        raise SettingsError(f"{path} cannot be read; it should be UTF-8 text") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.error and PREFIX in entry.original.string.upper():
            raise SettingsError(f"{path}, line {entry.original.line} is malformed; it should be NAME=value")
    return [entry.key for entry in entries if entry.key]


def reject_unknown(names: Iterable[str], fields: Iterable[str], place: str = "") -> None:
    """Raise SettingsError for a name with the library's prefix that is no setting.

    Parameters:
      fields: The fields of `Settings`.
      place: Where the names come from, for the error.
    """
    known = [variable(field).removeprefix(PREFIX) for field in fields]
    for name in sorted(names):
        setting = name.upper().removeprefix(PREFIX)  # pydantic-settings reads lower case as well
        if not name.upper().startswith(PREFIX) or setting in known or name.upper().startswith(_OTHER_PREFIXES):
            continue
        near = difflib.get_close_matches(setting, known, n=1)
        all_settings = ", ".join(f"{PREFIX}{each}" for each in known)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"the settings are {all_settings}"
        raise SettingsError(f"{name} is not a setting{place}; {hint}")


#: Plain words for types of errors that pydantic describes in terms of Python.
_EXPECTED: Final = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "model_type": "a JSON object",
    "tuple_type": "a list of URLs",
}
#: Keys of a worker that are objects.
_NESTED: Final[dict[str, type[BaseModel]]] = {"gates": ThrottleSettings, "breaker": BreakerSettings}
#: Parts of the place of an error that are no key of a setting.
_NO_KEYS: Final = ("[key]", "[list]", "[object]")


def one_line(error: pydantic.ValidationError) -> str:
    """Describe the first error: name, value and expected form."""
    first = error.errors(include_url=False)[0]
    field, *path = (part for part in first["loc"] if part not in _NO_KEYS)
    where = variable(str(field)) + "".join(f"[{json.dumps(part)}]" for part in path)
    if first["type"] == "extra_forbidden":
        model = WorkerSettings if field == "workers" else ObjectStoreSettings
        keys = (_NESTED[str(path[1])] if len(path) == 3 else model).model_fields
        near = difflib.get_close_matches(str(path[-1]), keys, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
        return f"{where} is not a valid key; {hint}"
    expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, ").removeprefix("Input should be "))
    secret = any(mask_secrets(f"{part}=x") != f"{part}=x" for part in (str(field), *path[-1:]))
    return f"{where} is {'***' if secret else _shown(first['input'])}; it should be {expected}"


def _shown(value: Any) -> str:
    """Return the value on one line, without passwords."""
    if not isinstance(value, str):
        return mask_secrets(json.dumps(value, default=str))
    # Text before an @ can be a password even if the scheme is missing.
    text = mask_secrets(value if "://" in value else re.sub(r"^\S*:\S*@", "***@", value))
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
