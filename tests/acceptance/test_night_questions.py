"""What an operator asks at 3 a.m., and where the answer is: by terminal and by page, in each state of trouble.

Each row of `TABLE` says what to type and where to look, at most three steps. A step uses only what the one before
shows: `{run}` must be printed by it, and a page must be linked from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import pytest

from tests.acceptance.nights import CALLS, EMAILS, ORDERS, QUICK, Browser, Night, links_of, night, text_of
from tests.acceptance.processes import eventually
from tests.acceptance.test_dashboard import serving
from tests.command_processes import CommandProcesses
from tests.internals.embedded import embedded

pytestmark = pytest.mark.slow

_AT: Final = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


@dataclass(frozen=True)
class Row:
    """A question and its answer: patterns that the last output must have, and must not have.

    Attributes:
      states: Those with this answer; all of them if empty.
    """

    question: str
    states: tuple[str, ...]
    type: tuple[str, ...]
    says: tuple[str, ...]
    look: tuple[str, ...]
    shows: tuple[str, ...]
    never: tuple[str, ...] = ()


STUCK, NO_REDIS, NO_SCHEDULER = "all threads stuck", "Redis stopped", "dead scheduler"
STATES: Final = (STUCK, NO_REDIS, NO_SCHEDULER)
_WORKER: Final = f"/workers/{ORDERS}"

TABLE: Final = (
    Row(
        "which worker is stuck and why",
        (STUCK,),
        ("status",),
        (
            rf"^Stuck run: {CALLS}, since",
            r"run \d+ has not ended .* thread \S+ is at \S*night_shop.py:\d+ tell_the_service",
        ),
        ("/",),
        (rf"Stuck run: {CALLS}", r"run \d+ has not ended .* is at \S*night_shop.py:\d+ tell_the_service"),
        ("All right",),
    ),
    Row(
        "which worker is stuck and why",
        (NO_REDIS,),
        ("status",),
        ("^No answer: Redis",),
        ("/",),
        ("No answer: Redis",),
        ("All right",),
    ),
    Row(
        "which worker is stuck and why",
        (NO_SCHEDULER,),
        ("status",),
        ("^No scheduler", r"no scheduler is alive since .* start `housekeeping scheduler`"),
        ("/",),
        ("No scheduler", "start `?housekeeping scheduler"),
        ("All right", r"\(stuck\)"),
    ),
    Row("since when", (), ("status",), (rf"^[^\n]*, since {_AT}",), ("/",), (rf"since {_AT}",)),
    Row(
        "backlog trend",
        (),
        ("status",),
        (rf"{re.escape(ORDERS)} +\w+ +\d+ +(-|\S+ \w+ ago) +[\d,]+ +[\d,]+",),
        ("/", _WORKER),
        (r"Rows per hour [\d,]+ processed, [\d,]+ arrived",),
    ),
    Row(
        "who paused it",
        (),
        ("status",),
        (rf"{EMAILS} is paused until it is resumed: mail server moves \(\w+@\S+, {_AT}\)",),
        ("/", f"/workers/{EMAILS}"),
        (r"until it is resumed: mail server moves \(\w+@",),
    ),
    Row(
        "is it safe to run now",
        (STUCK,),
        (f"plan {ORDERS}",),
        ("a run now would wait", "0 of 1 thread is free"),
        ("/", _WORKER, f"{_WORKER}/plan"),
        ("would wait", "0 of 1 thread is free"),
        ("would start",),
    ),
    Row(
        "is it safe to run now",
        (NO_REDIS,),
        (f"plan {ORDERS}",),
        ("a run now would wait", "Redis did not answer", "whether a scheduler is alive is unknown"),
        ("/", _WORKER, f"{_WORKER}/plan"),
        ("would wait", "Redis did not answer"),
        ("would start", r"\.\."),
    ),
    Row(
        "is it safe to run now",
        (NO_SCHEDULER,),
        (f"plan {ORDERS}",),
        ("a run now would start", "no scheduler is alive since"),
        ("/", _WORKER, f"{_WORKER}/plan"),
        ("would start", "no scheduler is alive since"),
    ),
    Row(
        "what did run N delete",
        (),
        (f"runs {ORDERS}", "runs {run}"),
        ("run {run} of shop.orders: done", "deleted_rows 700, archived_rows 700"),
        ("/", _WORKER, "/runs/{run}"),
        ("Run {run} of shop.orders", "deleted_rows 700", "archived_rows 700"),
    ),
    Row(
        "can I undo it",
        (),
        (f"runs {ORDERS}", "runs {run}"),
        (r"undo: these archived rows can be restored: 700 of \S*orders: housekeeping restore {run}\n",),
        ("/", _WORKER, "/runs/{run}"),
        (r"can be restored: 700 of \S*orders housekeeping restore {run}\b",),
    ),
    Row(
        "will it catch up and when",
        (),
        (f"plan {EMAILS}",),
        ("backlog: 40 rows, not done before it is resumed, and then after 1 run",),
        ("/", f"/workers/{EMAILS}"),
        ("Forecast 40 rows, not done before it is resumed, and then after 1 run",),
    ),
    Row(
        "who holds the lease",
        (STUCK,),
        ("leases list",),
        (CALLS,),
        ("/",),
        (rf"Leases.* {CALLS}",),
        ("no leases",),
    ),
    Row(
        "who holds the lease",
        (NO_REDIS,),
        ("leases list",),
        ("Redis did not answer", "the leases that the database knows"),
        ("/",),
        ("Redis is unavailable; these are the leases of open runs in the database",),
        ("no leases are held",),
    ),
    Row("who holds the lease", (NO_SCHEDULER,), ("leases list",), ("no leases are held",), ("/",), ("Leases",)),
    Row(
        "why did the 02:00 tick not run",
        (),
        (f"why {EMAILS} 02:00",),
        ("skipped", rf"mail server moves \(set by \w+@\S+, .* UTC\): housekeeping resume {EMAILS}"),
        ("/", f"/workers/{EMAILS}", "/runs/{tick_run}"),
        ("skipped ?: paused", "tick .* 02:00 UTC", r"mail server moves \(set by \w+@"),
    ),
    Row(
        "why did the last tick not run",
        (NO_REDIS,),
        (f"why {ORDERS}",),
        ("whether it was sent is unknown", "Redis did not answer", "No run can be sent or received"),
        ("/", _WORKER, f"{_WORKER}/plan"),
        ("No run can be sent or received",),
        ("it is being sent", "Redis has no record of it"),
    ),
    Row(
        "which row fails",
        (),
        ("errors", f"runs {CALLS}", "runs {rejected_run}"),
        ("the carrier has lost it", r"id\W+1\b"),
        ("/", "/errors", "/runs/{rejected_run}"),
        ("the carrier has lost it", r"id\W+1\b"),
    ),
    Row(
        "is the schedule alive",
        (STUCK,),
        ("status",),
        (r"\S+:\d+ +scheduler +idle",),
        ("/", "/processes"),
        ("1 scheduler alive", "0 processes dead"),
        ("No scheduler",),
    ),
    Row(
        "is the schedule alive",
        (NO_REDIS,),
        ("status",),
        ("not shown: queues, processes, leases",),
        ("/", "/processes"),
        ("the heartbeats cannot be read",),
        ("no scheduler", r"scheduler +idle"),
    ),
    Row(
        "is the schedule alive",
        (NO_SCHEDULER,),
        ("status",),
        ("no scheduler is alive since", r"scheduler +dead\?"),
        ("/", "/processes"),
        ("dead",),
        (r"scheduler +idle",),
    ),
    Row(
        "does PostgreSQL suffer from us",
        (),
        ("doctor --database",),
        (r"waiting_locks +0 +10", r'dead_rows "orders" +[\d,]+ +100,000'),
        ("/", "/database"),
        ("orders", "100,000"),
    ),
    Row(
        "what changed since yesterday",
        (),
        ("actions --since 1d",),
        (rf"pause +{EMAILS}",),
        ("/", "/actions"),
        (rf"pause {EMAILS}",),
    ),
    # Last, as it changes what the terminal says.
    Row(
        "how do I slow it down",
        (),
        (f"narrow {ORDERS} --rows-per-s 10", "status"),
        (rf"{ORDERS} is narrowed to 10 rows per second",),
        ("/", _WORKER),
        (r"Rows per second .*\bNarrow Lowers the limits from the next batch on",),
    ),
)


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandProcesses]:
    """Processes whose heartbeats are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(QUICK), prepend=":")
        processes = CommandProcesses()
        yield processes
        processes.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[embedded.Servers]:
    with embedded.start() as running:
        yield running


