"""The fifteen questions of an operator at 3 a.m., answered by the command line and by the dashboard.

A `State` says how an installation comes to be in it, and which questions it answers in its own way. Each question is
asked in at most three steps. A step uses only what the one before shows: `{run}` must be printed by it, and a page must
be linked from it. Within patterns, too, `{run}` and the like stand for the values of the installation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest

from tests.acceptance.nights.shop import CALLS, EMAILS, ORDERS, Browser, Night, links_of, night, text_of
from tests.acceptance.processes import eventually
from tests.acceptance.test_dashboard import serving
from tests.command_processes import CommandProcesses
from tests.internals.embedded import embedded

AT: Final = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
WORKER: Final = f"/workers/{ORDERS}"


#: Returns what is wrong with an answer; empty if nothing is.
FaultOf = Callable[[Night], str]


@dataclass(frozen=True)
class Answer:
    """What the last step must say.

    Attributes:
      says, shows: Patterns that the terminal and the page must have.
      never: Patterns that neither must have.
      type, look: The steps, if they are not those of the question.
    """

    says: tuple[str, ...]
    shows: tuple[str, ...]
    never: tuple[str, ...] = ()
    type: tuple[str, ...] = ()
    look: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """A question and its steps.

    Attributes:
      usual: The answer in each state that has none of its own; None if each has.
    """

    type: tuple[str, ...]
    look: tuple[str, ...]
    usual: Answer | None = None


@dataclass(frozen=True)
class State:
    """A state of trouble.

    Attributes:
      make: Brings a healthy installation into the state, and returns when it is there.
      answers: Its own answers, by question.
    """

    name: str
    make: Callable[[Night], None] = field(repr=False)
    answers: Mapping[str, Answer] = field(repr=False)

    def __post_init__(self) -> None:
        needed = {asked for asked, question in QUESTIONS.items() if question.usual is None}
        assert needed <= self.answers.keys() <= QUESTIONS.keys(), needed ^ self.answers.keys()

    def __str__(self) -> str:
        return self.name

    def answer(self, asked: str) -> Answer:
        found = self.answers.get(asked, QUESTIONS[asked].usual)
        assert found is not None
        return found


STUCK: Final = "which worker is stuck and why"
SINCE: Final = "since when"
TREND: Final = "backlog trend"
PAUSED: Final = "who paused it"
CATCH_UP: Final = "will it catch up and when"
SAFE: Final = "is it safe to run now"
DELETED: Final = "what did run N delete"
UNDO: Final = "can I undo it"
LEASE: Final = "who holds the lease"
TICK: Final = "why did the tick not run"
ROW: Final = "which row fails"
SCHEDULE: Final = "is the schedule alive"
SUFFERS: Final = "does PostgreSQL suffer from us"
SLOWER: Final = "how do I slow it down"
CHANGED: Final = "what changed since yesterday"

QUESTIONS: Final = {
    STUCK: Question(("status",), ("/",)),
    SINCE: Question(("status",), ("/",), Answer((rf"^[^\n]*, since {AT}",), (rf"since {AT}",))),
    TREND: Question(
        ("status",),
        ("/", WORKER),
        Answer(
            (rf"{re.escape(ORDERS)} +\w+ !? +\d+ +(-|\S+ \w+ ago) +[\d,]+ +[\d,]+",),
            (r"Rows per hour [\d,]+ processed, [\d,]+ arrived",),
        ),
    ),
    PAUSED: Question(
        ("status",),
        ("/", f"/workers/{EMAILS}"),
        Answer(
            (rf"{EMAILS} is paused until it is resumed: mail server moves \(\w+@\S+, {AT}\)",),
            (r"until it is resumed: mail server moves \(\w+@",),
        ),
    ),
    CATCH_UP: Question(
        (f"plan {EMAILS}",),
        ("/", f"/workers/{EMAILS}"),
        Answer(
            ("backlog: 40 rows, and it will not catch up: ",),
            ("Forecast 40 rows, and it will not catch up: ",),
        ),
    ),
    SAFE: Question((f"plan {ORDERS}",), ("/", WORKER, f"{WORKER}/plan")),
    DELETED: Question(
        (f"runs {ORDERS}", "runs {run}"),
        ("/", WORKER, "/runs/{run}"),
        Answer(
            (f"run {{run}} of {ORDERS}: done", "deleted_rows 700, archived_rows 700"),
            (f"Run {{run}} of {ORDERS}", "deleted_rows 700", "archived_rows 700"),
        ),
    ),
    UNDO: Question(
        (f"runs {ORDERS}", "runs {run}"),
        ("/", WORKER, "/runs/{run}"),
        Answer(
            (r"undo: these archived rows can be restored: 700 of \S*orders: housekeeping restore {run}\n",),
            (r"can be restored: 700 of \S*orders housekeeping restore {run}\b",),
        ),
    ),
    LEASE: Question(("leases list",), ("/",), Answer(("no leases are held",), ("Leases no leases are held",))),
    TICK: Question(
        (f"why {EMAILS} 02:00",),
        ("/", f"/workers/{EMAILS}", "/runs/{tick_run}"),
        Answer(
            ("skipped", rf"mail server moves \(set by \w+@\S+, .* UTC\): housekeeping resume {EMAILS}"),
            ("skipped ?: paused", "tick .* 02:00 UTC", r"mail server moves \(set by \w+@"),
        ),
    ),
    ROW: Question(
        ("errors", f"runs {CALLS}", "runs {rejected_run}"),
        ("/", "/errors", "/runs/{rejected_run}"),
        Answer(("the carrier has lost it", r"id\W+1\b"), ("the carrier has lost it", r"id\W+1\b")),
    ),
    SCHEDULE: Question(
        ("status",),
        ("/", "/processes"),
        Answer((r"\S+:\d+ +scheduler +idle",), ("1 scheduler alive",), ("[Nn]o scheduler", "scheduler +dead")),
    ),
    SUFFERS: Question(
        ("doctor --database",),
        ("/", "/database"),
        Answer(
            (r"waiting_locks +0 +10", r'dead_rows "orders" +[\d,]+ +100,000'),
            (r"wait for locks on swept tables 0 10\b", r"orders\W+[\d,]+ 100,000"),
            ("OVER", "over 1"),
        ),
    ),
    CHANGED: Question(
        ("actions --since 1d",), ("/", "/actions"), Answer((rf"pause +{EMAILS}",), (rf"pause {EMAILS}",))
    ),
    # Last, as it changes what the terminal says.
    SLOWER: Question(
        (f"narrow {ORDERS} --rows-per-s 10", "status"),
        ("/", WORKER),
        Answer(
            (rf"{ORDERS} is narrowed to 10 rows per second",),
            (r"Rows per second .*\bNarrow Lowers the limits from the next batch on",),
        ),
    ),
}


class Nights:
    """The installation in one state at a time: the tests of a state follow one another, and share it."""

    def __init__(self, servers: embedded.Servers, commands: CommandProcesses, folders: pytest.TempPathFactory) -> None:
        self._given = servers, commands
        self._folders = folders
        self._stack = ExitStack()
        self._made: tuple[State, Night] | None = None

    def in_state(self, state: State) -> Night:
        """Return the installation in a state, with an operator at its dashboard."""
        if self._made is None or self._made[0] is not state:
            self.close()
            made = self._stack.enter_context(night(*self._given, self._folders.mktemp("night")))
            made.browser = Browser(made.stack.enter_context(serving(made.environment, folder=made.folder)))
            state.make(made)
            self._made = state, made
        return self._made[1]

    def close(self) -> None:
        self._made = None
        self._stack.close()


def each_answer_of(*states: State) -> Callable[..., None]:
    """Return the test of each question in each state, by terminal and by page.

    Then the answers of the other states must be wrong: else they would be right whatever happens.
    """
    cases = []
    for state in states:
        cases += [
            pytest.param(state, partial(ask, state, asked), id=f"{state}, {asked}, by {name}")
            for asked in QUESTIONS
            for name, ask in (("terminal", fault_of_terminal), ("page", fault_of_pages))
        ]
        others = [other for other in states if other is not state]
        cases.append(pytest.param(state, partial(_confused_with, state, others), id=f"{state}, not another state"))

    @pytest.mark.slow
    @pytest.mark.parametrize(("state", "fault_of"), cases)
    def test(nights: Nights, state: State, fault_of: FaultOf) -> None:
        fault = fault_of(nights.in_state(state))
        assert not fault, fault

    return test


def fault_of_terminal(state: State, asked: str, shop: Night) -> str:
    """Return what stays wrong with the answer of the terminal; empty if nothing does."""

    def type_again() -> str:
        if fault := _fault_of_terminal(state, asked, shop):
            shop.printed.clear()
        return fault

    return _fault_that_stays(type_again)


def fault_of_pages(state: State, asked: str, shop: Night) -> str:
    """Return what stays wrong with the answer of the pages; empty if nothing does."""
    return _fault_that_stays(lambda: _followed(shop, state.answer(asked), asked))


def _fault_that_stays(look: Callable[[], str]) -> str:
    """Return what is wrong after half a minute: a page may be some seconds old, and a tick's run be at work."""
    found = ""

    def is_right() -> bool:
        nonlocal found
        found = look()
        return not found

    try:
        eventually(is_right, patience_s=30)
    except AssertionError:
        return found
    return ""


