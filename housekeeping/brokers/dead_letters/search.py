"""Search of dead letters: filters, and pages of what they find, newest first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final

from housekeeping.brokers.dead_letters.formatting import LONGEST, bounded
from housekeeping.brokers.dead_letters.models import DeadLetter, DeadLetterStore
from housekeeping.core.clock import SYSTEM_CLOCK, Clock, RunBudget
from housekeeping.core.errors import WrongArgument
from housekeeping.core.sanitize import mask_secrets

_POSITION: Final = re.compile(r"([0-9]{1,14})-(.+)", re.DOTALL)


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
class Position:
    """Place of a dead letter in the order newest first, from which a page continues.

    Attributes:
      died_ms: When it died, in milliseconds since 1970; 0 if that is unknown.
    """

    died_ms: int
    broker_id: str

    def __str__(self) -> str:
        return f"{self.died_ms}-{self.broker_id}"

    @classmethod
    def of(cls, letter: DeadLetter) -> Position:
        """Return the place of a letter."""
        return cls(0 if letter.died_at is None else round(letter.died_at.timestamp() * 1000), letter.broker_id)

    @classmethod
    def parse(cls, text: str) -> Position:
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
      older: Where the next page continues; None if no older letter meets the filter.
      complete: False if the search ended at its time limit, before the page was full.
      searched: The number of letters that were read for the page.
    """

    letters: list[DeadLetter]
    older: Position | None = None
    complete: bool = True
    searched: int = 0


def search(
    store: DeadLetterStore,
    sought: LetterFilter,
    size: int,
    after: Position | None = None,
    max_time: timedelta | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Page:
    """Return a page of the dead letters that meet a filter.

    Parameters:
      size: Letters of the page.
      after: Continue after this place. If its letter is gone, those of the same millisecond are found again.
      max_time: Time after the first letter until the search ends, so that a page with a rare error does not take
        minutes; None for no limit.

    Raises:
      RedisUnavailable, BrokerUnavailable: The broker does not answer.
    """
    letters: list[DeadLetter] = []
    last: DeadLetter | None = None
    # RabbitMQ reads all its letters before the first one: that time does not count, or no search would get further.
    budget: RunBudget | None = None
    searched = 0
    for letter in _newest_first(store, sought, after):
        budget = budget or (None if max_time is None else RunBudget(max_time, clock))
        if last is not None and (len(letters) == size or (budget is not None and budget.exceeded())):
            return Page(letters, Position.of(last), len(letters) == size, searched)
        if sought.since is not None and letter.died_at is not None and letter.died_at < sought.since:
            break  # so are all others
        last, searched = letter, searched + 1
        if sought.matches(letter):
            letters.append(letter)
    return Page(letters, searched=searched)


def matching(store: DeadLetterStore, sought: LetterFilter, limit: int | None = None) -> list[DeadLetter]:
    """Return the newest letters that meet a filter, no more than the limit, the oldest first."""
    return list(islice(filter(sought.matches, _newest_first(store, sought, None)), limit))[::-1]


def _shows(error: str, sought: str) -> bool:
    """Return whether an error contains a text as it is shown: what is masked cannot be searched for."""
    # Masking takes most of the time of a search. It adds nothing but asterisks, and a note to a long text.
    if "*" not in sought and len(error) <= LONGEST and sought not in error.casefold():
        return False
    return sought in (bounded(error) or "").casefold()


def _newest_first(store: DeadLetterStore, sought: LetterFilter, after: Position | None) -> Iterator[DeadLetter]:
    if after is None:
        return store.newest_first(sought.queue, sought.until)
    until = datetime.fromtimestamp(after.died_ms / 1000, UTC)
    return _behind(store.newest_first(sought.queue, until), after)


def _behind(letters: Iterable[DeadLetter], place: Position) -> Iterator[DeadLetter]:
    same: list[DeadLetter] = []
    for letter in letters:
        here = Position.of(letter)
        if here.died_ms == place.died_ms:
            same = [] if here == place else [*same, letter]
        elif here.died_ms < place.died_ms:
            yield from same
            same = []
            yield letter
    yield from same
