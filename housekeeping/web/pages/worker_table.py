"""Table of the workers on the first page: searched, sorted and grouped as the URL says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from housekeeping.sweeps.insight.alerts import is_failed
from housekeeping.sweeps.insight.status import WorkerStatus, is_lost

_WIDTH: Final = 100  # characters of a search


def _started_at(status: WorkerStatus) -> datetime | None:
    return None if status.last_run is None else datetime.fromisoformat(status.last_run["started_at"])


def _oldest(status: WorkerStatus) -> datetime | None:
    # The order of some workers begins with a number, which compares with no time.
    return status.oldest if isinstance(status.oldest, datetime) else None


#: Value of ``sort`` in the URL -> the value to sort by. A worker without one comes last.
_KEYS: Final[dict[str, Callable[[WorkerStatus], Any]]] = {
    "name": lambda status: status.worker,
    "state": lambda status: status.state,
    "last_run": _started_at,
    "backlog": lambda status: None if status.waiting is None else status.waiting.rows,
    "oldest": _oldest,
    "next_tick": lambda status: status.next_tick,
}
#: What a reader looks for first: the latest run, the largest backlog.
_LARGEST_FIRST: Final = ("last_run", "backlog")
#: Label of each order, for the list of a form.
SORTS: Final = {
    "": "as declared",
    "name": "name",
    "state": "state",
    "last_run": "last run, latest first",
    "backlog": "backlog, largest first",
    "oldest": "oldest stale row first",
    "next_tick": "next tick first",
}


@dataclass(frozen=True, slots=True)
class Choices:
    """What the reader has chosen. The URL keeps it.

    Attributes:
      search: Words that a worker's name or database contains.
      sort: A key of `SORTS`; with a minus in front, the other way around.
      grouped: Whether the workers of a family, the part of the name before the first dot, are together.
      problems: Whether only workers with a problem are shown.
    """

    search: str = ""
    sort: str = ""
    grouped: bool = False
    problems: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Choices:
        """Return the choices in the URL's query; unknown ones are the default."""
        sort = query.get("sort", "")
        return cls(
            search=query.get("q", "").strip()[:_WIDTH],
            sort=sort if sort.removeprefix("-") in _KEYS else "",
            grouped=query.get("group") == "family",
            problems="problems" in query,
        )

    def query(self) -> dict[str, str]:
        """Return the URL's query."""
        values = {
            "q": self.search,
            "sort": self.sort,
            "group": "family" if self.grouped else "",
            "problems": "1" if self.problems else "",
        }
        return {name: value for name, value in values.items() if value}

    def sorted_by(self, column: str) -> dict[str, str]:
        """Return the query of a column's heading, which sorts by the column, and by a second click the other way."""
        return replace(self, sort=f"-{column}" if self.sort == column else column).query()

    def direction(self, column: str) -> str | None:
        """Return the value of ``aria-sort`` of a column; None if the rows are not sorted by it."""
        if self.sort.removeprefix("-") != column:
            return None
        is_descending = self.sort.startswith("-") != (column in _LARGEST_FIRST)
        return "descending" if is_descending else "ascending"


@dataclass(frozen=True, slots=True)
class Group:
    """Workers of a family, or all of them.

    Attributes:
      family: The group's family; None if the table is not grouped.
    """

    family: str | None
    workers: Sequence[WorkerStatus]

    @property
    def problems(self) -> int:
        """The number of workers with a problem."""
        return sum(map(has_problem, self.workers))


@dataclass(frozen=True, slots=True)
class WorkerTable:
    """Rows of the table, and what is hidden.

    Attributes:
      total: The number of workers, hidden or not.
      unmatched: Hidden, because the search does not find them.
      without_problem: Hidden, because they have no problem.
    """

    choices: Choices
    groups: Sequence[Group]
    total: int
    unmatched: int
    without_problem: int

    @property
    def shown(self) -> int:
        """The number of workers in the table."""
        return self.total - self.unmatched - self.without_problem

    @classmethod
    def of(cls, statuses: Iterable[WorkerStatus], choices: Choices) -> WorkerTable:
        """Return the table of these workers; those that are not set up are left out."""
        workers = [status for status in statuses if status.problem is None]
        found = [status for status in workers if _matches(status, choices.search)]
        shown = [status for status in found if has_problem(status)] if choices.problems else found
        groups = _groups(_sorted(shown, choices.sort), choices.grouped)
        return cls(choices, groups, len(workers), len(workers) - len(found), len(found) - len(shown))


def has_problem(status: WorkerStatus) -> bool:
    """Return whether a person should look: it has an alert, its last run failed or is lost, or an override is left."""
    run = status.last_run
    has_failed = run is not None and (is_failed(run["outcome"]) or is_lost(run["outcome"], run["heartbeat_age_s"]))
    return bool(status.alarms) or has_failed or status.switch is not None


def _matches(status: WorkerStatus, search: str) -> bool:
    text = f"{status.worker} {status.database}".casefold()
    return all(word in text for word in search.casefold().split())


def _sorted(workers: list[WorkerStatus], sort: str) -> list[WorkerStatus]:
    if not sort:
        return workers
    column = sort.removeprefix("-")
    key, descending = _KEYS[column], sort.startswith("-") != (column in _LARGEST_FIRST)
    known = [status for status in workers if key(status) is not None]
    return [*sorted(known, key=key, reverse=descending), *(each for each in workers if key(each) is None)]


def _groups(workers: Sequence[WorkerStatus], grouped: bool) -> list[Group]:
    if not grouped:
        return [Group(None, workers)] if workers else []
    families: dict[str, list[WorkerStatus]] = {}
    for status in workers:
        families.setdefault(status.worker.partition(".")[0], []).append(status)
    return [Group(family, families[family]) for family in sorted(families)]
