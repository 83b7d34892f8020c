"""Completion of worker names in the shell."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from tests.internals.cli import main

WORKER = "user_status_cleanup.batch"


def completed(arguments: list[str], incomplete: str) -> list[str]:
    completion = ShellComplete(main, {}, "housekeeping", "_HOUSEKEEPING_COMPLETE")
    return [each.value for each in completion.get_completions(arguments, incomplete)]


@pytest.mark.parametrize("command", ["plan", "run", "enqueue", "status", "why", "runs", "pause", "narrow", "resume"])
def test_worker_names_complete(command: str) -> None:
    assert completed([command], "user") == [WORKER]
    assert len(completed([command], "ci.")) > 3


def test_commands_complete() -> None:
    assert completed([], "dead") == ["deadletters"]


def test_wrong_settings_complete_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_REDIS_URL", "http://x")

    assert completed(["plan"], "user") == []