def _all_threads_stuck(shop: Night) -> None:
    worker = shop.start("worker", "-t", "1")
    shop.start("scheduler")
    shop.put(CALLS)
    shop.status_says("tell_the_service (stuck)", worker)
    shop.status_says("scheduler idle", worker)
    shop.put(ORDERS, times=3)


def _redis_stopped(shop: Night) -> None:
    worker = shop.start("worker", "-t", "1")
    scheduler = shop.start("scheduler")
    shop.status_says("worker idle", worker)
    shop.status_says("scheduler idle", scheduler)
    shop.servers.stop("redis")
    shop.stack.callback(shop.servers.start, "redis")
    stopped_at = datetime.now(UTC)
    # The last tick is then one that could not be sent.
    eventually(lambda: datetime.now(UTC).minute != stopped_at.minute, worker, scheduler, patience_s=90)


def _dead_scheduler(shop: Night) -> None:
    worker = shop.start("worker", "-t", "1")
    scheduler = shop.start("scheduler")
    shop.status_says("worker idle", worker)
    shop.status_says("scheduler idle", scheduler)
    scheduler.kill()
    shop.status_says("no scheduler is alive since")


_MAKERS: Final[dict[str, Callable[[Night], None]]] = {
    STUCK: _all_threads_stuck,
    NO_REDIS: _redis_stopped,
    NO_SCHEDULER: _dead_scheduler,
}


