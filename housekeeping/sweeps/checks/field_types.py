"""Type check of a declaration's fields, with errors that show the right form."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from housekeeping.core.errors import DeclarationError
from housekeeping.core.sanitize import described

#: Example of a value by its type.
_FORMS: Final[Mapping[Any, str]] = {
    NoneType: "None",
    bool: "True or False",
    int: "a whole number, such as 100",
    float: "a number, such as 0.5",
    str: 'a text, such as "shop.expired"',
    timedelta: "timedelta(days=14)",
    tuple: 'a tuple, such as ("deleted_rows",) with the comma',
}
_EXAMPLES: Final[Mapping[str, str]] = {
    "stale": "a function of the time: lambda now: Session.expires_at <= now",
    "hold": "a function: lambda: LegalHold.user_id == Session.user_id",
    "order": "a tuple of columns: (Session.expires_at, Session.id)",
    "action": "Delete(), Transition(machine, event) or Call(function, then=Delete())",
    "schedule": 'a cron expression: "*/5 * * * *"',
    "most": 'limits by count: {"failed": 100}',
    "ttl": "timedelta(minutes=10)",
    "max_runtime": "timedelta(minutes=5)",
    "longest_run": "timedelta(minutes=10)",
    "target_batch": "timedelta(seconds=1)",
    "event_columns": 'columns by key: {"order_id": Order.id}',
    "unavailable_errors": "types of errors: (ConnectionError, TimeoutError)",
    "then": "Delete() or Transition(machine, event)",
}

#: Fields whose default only stands for a missing value.
_REQUIRED: Final = ("stale", "action")


def check_types(owner: str, declared: Any) -> None:
    """Raise unless every field of a dataclass has a value of its declared type.

    Raises:
      DeclarationError: A value has another type; the text names the field, its value, and what to write.
    """
    kind: Any = type(declared)
    for name, hint in _hints(kind).items():
        value = getattr(declared, name)
        if not _fits(value, hint):
            raise DeclarationError(f"{owner}: {name} is {described(value)}; write {_form(name, value, hint)}")


@lru_cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _form(name: str, value: Any, hint: Any) -> str:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    # A number instead of a timedelta: suggest the usual unit.
    if timedelta in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        unit = "days" if name in ("stale_after", "older_than") else "seconds"
        forms = [f"timedelta({unit}={value})"]
    elif name in _EXAMPLES and get_origin(hint) is not Literal:
        forms = [_EXAMPLES[name]]
    else:
        forms = [_form_of(kind) for kind in kinds if kind is not NoneType]
    return " or ".join([*dict.fromkeys(forms), *(["None"] if NoneType in kinds and name not in _REQUIRED else [])])


def _form_of(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin is Literal:
        return ", ".join(map(repr, get_args(hint)))
    if origin is collections.abc.Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dictionary"
    return _FORMS.get(origin) or f"{origin.__name__}(...)"


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if origin is tuple:
        return isinstance(value, tuple) and (len(arguments) < 2 or all(_fits(each, arguments[0]) for each in value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = arguments or (Any, Any)
        return isinstance(value, Mapping) and all(
            _fits(name, key) and _fits(each, item) for name, each in value.items()
        )
    if origin in (int, float):
        return isinstance(value, int if origin is int else int | float) and not isinstance(value, bool)
    if origin is Any or not isinstance(origin, type):
        return True
    if getattr(origin, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(origin) if not name.startswith("_"))
    return isinstance(value, origin)
