"""Options, servers and figures of the chaos suite. Its tests are collected only if their path is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psycopg2
import pytest

from tests.chaos.families import FIVE, Family
from tests.chaos.figures import Figures
from tests.chaos.trial import Trial
from tests.chaos.verdicts import Undisturbed, undisturbed_run
from tests.internals.embedded import Servers, embedded

#: Duration of random faults.
LONG_S: Final = 40.0
SHORT_S: Final = 10.0
_HERE: Final = Path(__file__).parent
_FIGURES: Final = pytest.StashKey[Figures]()

#: Function that makes a trial of these families, with the arguments of `Trial`.
MakeTrial = Callable[..., Trial]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos", choices=["full", "short"], default="full", help="how much of the chaos suite to run")
    group.addoption("--chaos-figures", metavar="FILE", help="write the figures of this run to a file, as Markdown")
    group.addoption("--chaos-seed", metavar="N", type=int, help="the seed of the random tests; any unless given")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: not in the short form of the chaos suite")
    config.stash[_FIGURES] = Figures()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(_HERE) for path in named) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("chaos") == "short":
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the figures of this process to the main process."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        figures = session.config.stash[_FIGURES]
        output["chaos"] = {**vars(figures), "faults": dict(figures.faults)}  # only plain types can be sent


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    told = getattr(node, "workeroutput", {}).get("chaos")
    if told is not None:
        node.config.stash[_FIGURES].add(Figures(**told))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    figures = config.stash[_FIGURES]
    if not figures.faults or hasattr(config, "workeroutput"):
        return
    terminalreporter.section("chaos")
    terminalreporter.write_line(figures.as_text())
    if target := config.getoption("chaos_figures"):
        Path(target).write_text(figures.as_page())


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    return pytestconfig.stash[_FIGURES]


@pytest.fixture
def seed(pytestconfig: pytest.Config, figures: Figures) -> int:
    """Return the seed of a random test, which is in the figures."""
    seed: int = pytestconfig.getoption("chaos_seed") or random.SystemRandom().randrange(1_000_000)
    figures.seeds.append(seed)
    return seed


@pytest.fixture
def storm_s(pytestconfig: pytest.Config) -> float:
    """Return the duration of random faults."""
    return SHORT_S if pytestconfig.getoption("chaos") == "short" else LONG_S


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Start the suite's servers. PostgreSQL keeps the time of each commit."""
    with embedded.start() as servers:
        connection = psycopg2.connect(servers.database_url)
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("ALTER SYSTEM SET track_commit_timestamp = on")
        connection.close()
        servers.restart("postgres")
        yield servers


@pytest.fixture(scope="session")
def undisturbed(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the final state of an undisturbed run."""
    with Trial(servers, tmp_path_factory.mktemp("undisturbed"), FIVE) as trial:
        return undisturbed_run(trial)


@pytest.fixture
def make_trial(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeTrial]:
    with ExitStack() as trials:

        def make(families: Sequence[Family] = FIVE, kind: type[Trial] = Trial, **more: Any) -> Trial:
            for server in servers.versions:
                servers.start(server)  # a failed test may have left it down
            folder = tmp_path_factory.mktemp("trial")
            return trials.enter_context(kind(servers, folder, families, **more))

        yield make
