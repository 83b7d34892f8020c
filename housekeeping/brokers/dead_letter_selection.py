"""Selection of dead letters, by ids or by a filter, and bulk changes of the selected ones.

::

    store = dead_letters_of(broker)
    page = search(store, LetterFilter(actor="send_invoice", error="timed out"))
    apply(store, "requeue", readable(page.letters))

`dead_letters` has the letters and their stores on both brokers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from housekeeping.brokers.dead_letters import LONGEST, DeadLetter, DeadLetterStore, LetterAction, LetterResult, bounded
from housekeeping.core.clock import SYSTEM_CLOCK, Clock, RunBudget
from housekeeping.core.errors import DeadLetterRefused, HousekeepingError, WrongArgument
from housekeeping.core.logs import counted, error_line, mask_secrets

_POSITION: Final = re.compile(r"([0-9]{1,14})-(.+)", re.DOTALL)


def find(store: DeadLetterStore, ids: Collection[str]) -> dict[str, DeadLetter]:
    """Return dead letters by message id or broker id; of several with the same id, the newest."""
    sought, letters = set(ids), dict[str, DeadLetter]()
    for letter in store.newest_first():
        if len(letters) == len(sought):
            break
        for name in {letter.id, letter.broker_id} & sought:
            letters.setdefault(name, letter)
    return letters


def found(store: DeadLetterStore, ids: Sequence[str]) -> list[DeadLetter]:
    """Return the dead letters with these ids, in this order, each once.

    Raises:
      DeadLetterRefused: When one of the ids has no dead letter.
    """
    letters, given = find(store, ids), list(dict.fromkeys(ids))
    for each in given:
        if each not in letters:
            raise DeadLetterRefused(f"there is no dead letter {each!r}; see: housekeeping deadletters list")
    return [letters[each] for each in given]


def readable(letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
    """Return the letters if all of them can be read.

    Raises:
      DeadLetterRefused: When one cannot be read.
    """
    for letter in letters:
        if letter.message is None:
            raise DeadLetterRefused(
                f"{letter.broker_id!r} cannot be sent again, because it cannot be read: {letter.unreadable}"
            )
    return letters


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Conditions that a dead letter must meet; None for any.

    Attributes:
      actor: Name of its actor.
      error: Text that its error contains, as it is shown, in upper or lower case.
      since: Earliest time of its death. A letter without a known time does not meet it.
      until: Latest time of its death.
    """

    queue: str | None = None
    actor: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __bool__(self) -> bool:
        return self != LetterFilter()

    def __str__(self) -> str:
        """Return the conditions in one line, with secrets masked; ``all`` without conditions."""
        texts = [(name, getattr(self, name)) for name in ("queue", "actor", "error")]
        times = [(name, getattr(self, name)) for name in ("since", "until")]
        conditions = [f"{name} {mask_secrets(text)!r}" for name, text in texts if text is not None]
        conditions += [f"{name} {at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" for name, at in times if at is not None]
        return ", ".join(conditions) or "all"

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether the letter meets the conditions."""
        if self.queue is not None and letter.queue != self.queue:
            return False
        if self.actor is not None and (letter.message is None or letter.message.actor_name != self.actor):
            return False
        if self.since is not None and (letter.died_at is None or letter.died_at < self.since):
            return False
        if self.until is not None and letter.died_at is not None and letter.died_at > self.until:
            return False
        return self.error is None or _shows(letter.error or "", self.error.casefold())


@dataclass(frozen=True, slots=True)
class LetterPosition:
    """Place of a dead letter in the order newest first, from which a page continues.

    Attributes:
      died_ms: When it died, in milliseconds since 1970; 0 if that is unknown.
    """

    died_ms: int
    broker_id: str

    def __str__(self) -> str:
        return f"{self.died_ms}-{self.broker_id}"

    @classmethod
    def of(cls, letter: DeadLetter) -> LetterPosition:
        """Return the place of a letter."""
        return cls(0 if letter.died_at is None else round(letter.died_ms), letter.broker_id)

    @classmethod
    def parse(cls, text: str) -> LetterPosition:
        """Return the place that `str` has written.

        Raises:
          WrongArgument: The text is something else.
        """
        found = _POSITION.fullmatch(text)
        if found is None:
            raise WrongArgument(
                f"{text[:60]!r} is not a place in the dead letters; take the one that a list has printed"
            )
        return cls(int(found[1]), found[2])


@dataclass(frozen=True, slots=True)
class Page:
    """Dead letters that meet a filter, newest first.

    Attributes:
      older: After which letter the next page continues; None if no older one meets the filter.
      complete: False if the search ended at its time limit, before the page was full.
      searched: The number of letters that were read for the page.
    """

    letters: list[DeadLetter]
    older: LetterPosition | None = None
    complete: bool = True
    searched: int = 0


def search(
    store: DeadLetterStore,
    sought: LetterFilter,
    size: int | None = None,
    after: LetterPosition | None = None,
    max_time: timedelta | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Page:
    """Return a page of the dead letters that meet a filter.

    Parameters:
      size: Letters of the page; None for all.
      after: Continue after this place. If its letter was removed, those of the same millisecond are returned again.
      max_time: Time after the first letter until the search ends, so that a page with a rare error does not take
        minutes; None for no limit.

    Raises:
      RedisUnavailable, BrokerUnavailable: The broker does not answer.
    """
    letters: list[DeadLetter] = []
    last: DeadLetter | None = None
    # RabbitMQ reads all letters before it returns the first one. With that time counted, a search might never advance.
    budget: RunBudget | None = None
    searched = 0
    for letter in _newest_first(store, sought, after):
        budget = budget or (None if max_time is None else RunBudget(max_time, clock))
        if last is not None and (len(letters) == size or (budget is not None and budget.exceeded())):
            return Page(letters, LetterPosition.of(last), len(letters) == size, searched)
        if sought.since is not None and letter.died_at is not None and letter.died_at < sought.since:
            break  # so are all others
        last, searched = letter, searched + 1
        if sought.matches(letter):
            letters.append(letter)
    return Page(letters, searched=searched)


def _shows(error: str, sought: str) -> bool:
    """Return whether the shown text of an error contains a text. Masked secrets are not searched."""
    # Masking takes most of the time of a search. It adds nothing but asterisks, and a note to a long text.
    if "*" not in sought and len(error) <= LONGEST and sought not in error.casefold():
        return False
    return sought in (bounded(error) or "").casefold()


def _newest_first(store: DeadLetterStore, sought: LetterFilter, after: LetterPosition | None) -> Iterator[DeadLetter]:
    if after is None:
        return store.newest_first(sought.queue, sought.until)
    until = datetime.fromtimestamp(after.died_ms / 1000, UTC)
    return _behind(store.newest_first(sought.queue, until), after)


def _behind(letters: Iterable[DeadLetter], place: LetterPosition) -> Iterator[DeadLetter]:
    same: list[DeadLetter] = []
    for letter in letters:
        here = LetterPosition.of(letter)
        if here.died_ms == place.died_ms:
            same = [] if here == place else [*same, letter]
        elif here.died_ms < place.died_ms:
            yield from same
            same = []
            yield letter
    yield from same


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
    """Return a description of the selected letters, for the action log.

    Parameters:
      sought: The filter that has found the letters; None if they were chosen by their ids.
    """
    if sought is None:
        return ", ".join(letter.id for letter in letters)
    return f"{counted(len(letters), 'dead letter')}: {sought}"


#: Letters between two reports of the progress of a bulk change.
_REPORTED: Final = 200


def apply(
    store: DeadLetterStore,
    action: LetterAction,
    letters: Sequence[DeadLetter],
    report: Callable[[str], object] = lambda text: None,
) -> BulkResult:
    """Requeue or delete the dead letters one after the other.

    A broken one is refused, and the others continue. If the broker does not answer, the result says how many are left.
    If the process is killed, each letter is either changed or still there, and the rest can be changed again.

    Parameters:
      report: Called with the progress at regular intervals: ``1,200 of 20,000 tried``.
    """
    done: list[LetterResult] = []
    try:
        for result in store.change_each(action, letters):
            done.append(result)
            if len(done) % _REPORTED == 0:
                report(f"{len(done):,} of {len(letters):,} tried")
    except HousekeepingError as error:
        return BulkResult(done, error_line(error), len(letters) - len(done))
    return BulkResult(done)
