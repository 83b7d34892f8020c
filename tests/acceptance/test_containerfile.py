"""The Containerfile: built if a builder can pull its base image, otherwise checked line by line and executed here."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

from housekeeping import Settings
from tests.unit.docs.blocks import ROOT

#: Instructions with their continued lines joined, without comments.
LINES: Final = [
    line
    for line in re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]


def of(instruction: str) -> list[str]:
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


def test_base_images_are_pinned_and_the_user_is_not_root() -> None:
    assert [re.fullmatch(r"docker\.io/\S+:\d+\.\d+-\S+( AS \w+)?", image) is not None for image in of("FROM")] == [
        True
    ] * 2
    last = LINES[max(n for n, line in enumerate(LINES) if line.startswith("FROM ")) :]
    (user,) = of("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user), "Kubernetes' runAsNonRoot needs a number"
    assert f"USER {user}" in last
    assert not any(line.startswith(("RUN ", "COPY ", "ADD ")) for line in last[last.index(f"USER {user}") :])


def test_nothing_but_the_library_is_copied_and_no_secret_is_set() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    copied = [name for line in of("COPY") if not line.startswith("--from=build ") for name in line.split()[:-1]]

    assert {"setup.cfg", "housekeeping"} <= set(copied)
    assert [each for each in copied if not any(name.split("/")[0] == each for name in tracked)] == []
    assert of("ADD") == of("ARG") == []
    (given,) = of("ENV")
    names = [name.removeprefix("HOUSEKEEPING_").lower() for name in re.findall(r"(HOUSEKEEPING_\w+)=", given)]
    assert set(names) <= Settings.model_fields.keys()
    assert [name for name in names if re.search("url|token|secret|key|dsn", name)] == []


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_health_check_fails_unless_the_process_answers(status: int | None, healthy: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if status and self.path == "/-/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (check,) = of("HEALTHCHECK")
    program: list[str] = json.loads(check.partition(" CMD ")[2])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if status else 1
        assert "127.0.0.1:9191/" in program[-1] and "HOUSEKEEPING_METRICS_PORT=9191" in of("ENV")[0]
        done = subprocess.run(
            [sys.executable, *program[1:-1], program[-1].replace(":9191/", f":{port}/")],
            capture_output=True,
            timeout=30,
        )
        server.shutdown()

    assert (done.returncode == 0) is healthy, done.stderr


@pytest.mark.slow
def test_build_works_in_an_empty_environment(tmp_path: Path) -> None:
    for name in (name for line in of("COPY") if not line.startswith("--from") for name in line.split()[:-1]):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    steps = [line.replace("/opt/venv", str(tmp_path / "venv")) for line in of("RUN") if "/opt/venv" in line]
    environment = {name: os.environ[name] for name in ("PATH", "PIP_INDEX_URL", "PIP_CACHE_DIR") if name in os.environ}
    environment["HOME"] = str(tmp_path)

    for step in [*steps, f"{tmp_path}/venv/bin/housekeeping --version", f"{tmp_path}/venv/bin/pip check"]:
        done = subprocess.run(["sh", "-euc", step], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_image_is_built_and_runs_without_root() -> None:
    builder = next((name for name in ("podman", "docker") if shutil.which(name)), None)
    image = of("FROM")[-1]
    if builder is None or subprocess.run([builder, "pull", image], capture_output=True, timeout=300).returncode != 0:
        pytest.skip("no builder that can pull the base image")
    subprocess.run([builder, "build", "-t", "housekeeping-test", "-f", "Containerfile", "."], cwd=ROOT, check=True)
    run = [builder, "run", "--rm", "--entrypoint", "sh", "housekeeping-test", "-c", "id -u; housekeeping --version"]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout

    assert shown.split()[0] == "10001"
