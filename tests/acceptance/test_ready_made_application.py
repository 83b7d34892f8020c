"""`housekeeping.app` in processes that merely import it, and in those that serve it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.processes import SCHEDULER, WORKER, eventually, started

pytestmark = pytest.mark.slow

#: Module of an application with a broker and logging of its own, which also sends messages to the workers.
OWN: Final = """
import logging
import dramatiq
from dramatiq.brokers.stub import StubBroker

handler = logging.FileHandler("own.log")
logging.getLogger().handlers[:] = [handler]
own = StubBroker()
dramatiq.set_broker(own)

@dramatiq.actor
def work(): ...
work.options["periodic"] = __import__("periodiq").cron("0 0 1 1 *")

level = logging.getLogger().level
from housekeeping.app import actors, broker

assert broker is not own and "user_status_cleanup.batch" in actors
assert dramatiq.get_broker() is own, "the global broker was replaced"
assert handler in logging.getLogger().handlers, "the handlers were replaced"
assert logging.getLogger().level == level, "the level was changed"
open("kept", "w").close()
"""
#: Module that dramatiq or periodiq imports after the ready-made application.
FURTHER: Final = """
import logging
import dramatiq
import housekeeping.app
from housekeeping.core.logs import StderrHandler

assert dramatiq.get_broker() is housekeeping.app.broker, "the global broker is another one"
assert [type(each) for each in logging.getLogger().handlers] == [StderrHandler], "the lines are not the library's"
open("served", "w").close()
"""
DRAMATIQ: Final = [str(Path(sys.executable).with_name("dramatiq"))]
ONE: Final = ["-p", "1", "-t", "1"]
SPAWN: Final = [*WORKER, "--use-spawn"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Path:
    """Make a folder with the modules the current one, for this process and those that it starts."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "further.py").write_text(FURTHER)
    monkeypatch.chdir(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-W", "error", "-c", "import own"], id="python"),
        pytest.param([sys.executable, "-m", "own"], id="python -m"),
        pytest.param([*DRAMATIQ, "own", *ONE], id="dramatiq of the application"),
        pytest.param([*DRAMATIQ, "own:own", *ONE], id="dramatiq with its broker"),
        pytest.param([*SPAWN, "own", *ONE], id="spawned"),
        pytest.param([*SCHEDULER, "own"], id="periodiq of the application"),
    ],
)
def test_importing_process_keeps_its_logging_and_broker(
    folder: Path, environment: dict[str, str], command: list[str]
) -> None:
    with started(command, environment, folder / "log") as process:
        eventually(lambda: (folder / "kept").exists() or process.running.poll() is not None, process)

        assert (folder / "kept").exists(), process.text()


def test_import_of_the_ready_made_application_writes_nothing(folder: Path, environment: dict[str, str]) -> None:
    with started([sys.executable, "-W", "error", "-c", "import own"], environment, folder / "log") as process:
        assert process.running.wait(60) == 0
        assert process.text() == ""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*DRAMATIQ, "housekeeping.app", "further", *ONE], id="dramatiq"),
        pytest.param([*DRAMATIQ, "housekeeping.app:broker", "further", *ONE], id="dramatiq with the broker"),
        pytest.param([*WORKER, "housekeeping.app", "further", *ONE], id="python -m dramatiq"),
        pytest.param([*SPAWN, "housekeeping.app", "further", *ONE], id="spawned"),
        pytest.param([*SCHEDULER, "housekeeping.app", "further"], id="periodiq"),
    ],
)
def test_serving_process_has_the_librarys_logging_and_broker(
    folder: Path, environment: dict[str, str], command: list[str]
) -> None:
    with started(command, environment, folder / "log") as process:
        eventually(lambda: (folder / "served").exists() or process.running.poll() is not None, process)

        assert (folder / "served").exists(), process.text()


def test_wrong_setting_is_an_exception_in_an_importing_process(folder: Path, environment: dict[str, str]) -> None:
    environment["HOUSEKEEPING_DATABASE_URL"] = "mysql://host/db"
    code = "try:\n    from housekeeping.app import broker\nexcept Exception as error:\n    print(type(error).__name__)"

    with started([sys.executable, "-c", code], environment, folder / "log") as process:
        assert process.running.wait(60) == 0

        assert process.text() == "SettingsError\n"
