"""The command of the benchmarks of old rows, without servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import mariadb, report


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.mariadb.shutil.which", lambda name, path: None if "pt" in name else f"/bin/{name}")

    assert mariadb.missing_programs() == "pt-archiver not found (Debian: mariadb-server, percona-toolkit)"


def test_comparison_is_possible_with_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.mariadb.shutil.which", lambda name, path: f"/bin/{name}")

    assert mariadb.missing_programs() is None


def test_figures_of_old_rows_leave_the_other_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(
        "<!-- figures -->\n1\n<!-- end of figures -->\n<!-- old rows -->\n2\n<!-- end of old rows -->\nend\n"
    )
    monkeypatch.setattr(report, "PAGE", page)

    report.write_page({"rows": "200"}, [], {}, part="old rows")

    text = page.read_text()
    assert text.startswith("<!-- figures -->\n1\n<!-- end of figures -->\n<!-- old rows -->\n")
    assert text.endswith("<!-- end of old rows -->\nend\n")
    assert "| rows | 200 |" in text and "\n2\n" not in text
