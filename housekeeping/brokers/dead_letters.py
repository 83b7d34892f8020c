"""Dead letters: messages that the broker has given up, to be listed, searched, requeued and deleted.

::

    store = dead_letters_of(broker)
    page = search(store, LetterFilter(actor="send_invoice", error="timed out"))
    apply(store, "requeue", readable(page.letters))

A message that `read_message` cannot read becomes a dead letter, too. Texts for people have their secrets masked.
`redis` and `rabbitmq` have the stores, beside the brokers that fill them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Final, Literal, Protocol
from uuid import uuid4

from dramatiq import Broker, Message
from dramatiq.common import current_millis
from dramatiq.middleware import MiddlewareError

from housekeeping.brokers.dramatiq_internals import SkipEnqueue, StoreUnavailable, read_message
from housekeeping.core.clock import SYSTEM_CLOCK, Clock, RunBudget
from housekeeping.core.errors import DeadLetterRefused, HousekeepingError, RedisUnavailable, WrongArgument
from housekeeping.core.logs import counted, error_line, in_one_line, is_secret, mask_secrets
from housekeeping.database.errors import error_in

#: Message options of the past attempts. A `tick` stays, because the requeued message is another attempt at that tick.
#: An `idempotency_key` and callbacks stay, because the message is the same.
_PAST_ATTEMPTS: Final = frozenset(
    {"retries", "traceback", "requeue_timestamp", "redis_message_id", "eta", "claim", "scheduled_at", "duplicate_of"}
)
#: Beginning of the message options of deduplication.
OF_DEDUPLICATION: Final = "deduplication_"
#: The message option that distinguishes the attempts of a requeued dead letter from those before.
LIFE: Final = OF_DEDUPLICATION + "life"
#: Errors of one message, and not of a server. Its sender, or an older release, chose what it contains.
_BROKEN: Final = (DeadLetterRefused, ValueError, TypeError, KeyError, AttributeError)
NAME_WIDTH: Final = 60  # characters of an id, a name or the arguments in a list
_ERROR_WIDTH: Final = 200
_UNDECLARED: Final = (
    "the worker process that took it does not declare this actor: restart it with the sender's code and settings, then "
    "requeue"
)


def time_of(ms: float) -> datetime | None:
    """Return the time of milliseconds since 1970; None for 0, and for a number that another program wrote."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC) if ms else None
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(frozen=True)
class DeadLetter:
    """A message that the broker has given up; it is decoded when its content is first asked for.

    Attributes:
      broker_id: The broker's id.
      queue: The queue of the message.
      died_ms: When the broker gave it up, in milliseconds since 1970; 0 if unknown.
      body: The encoded message.
      tag: RabbitMQ's number of the delivery that has read it.
    """

    broker_id: str
    queue: str
    died_ms: float
    body: bytes
    tag: int = 0

    @cached_property
    def died_at(self) -> datetime | None:
        """Return when the broker gave it up; None if unknown."""
        return time_of(self.died_ms)

    @property
    def sent_at(self) -> datetime | None:
        """Return when the message was sent last; None if unknown."""
        return time_of(self.message.message_timestamp if self.message else 0)

    @cached_property
    def _decoded(self) -> tuple[Message[Any] | None, str]:
        return read_message(self.body)

    @property
    def message(self) -> Message[Any] | None:
        """Return the decoded message; None if the body cannot be decoded."""
        return self._decoded[0]

    @property
    def unreadable(self) -> str:
        """Return why the body cannot be decoded; an empty text if it can."""
        return self._decoded[1]

    @property
    def id(self) -> str:
        """Return the message id, or the broker's id for an unreadable message."""
        return self.message.message_id if self.message else self.broker_id

    @property
    def retries(self) -> int:
        """Return the number of retries."""
        retries = self.message.options.get("retries", 0) if self.message else 0
        return retries if isinstance(retries, int) else 0

    @property
    def traceback(self) -> str | None:
        """Return the traceback of the last error, if known."""
        traceback = self.message.options.get("traceback") if self.message else None
        return traceback if isinstance(traceback, str) else None

    @property
    def error(self) -> str | None:
        """Return the error of the innermost cause; without a traceback, why the message cannot be read, or None."""
        found = error_in(self.traceback or "") or self.unreadable or None
        return f"{found}; {_UNDECLARED}" if found and found.startswith("dramatiq.errors.ActorNotFound: ") else found

    def as_json(self) -> dict[str, Any]:
        """Return the letter as lists show it, with secrets masked."""
        message = self.message
        return {
            "message_id": None if message is None else message.message_id,
            "broker_id": self.broker_id,
            "actor": None if message is None else message.actor_name,
            "queue": self.queue,
            "died_at": self.died_at,
            "retries": self.retries,
            "arguments": in_one_line(arguments(self), NAME_WIDTH),
            "error": in_one_line(bounded(self.error) or "", _ERROR_WIDTH) or None,
            "unreadable": self.unreadable or None,
        }

    def revived(self, broker: Broker) -> Message[Any]:
        """Return the message for a new start in its actor's queue.

        Raises:
          DeadLetterRefused: When the message cannot be read.
        """
        if self.message is None:
            raise DeadLetterRefused(f"{self.broker_id!r} cannot be sent again, because it cannot be read")
        actor = broker.actors.get(self.message.actor_name)
        kept = {name: value for name, value in self.message.options.items() if name not in _PAST_ATTEMPTS}
        return as_new(
            dataclasses.replace(
                self.message,
                queue_name=actor.queue_name if actor else self.queue,
                options=kept,
                message_timestamp=current_millis(),  # otherwise a message with `max_age` would be dropped at once
            )
        )


