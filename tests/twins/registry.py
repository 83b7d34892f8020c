"""Registry of all broken twins in this package."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import tests.twins
from tests.twins import Twin

_NO_LISTS = ("planting", "registry", "running", "startup")


@functools.cache
def all_twins() -> tuple[Twin, ...]:
    """Return every twin, ordered by module."""
    names = sorted(module.name for module in pkgutil.iter_modules(tests.twins.__path__))
    lists = [importlib.import_module(f"tests.twins.{name}") for name in names if name not in _NO_LISTS]
    return tuple(twin for each in lists for twin in each.TWINS)


def twin_named(name: str) -> Twin:
    """Return the twin of this name."""
    return next(twin for twin in all_twins() if twin.name == name)
