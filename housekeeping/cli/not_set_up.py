"""The built-in workers that are not set up, in a line for each family."""

from __future__ import annotations

from collections.abc import Mapping

from housekeeping.cli.formatting import out
from housekeeping.sweeps.declaration import SetupProblem
from housekeeping.sweeps.family_setup import by_problem


def print_not_set_up(problems: Mapping[str, SetupProblem]) -> None:
    """Print a line for each family that is not set up, with its workers and the reason."""
    for problem, workers in by_problem(problems).items():
        out.print(f"not set up: {problem.family} ({', '.join(workers)}): {problem.text}", soft_wrap=True, style="dim")