def _fault_of_terminal(state: State, asked: str, shop: Night) -> str:
    answer, printed = state.answer(asked), ""
    steps = answer.type or QUESTIONS[asked].type
    assert len(steps) <= 3
    for step in steps:
        for name in re.findall(r"{(\w+)}", step):
            if not re.search(rf"\b{shop.values[name]}\b", printed):
                return f"{name} is not in: {printed}"
        if asked == SLOWER or step not in shop.printed:
            shop.printed[step] = shop.type(_filled(step, shop))
        printed = shop.printed[step]
    return _fault(printed, answer.says, answer.never, shop)


def _confused_with(state: State, others: Sequence[State], shop: Night) -> str:
    """Return the other states whose answers would also be accepted here.

    Only whether a run is safe may have the same answer in two states.
    """
    return ", ".join(
        f"{other}: {asked}"
        for other in others
        for asked in (STUCK, SAFE)
        if not (asked == SAFE and other.answer(asked) == state.answer(asked))
        and not _fault_of_terminal(other, asked, shop)
    )


def _followed(shop: Night, answer: Answer, asked: str) -> str:
    steps, page = answer.look or QUESTIONS[asked].look, ""
    assert len(steps) <= 3
    for step in steps:
        path = _filled(step, shop)
        if page and path not in links_of(page):
            return f"{path} is not linked from {sorted(links_of(page))}"
        page = shop.look(path)
    return _fault(text_of(page), answer.shows, answer.never, shop)


def _fault(found: str, wanted: tuple[str, ...], never: tuple[str, ...], shop: Night) -> str:
    for each in wanted:
        if not re.search(_filled(each, shop), found):
            return f"{_filled(each, shop)} is not in: {found}"
    for each in never:
        if re.search(_filled(each, shop), found):
            return f"{each} is in: {found}"
    return ""


def _filled(text: str, shop: Night) -> str:
    for name, value in shop.values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
