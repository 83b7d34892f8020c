"""Requeue or deletion of many dead letters at once, with a result for each, even if the broker stops answering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from housekeeping.brokers.dead_letters.models import DeadLetter, DeadLetterStore, LetterResult
from housekeeping.brokers.dead_letters.search import LetterFilter
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.core.wording import counted

Action = Literal["requeue", "delete"]

_IN_WORDS: Final[dict[str, str]] = {
    "requeued": "requeued",
    "deleted": "deleted",
    "duplicate": "kept as a duplicate of a live message",
    "refused": "kept because it cannot be sent",
    "gone": "already requeued or deleted",
}


@dataclass(frozen=True, slots=True)
class BulkResult:
    """Results of requeueing or deleting many dead letters.

    Attributes:
      stopped: Why the remaining letters were not tried; None if all were tried.
      left: The number of letters that were not tried.
    """

    results: Sequence[LetterResult]
    stopped: str | None = None
    left: int = 0

    @property
    def kept(self) -> list[LetterResult]:
        """The letters that a requeue left in place: duplicates and refused ones."""
        return [each for each in self.results if each.outcome in ("duplicate", "refused")]

    def __str__(self) -> str:
        numbers = Counter[str](each.outcome for each in self.results)
        parts = [f"{numbers[name]:,} {text}" for name, text in _IN_WORDS.items() if numbers[name]]
        if self.stopped is not None:
            parts.append(f"{counted(self.left, 'dead letter')} not tried: {self.stopped}")
        return "; ".join(parts) or "no dead letter was found"

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping deadletters requeue --json`` and ``delete --json``."""
        return {
            "counts": dict(Counter(each.outcome for each in self.results)),
            "not_tried": self.left,
            "error": self.stopped,
            "dead_letters": [{"id": each.id, "outcome": each.outcome, "detail": each.detail} for each in self.results],
        }


def describe_choice(letters: Sequence[DeadLetter], sought: LetterFilter | None) -> str:
    """Return what a bulk change is about, for the log of actions.

    Parameters:
      sought: The filter that has found the letters; None if they were chosen by their ids.
    """
    if sought is None:
        return ", ".join(letter.id for letter in letters)
    return f"{counted(len(letters), 'dead letter')}: {sought}"


def apply(store: DeadLetterStore, action: Action, letters: Sequence[DeadLetter]) -> BulkResult:
    """Requeue or delete dead letters, in this order. A broken one fails alone; an unavailable broker ends it."""
    steps: dict[Action, Callable[[Sequence[DeadLetter]], Iterator[LetterResult]]] = {
        "requeue": store.requeue_each,
        "delete": store.delete_each,
    }
    done: list[LetterResult] = []
    try:
        for result in steps[action](letters):
            done.append(result)
    except HousekeepingError as error:
        return BulkResult(done, error_line(error), len(letters) - len(done))
    return BulkResult(done)
