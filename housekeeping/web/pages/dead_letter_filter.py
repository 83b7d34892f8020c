"""Filter of the dead letters, as the operator has typed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from housekeeping.brokers.dead_letters.search import LetterFilter
from housekeeping.core.errors import WrongArgument
from housekeeping.presentation.time_parsing import parse_since

_TEXTS: Final = ("queue", "actor", "error")
_TIMES: Final = ("since", "until")
_WIDTH: Final = 200  # characters
#: Time to search for the letters of a page, which says so if it ended before all were searched.
MAX_SEARCH: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class FilterForm:
    """Fields of the filter.

    Attributes:
      typed: The text of each field that is not empty; the query of links that keep the filter.
      errors: What is wrong with a field, by its name. Such a field filters nothing.
    """

    typed: Mapping[str, str]
    filter: LetterFilter
    errors: Mapping[str, str]

    @classmethod
    def of(cls, values: Mapping[str, str]) -> FilterForm:
        """Return the filter in the query of a page, or in a form."""
        given = {name: values.get(name, "").strip()[:_WIDTH] for name in (*_TEXTS, *_TIMES)}
        typed = {name: each for name, each in given.items() if each}
        now, times, errors = datetime.now(UTC), dict[str, datetime](), dict[str, str]()
        for name in _TIMES:
            try:
                if name in typed:
                    times[name] = parse_since(typed[name], now)
            except WrongArgument as error:
                errors[name] = str(error)
        queue, actor, text = (typed.get(name) for name in _TEXTS)
        return cls(typed, LetterFilter(queue, actor, text, times.get("since"), times.get("until")), errors)
