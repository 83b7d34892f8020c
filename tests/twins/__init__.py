"""Broken twins: planted faults that each break one promise and must make its test fail.

``pytest --twins`` runs these tests, and only these, each with its fault planted; it is green when every one of
them notices. Some wait long for what the fault keeps from coming: ``pytest --twins -m "slow or not slow"`` runs those
too. The modules of this package list them, one for each part of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Twin:
    """Fault with the test that must notice it.

    Attributes:
      promise: The number of the promise or scenario it breaks, such as ``D5`` or ``F1``.
      name: What it does wrong, as an identifier, unique among all twins.
      test: The test's id, from the project's top folder: ``tests/.../test_x.py::test_y``.
      breaks: Plants the fault.
      in_processes: Whether it is planted in the Python processes that the test starts as well.
      slow: Whether its test takes over five seconds to notice.
    """

    promise: str
    name: str
    test: str
    breaks: Callable[[pytest.MonkeyPatch], None]
    in_processes: bool = False
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.promise}-{self.name}"
