"""Pytest hooks that run a test with its fault and expect it to fail. `tests.conftest` imports them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.twins import Twin
from tests.twins.registry import all_twins

_TOP = Path(__file__).parents[2]


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--twins", action="store_true", help="run tests with their faults planted; they must fail")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("twins"):
        ours = [twin for twin in all_twins() if twin.test == metafunc.definition.nodeid]
        if ours:
            given = [pytest.param(each, id=str(each), marks=[pytest.mark.slow] if each.slow else []) for each in ours]
            metafunc.parametrize("twin", given, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("twins"):
        without = [item for item in items if twin_of(item) is None]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if twin_of(item) is not None]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    twin = twin_of(pyfuncitem)
    if twin is None:
        return (yield)
    try:
        yield
    except (AttributeError, LookupError, NameError, TypeError) as error:
        if _of_twins(error):
            raise  # the fault itself is wrong, so the test proves nothing
        return True
    except (Exception, pytest.fail.Exception):
        return True
    pytest.fail(f"the test did not notice what {twin.name} does wrong", pytrace=False)


def _of_twins(error: Exception) -> bool:
    """Return whether a module of twins raised the error or called what raised it."""
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.parent == Path(__file__).parent and file != Path(__file__) for file in files)


@pytest.fixture(autouse=True)
def twin(request: pytest.FixtureRequest) -> Iterator[Twin | None]:
    """Plant the fault of this test before its other fixtures. None without ``--twins``."""
    planted: Twin | None = getattr(request, "param", None)
    if planted is not None:
        with pytest.MonkeyPatch.context() as patch:
            planted.breaks(patch)
            if planted.in_processes:
                paths = [str(_TOP / "tests" / "twins" / "startup"), str(_TOP), os.environ.get("PYTHONPATH", "")]
                patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
                patch.setenv("BROKEN_TWIN", planted.name)
            yield planted
    else:
        yield None


def twin_of(item: pytest.Item) -> Twin | None:
    """Return the twin of a test; None without ``--twins``."""
    callspec = getattr(item, "callspec", None)
    planted: Twin | None = callspec.params.get("twin") if callspec is not None else None
    return planted