def as_new(message: Message[Any]) -> Message[Any]:
    """Return a dead letter's message without what deduplication noted in it, so that it claims its key again.

    With that, it would count as the holder of the key, and its next attempt as a waiting retry.
    """
    options = {name: value for name, value in message.options.items() if not name.startswith(OF_DEDUPLICATION)}
    return dataclasses.replace(message, options={**options, LIFE: uuid4().hex})


@dataclass(frozen=True, slots=True)
class LetterResult:
    """Result of requeueing or deleting a dead letter.

    Attributes:
      outcome: ``requeued``: it is in its queue. ``deleted``: it is gone for good. ``duplicate`` or ``refused``: it
        stays a dead letter. ``gone``: it was already requeued or deleted.
      detail: For a duplicate, the id of the message that holds its key, if known. If refused, the reason.
    """

    id: str
    outcome: Literal["requeued", "deleted", "duplicate", "refused", "gone"]
    detail: str | None = None


LetterAction = Literal["requeue", "delete"]


class DeadLetterStore(Protocol):
    """The dead letters of one broker."""

    def counts(self) -> dict[str, int]:
        """Return the number of dead letters by queue; queues without any are left out."""

    def newest_first(self, queue: str | None = None, died_until: datetime | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters of one queue or of all, newest first; with a time, only those that died by then."""

    def change_each(self, action: LetterAction, letters: Sequence[DeadLetter]) -> Iterator[LetterResult]:
        """Requeue dead letters through the middleware's hooks, or delete them for good; each by itself and atomically.

        One that cannot be sent is refused, and the others are requeued.
        """


def requeue(broker: Broker, letter: DeadLetter, move: Callable[[Message[Any]], object], **options: str) -> LetterResult:
    """Requeue a letter through the hooks of the middleware. Refuse it if its message is broken.

    Parameters:
      move: Moves the message from the dead letters to its queue, at once; returns a false value if it is there no more.
      options: Further options of the message.

    Raises:
      RedisUnavailable: When a hook needs Redis, which does not answer.
    """
    try:
        message = letter.revived(broker).copy(options=options)
        broker.emit_before("enqueue", message, None)
        if not move(message):
            return LetterResult(letter.id, "gone")
        broker.emit_after("enqueue", message, None)
        return LetterResult(letter.id, "requeued")
    except SkipEnqueue as skip:
        return LetterResult(letter.id, "duplicate", skip.duplicate_of)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except (MiddlewareError, *_BROKEN) as error:
        return LetterResult(letter.id, "refused", error_line(error))


#: Characters of a text that are searched for secrets. The search takes time, and longer texts are not readable.
LONGEST: Final = 20_000
_DEEPEST_SHOWN: Final = 50  # levels of nested lists and dictionaries


def without_secrets(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return a value with secrets masked: in texts, in JSON within texts, and under names such as ``password``."""
    if depth > _DEEPEST_SHOWN:
        return "…"
    if value is not None and name and is_secret(name):
        return "***"
    if isinstance(value, dict):
        named = {str(key)[:LONGEST]: each for key, each in value.items()}
        return {mask_secrets(key): without_secrets(each, key, depth + 1) for key, each in named.items()}
    if isinstance(value, list | tuple):
        # Headers may be pairs of a name and a value.
        name = value[0][:LONGEST] if len(value) == 2 and isinstance(value[0], str) else ""
        return [without_secrets(each, name if number else "", depth + 1) for number, each in enumerate(value)]
    return _text_without_secrets(value, depth) if isinstance(value, str) else value


def _text_without_secrets(text: str, depth: int) -> str | None:
    if len(text) <= LONGEST and text.lstrip()[:1] in ("{", "[", '"'):
        try:
            carried = json.loads(text)
        except (ValueError, RecursionError):
            return bounded(text)
        shown = without_secrets(carried, depth=depth + 1)
        if shown != carried:
            return json.dumps(shown, ensure_ascii=False)
    return bounded(text)


def arguments(letter: DeadLetter) -> str:
    """Return the arguments of the call as Python would write them; empty for an unreadable message."""
    if letter.message is None:
        return ""
    given = [repr(without_secrets(each)) for each in letter.message.args]
    named = without_secrets(letter.message.kwargs)
    return ", ".join([*given, *(f"{name}={value!r}" for name, value in named.items())])


def body(letter: DeadLetter) -> dict[str, Any]:
    """Return the arguments and options, or the bytes of an unreadable message; None for what it does not have."""
    if letter.message is None:
        unknown = dict.fromkeys(("args", "kwargs", "options", "traceback"))
        return {**unknown, "body": bounded(letter.body.decode("utf-8", "backslashreplace"))}
    options = {name: value for name, value in letter.message.options.items() if name != "traceback"}
    return {
        "args": without_secrets(list(letter.message.args)),
        "kwargs": without_secrets(letter.message.kwargs),
        "options": without_secrets(options),
        "traceback": bounded(letter.traceback),
        "body": None,
    }


def bounded(text: str | None) -> str | None:
    """Return a text with secrets masked; of a very long one the beginning."""
    if text is None or len(text) <= LONGEST:
        return None if text is None else mask_secrets(text)
    # The end is cut off as well, because half a secret would not be recognized.
    return f"{mask_secrets(text[:LONGEST])[: LONGEST // 2]}… ({len(text):,} characters)"


_POSITION: Final = re.compile(r"([0-9]{1,14})-(.+)", re.DOTALL)
#: The latest time of a place, in the year 5138. Later ones that another program wrote are no times for Python.
_LATEST_MS: Final = 10**14 - 1


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
      until: It died before this time, if that is known.
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
        if self.until is not None and letter.died_at is not None and letter.died_at >= self.until:
            return False
        return self.error is None or _shows(letter.error or "", self.error.casefold())


@dataclass(frozen=True, slots=True)
class LetterPosition:
    """Place of a dead letter in the order newest first, from which a page continues.

    Attributes:
      died_ms: When it died, in milliseconds since 1970, at most `_LATEST_MS`; 0 if that is unknown.
    """

    died_ms: int
    broker_id: str

    def __str__(self) -> str:
        return f"{self.died_ms}-{self.broker_id}"

    @classmethod
    def of(cls, letter: DeadLetter) -> LetterPosition:
        """Return the place of a letter."""
        return cls(round(min(letter.died_ms, _LATEST_MS)), letter.broker_id)

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
    until = None if after.died_ms == _LATEST_MS else datetime.fromtimestamp(after.died_ms / 1000, UTC)
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
