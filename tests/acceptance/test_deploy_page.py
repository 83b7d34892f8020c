"""Files of docs/howto/deploy.md, checked by the programs that read them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from housekeeping import Settings
from tests.unit.docs.blocks import ROOT, blocks


def _file(name: str) -> str:
    [text] = [
        block.text for block in blocks(ROOT / "docs/howto/deploy.md") if block.mark == f"<!-- deployed: {name} -->"
    ]
    return text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("kind", ["worker", "scheduler"])
def test_systemd_accepts_the_unit(kind: str, tmp_path: Path) -> None:
    unit = tmp_path / f"housekeeping-{kind}.service"
    # systemd looks for the program.
    unit.write_text(_file(unit.name).replace("/opt/app/venv/bin/housekeeping", sys.executable))

    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)

    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_published_schemas_accept_the_manifests() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all(_file("housekeeping.yaml")))

    for each in documents:
        validator.validate(each, validator.latest_version(), strict=True)

    assert [each["metadata"]["name"] for each in documents] == ["housekeeping-worker", "housekeeping-scheduler"]


def test_processes_have_longer_than_the_grace_period_to_stop() -> None:
    needed = Settings.model_fields["grace_s"].default + 30

    assert f"TimeoutStopSec={needed:.0f}" in _file("housekeeping-worker.service")
    assert f"terminationGracePeriodSeconds: {needed:.0f}" in _file("housekeeping.yaml")
