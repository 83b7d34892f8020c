"""Reason why a worker cannot run in this installation, such as a missing table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SetupProblem:
    """Reason why a worker is not set up.

    Attributes:
      family: Family of workers that share the problem.
      text: What is missing, such as a table.
    """

    family: str
    text: str
