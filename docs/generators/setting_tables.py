"""Tables of settings from the models. Their purpose is written by hand, in the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from docs.generators.tables import ByHand, code, table
from housekeeping.core.settings import Settings, WorkerSettings, variable

#: Invalid values. A validator's error for one of them describes the valid values.
_WRONG: Final = ("", "[]", "?")
_PLAIN: Final[dict[Any, str]] = {
    bool: "`true` or `false`",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a folder",
}


def environment(old: str) -> str:
    """Return the table of environment variables."""
    rows = [(code(variable(name)), _value(field), _default(field), ByHand()) for name, field in _fields(Settings)]
    return table(("Variable", "Value", "Default", "What it is"), rows, old)


def of_one_worker(old: str) -> str:
    """Return the table of keys in ``HOUSEKEEPING_WORKERS``."""
    rows = [(code(name), _value(field), ByHand()) for name, field in _fields(WorkerSettings)]
    return table(("Key", "Value", "What it is"), rows, old)


def _fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return "-" if default is None or default in ((), {}) else code(str(default))


def _value(field: FieldInfo) -> str:
    return _words(field.annotation, field.metadata)


def _words(kind: Any, checks: list[Any]) -> str:
    checks = [one for check in checks for one in (check.metadata if isinstance(check, FieldInfo) else [check])]
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return _words(inner, [*checks, *more])
    if get_origin(kind) in (Union, UnionType):
        only = next(each for each in get_args(kind) if each is not NoneType)
        return _words(only, checks)
    if get_origin(kind) is Literal:
        return ", ".join(code(str(each)) for each in get_args(kind))
    said = next(_said(checks), None)
    if said is not None:
        return said
    if get_origin(kind) is tuple:
        return f"several of: {_words(get_args(kind)[0], [])}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "a JSON object"
    return " ".join((_PLAIN.get(kind, "JSON"), *_limits(checks)))


def _said(checks: list[Any]) -> Iterator[str]:
    """Yield the descriptions of valid values from the validators."""
    for check in checks:
        if not isinstance(check, AfterValidator | BeforeValidator):
            continue
        for wrong in _WRONG:
            try:
                check.func(wrong)  # type: ignore[call-arg]
            except ValueError as error:
                if not str(error).startswith("JSON"):
                    yield _example(str(error).split(" (")[0])
                    break


def _example(words: str) -> str:
    before, such_as, example = words.partition(" such as ")
    return before if not such_as else f"{before} such as " + " or ".join(map(code, example.split(" or ")))


def _limits(checks: list[Any]) -> Iterator[str]:
    least = next((check.ge for check in checks if isinstance(check, Ge)), None)
    above = next((check.gt for check in checks if isinstance(check, Gt)), None)
    most = next((check.le for check in checks if isinstance(check, Le)), None)
    if least is not None:
        yield f"from {_number(least)}" + ("" if most is None else f" to {_number(most)}")
    elif above is not None:
        yield f"above {_number(above)}" + ("" if most is None else f", at most {_number(most)}")


def _number(value: Any) -> str:
    return f"{value:,}"
