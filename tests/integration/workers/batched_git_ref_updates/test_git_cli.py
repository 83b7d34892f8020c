"""Default ref deletion, on real repositories (document 58)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.integration.workers.batched_git_ref_updates.repositories import Bare
from tests.internals.workers import GitCli, RefDeletionFailed, RefsRefused, delete_refs

GIT = GitCli()
Program = Callable[[str], str]


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path / "a repository.git")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """A stand-in for the git program: a script."""

    def make(script: str) -> str:
        file = tmp_path / "git"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return str(file)

    return make


def test_only_named_loose_and_packed_refs_are_deleted(bare: Bare) -> None:
    bare.add("refs/heads/packed", "refs/heads/both", "refs/heads/kept")
    bare.pack()
    bare.add("refs/heads/loose")
    bare.git("update-ref", "refs/heads/both", bare.git("commit-tree", "-m", "later", f"{bare.commit}^{{tree}}"))

    GIT.delete(bare.path, ["refs/heads/packed", "refs/heads/both", "refs/heads/loose"])

    assert bare.refs() == ["refs/heads/kept"]


def test_missing_ref_or_repository_counts_as_deleted(bare: Bare, tmp_path: Path) -> None:
    GIT.delete(bare.path, ["refs/heads/never"])
    GIT.delete(tmp_path / "none.git", ["refs/heads/never"])


def test_symbolic_ref_is_deleted_without_its_target(bare: Bare) -> None:
    bare.add("refs/heads/target")
    bare.git("symbolic-ref", "refs/heads/alias", "refs/heads/target")
    bare.git("symbolic-ref", "refs/heads/nowhere", "refs/heads/none")

    GIT.delete(bare.path, ["refs/heads/alias", "refs/heads/nowhere"])

    assert bare.refs() == ["refs/heads/target"]
    assert [file.name for file in (bare.path / "refs/heads").iterdir()] == ["target"]


@pytest.mark.parametrize(
    "ref", ["refs/heads/-d", "refs/heads/日本", "refs/heads/a'b\"c$(d)", "refs/heads/" + "x" * 200]
)
def test_odd_valid_name_is_not_interpreted(bare: Bare, ref: str) -> None:
    bare.add(ref, "refs/heads/kept")

    GIT.delete(bare.path, [ref])

    assert bare.refs() == ["refs/heads/kept"]


def test_locked_ref_refuses_its_whole_batch(bare: Bare) -> None:
    bare.add("refs/heads/a", "refs/heads/b")
    bare.lock("refs/heads/b")

    with pytest.raises(RefsRefused, match="cannot lock ref 'refs/heads/b'"):
        GIT.delete(bare.path, ["refs/heads/a", "refs/heads/b"])

    assert bare.refs() == ["refs/heads/a", "refs/heads/b"]


def test_refused_batch_is_bisected_to_the_locked_refs(bare: Bare) -> None:
    refs = [f"refs/heads/{number:03}" for number in range(100)]
    bare.add(*refs)
    bare.lock("refs/heads/017")
    bare.lock("refs/heads/018")
    bare.lock("refs/heads/099")

    fates = dict(delete_refs(GIT, bare.path, refs))

    assert list(fates) == refs
    assert (
        [ref for ref, refused in fates.items() if refused]
        == bare.refs()
        == [
            "refs/heads/017",
            "refs/heads/018",
            "refs/heads/099",
        ]
    )


@pytest.mark.parametrize("packed", [False, True])
def test_name_that_is_a_folder_of_refs_does_not_exist(bare: Bare, packed: bool) -> None:
    bare.add("refs/heads/a/b", "refs/heads/c")
    if packed:
        bare.pack()

    fates = dict(delete_refs(GIT, bare.path, ["refs/heads/a", "refs/heads/c/d"]))

    assert list(fates.values()) == [None, None]
    assert bare.refs() == ["refs/heads/a/b", "refs/heads/c"]


@pytest.mark.parametrize("packed", [False, True])
def test_ref_and_ref_below_it_are_both_deleted(bare: Bare, packed: bool) -> None:
    bare.add("refs/heads/a/b")
    if packed:
        bare.pack()

    fates = dict(delete_refs(GIT, bare.path, ["refs/heads/a", "refs/heads/a/b"]))

    assert list(fates.values()) == [None, None]
    assert bare.refs() == []


def test_branch_called_packed_refs_is_deleted(bare: Bare) -> None:
    bare.add("refs/heads/packed-refs", "refs/heads/b")
    bare.lock("refs/heads/packed-refs")

    fates = dict(delete_refs(GIT, bare.path, ["refs/heads/packed-refs", "refs/heads/b"]))

    assert [ref for ref, refused in fates.items() if refused] == ["refs/heads/packed-refs"]


def _has_broken_packed_refs(bare: Bare) -> Path:
    (bare.path / "packed-refs").write_text("nonsense\n")
    return bare.path


def _is_a_dangling_link(bare: Bare) -> Path:
    link = bare.path.with_name("link.git")
    link.symlink_to(bare.path.with_name("unmounted"))
    return link


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_has_broken_packed_refs, "unexpected line"),
        (lambda bare: bare.path.parent, "not a git repository"),
        (_is_a_dangling_link, "not a git repository"),
    ],
)
def test_broken_repository_does_not_count_as_missing(bare: Bare, break_it: Callable[[Bare], Path], said: str) -> None:
    with pytest.raises(RefDeletionFailed, match=said):
        GIT.delete(break_it(bare), ["refs/heads/a"])


def test_repository_removed_while_git_runs_counts_as_deleted(bare: Bare, program: Program) -> None:
    vanishing = program('rm -rf "$GIT_DIR"; echo "fatal: not a git repository" >&2; exit 128')

    GitCli(vanishing).delete(bare.path, ["refs/heads/a"])

    assert not bare.path.exists()


def test_no_hook_of_the_repository_runs(bare: Bare, tmp_path: Path) -> None:
    bare.add("refs/heads/a")
    bare.hook("reference-transaction", f"touch '{tmp_path}/ran'; exit 1")

    GIT.delete(bare.path, ["refs/heads/a"])

    assert bare.refs() == []
    assert not (tmp_path / "ran").exists()


def test_user_and_environment_configuration_is_ignored(
    bare: Bare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Bare(tmp_path / "other.git")
    bare.add("refs/heads/a")
    other.add("refs/heads/a")
    (tmp_path / ".gitconfig").write_text("[core]\n\tnonsense")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {
        "GIT_DIR": str(other.path),
        "GIT_NAMESPACE": "elsewhere",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.hooksPath",
        "GIT_CONFIG_VALUE_0": str(tmp_path),
        "LC_ALL": "de_DE.UTF-8",
    }.items():
        monkeypatch.setenv(name, value)

    GIT.delete(bare.path, ["refs/heads/a"])

    monkeypatch.undo()
    assert (bare.refs(), other.refs()) == ([], ["refs/heads/a"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_repository_of_another_user_is_cleaned(bare: Bare) -> None:
    bare.add("refs/heads/a")
    for folder, _, files in os.walk(bare.path):
        for name in (".", *files):
            os.chown(os.path.join(folder, name), 65534, 65534)

    GIT.delete(bare.path, ["refs/heads/a"])

    assert bare.refs() == []


def test_reflog_names_housekeeping(bare: Bare) -> None:
    bare.git("config", "core.logAllRefUpdates", "always")
    bare.git("symbolic-ref", "HEAD", "refs/heads/a")
    bare.add("refs/heads/a")
    bare.git("update-ref", "-m", "made", "HEAD", bare.commit)

    GIT.delete(bare.path, ["refs/heads/a"])

    assert bare.refs() == []


def test_a_missing_program_is_named(bare: Bare) -> None:
    with pytest.raises(RefDeletionFailed, match="git program 'no-such-git' does not start: No such file"):
        GitCli("no-such-git").delete(bare.path, ["refs/heads/a"])


@pytest.mark.parametrize("ignores", ["", "trap '' TERM; "])
@pytest.mark.slow
def test_hanging_git_is_killed(bare: Bare, program: Program, tmp_path: Path, ignores: str) -> None:
    hanging = program(f"{ignores}echo $$ > '{tmp_path}/pid'; exec sleep 600")

    with pytest.raises(RefDeletionFailed, match=r"did not end within 1 s"):
        GitCli(hanging, timedelta(seconds=1), timedelta(seconds=0.1)).delete(bare.path, ["refs/heads/a"])

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_hanging_git_leaves_no_lock_files(bare: Bare, program: Program, tmp_path: Path) -> None:
    # They would block every push to these refs and every deletion until someone removes them.
    bare.add("refs/heads/packed")
    bare.pack()
    bare.add("refs/heads/loose")
    orders = r"start\0delete refs/heads/packed\0\0delete refs/heads/loose\0\0prepare\0"
    prepared = program(
        f"mkfifo '{tmp_path}/orders'; (printf '{orders}'; exec sleep 600) > '{tmp_path}/orders' 2>&1 & "
        f"echo $! > '{tmp_path}/writer'; exec git \"$@\" < '{tmp_path}/orders'"
    )

    with pytest.raises(RefDeletionFailed, match="did not end"):
        GitCli(prepared, timedelta(seconds=2)).delete(bare.path, ["refs/heads/packed"])

    os.kill(int((tmp_path / "writer").read_text()), 9)
    left = [file.name for file in bare.path.rglob("*") if file.suffix in (".lock", ".new")]
    assert (left, bare.refs()) == ([], ["refs/heads/loose", "refs/heads/packed"])


def test_killed_git_fails_the_repository(bare: Bare, program: Program) -> None:
    with pytest.raises(RefDeletionFailed, match="status -9"):
        GitCli(program("kill -9 $$")).delete(bare.path, ["refs/heads/a"])


def test_long_output_is_truncated(bare: Bare, program: Program) -> None:
    talking = program("cat > /dev/null; head -c 20000000 /dev/zero | tr '\0' x >&2; exit 1")

    with pytest.raises(RefDeletionFailed) as failed:
        GitCli(talking).delete(bare.path, ["refs/heads/a"])

    assert len(str(failed.value)) < 10_000


@pytest.mark.parametrize(
    "reason",
    [
        "Permission denied",
        "Operation not permitted",
        "Read-only file system",
        "No space left on device",
        "Input/output error",
        "Too many open files",
        "Stale file handle",
    ],
)
def test_error_of_the_system_is_the_repository_s(bare: Bare, program: Program, reason: str) -> None:
    answer = f"fatal: cannot lock ref 'refs/heads/a': Unable to create '{bare.path}/refs/heads/a.lock': {reason}"
    refusing = GitCli(program(f'echo "{answer}" >&2; exit 128'))

    with pytest.raises(RefDeletionFailed, match=reason):
        list(delete_refs(refusing, bare.path, ["refs/heads/a", "refs/heads/b"]))


@pytest.mark.parametrize("answer", ["fatal: out of memory", "fatal: bad object header", ""])
def test_error_that_names_no_ref_is_the_repository_s(bare: Bare, program: Program, answer: str) -> None:
    refusing = GitCli(program(f'echo "{answer}" >&2; exit 128'))

    with pytest.raises(RefDeletionFailed):
        list(delete_refs(refusing, bare.path, ["refs/heads/a", "refs/heads/b"]))


def test_refs_are_not_passed_on_the_command_line(bare: Bare, program: Program, tmp_path: Path) -> None:
    telling = program(f"printf '%s\\n' \"$@\" > '{tmp_path}/arguments'; cat > '{tmp_path}/orders'")

    GitCli(telling).delete(bare.path, ["refs/heads/-d", "refs/heads/日本"])

    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[-4:] == ["update-ref", "--no-deref", "-z", "--stdin"]
    assert "core.hooksPath=/dev/null" in arguments
    assert (tmp_path / "orders").read_bytes() == "delete refs/heads/-d\0\0delete refs/heads/日本\0\0".encode()


@pytest.mark.slow
def test_input_larger_than_a_pipe_does_not_block(bare: Bare) -> None:
    GIT.delete(bare.path, [f"refs/heads/{number:05}/{'x' * 200}" for number in range(2000)])


def test_reftable_repository_is_cleaned(tmp_path: Path) -> None:
    version = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 45):
        pytest.skip(f"git {version} knows no reftable; 2.45 does")
    bare = Bare(tmp_path / "reftable.git", "--ref-format=reftable")
    bare.add("refs/heads/a", "refs/heads/b")

    GIT.delete(bare.path, ["refs/heads/a", "refs/heads/none"])

    assert bare.refs() == ["refs/heads/b"]