@pytest.fixture(scope="module", params=STATES)
def shop(
    request: pytest.FixtureRequest,
    servers: embedded.Servers,
    commands: CommandProcesses,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Night]:
    """Yield an installation in a state, with a person at its dashboard."""
    with night(servers, commands, tmp_path_factory.mktemp("night")) as made:
        _MAKERS[request.param](made)
        # No run deletes these: none can be sent or received now.
        made.sql(
            "INSERT INTO orders (expires_at) SELECT now() - n * interval '1 hour' FROM generate_series(1, 300) AS n"
        )
        made.browser = Browser(made.stack.enter_context(serving(made.environment, folder=made.folder)))
        yield made


def test_terminal_answers_each_question_in_three_steps(shop: Night, request: pytest.FixtureRequest) -> None:
    wrong = [fault for row in _rows(request) if (fault := _typed(shop, row))]

    assert not wrong, "\n\n".join(wrong)


def test_page_answers_each_question_in_three_steps(shop: Night, request: pytest.FixtureRequest) -> None:
    wrong = [fault for row in _rows(request) if (fault := _looked(shop, row))]

    assert not wrong, "\n\n".join(wrong)


def _rows(request: pytest.FixtureRequest) -> list[Row]:
    state = request.node.callspec.params["shop"]
    return [row for row in TABLE if state in (row.states or STATES)]


def _typed(shop: Night, row: Row) -> str:
    """Return what is wrong with the answer of the terminal; empty if nothing is."""
    assert len(row.type) <= 3
    printed = ""
    for line in row.type:
        for name in re.findall(r"{(\w+)}", line):
            if not re.search(rf"\b{shop.values[name]}\b", printed):
                return f"{row.question}: {name} is not in: {printed}"
        printed = shop.type(line.format(**shop.values))
    return _fault(printed, row, row.says, shop)


def _looked(shop: Night, row: Row) -> str:
    """Return what is wrong with the answer of the pages, which may be some seconds old; empty if nothing is."""
    assert len(row.look) <= 3
    try:
        eventually(lambda: not _followed(shop, row), patience_s=5)
    except AssertionError:
        return _followed(shop, row)
    return ""


def _followed(shop: Night, row: Row) -> str:
    page = ""
    for each in row.look:
        path = each.format(**shop.values)
        if page and path not in links_of(page):
            return f"{row.question}: {path} is not linked from {sorted(links_of(page))}"
        page = shop.look(path)
    return _fault(text_of(page), row, row.shows, shop)


def _fault(found: str, row: Row, patterns: tuple[str, ...], shop: Night) -> str:
    for each in patterns:
        pattern = each.replace("{run}", shop.values["run"])
        if not re.search(pattern, found):
            return f"{row.question}: {pattern} is not in: {found}"
    for each in row.never:
        if re.search(each, found):
            return f"{row.question}: {each} is in: {found}"
    return ""
