"""Sample data of the demo: one scene per family of workers, and one of a custom sweep.

User statuses are due, due later, never due, and locked by another session. Bulk imports are active, ended and stale,
with their entities and trackers. Uploads are stale with and without an object, active, or of a store that is not
configured. Repositories have refs to delete that are loose, packed, locked, missing and invalid. CI builds are stuck in
four statuses, active, ended, and a few have damaged data. Accounts are closed, with purchases and their items.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg2
from rich.table import Table
from rich.text import Text

from housekeeping.cli.output import table
from housekeeping.cli.sample_rows import add_builds, add_imports, add_ref_deletions, add_user_statuses
from housekeeping.core.redis import shared_redis
from housekeeping.database.connection import database
from housekeeping.demo import accounts
from housekeeping.workers.batched_git_ref_updates.git import hashed_path
from housekeeping.workers.object_storage import pending_uploads

#: An undecided table for `housekeeping coverage`: neither a sweep nor `Kept` names it.
UNDECIDED: Final = """
CREATE TABLE audit_events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL, what text);
INSERT INTO audit_events (at, what) SELECT now() - n * interval '1 minute', 'login' FROM generate_series(1, 20000) AS n;
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """Sample data of a family.

    Attributes:
      seed: Creates the data below a folder, and returns a summary line.
      counted: Returns the current numbers by kind.
      settings: Returns the family's settings, given that folder.
      lock: Query of a concurrent session that locks some rows.
    """

    title: str
    seed: Callable[[Path], str]
    counted: Callable[[], dict[str, int]]
    settings: Callable[[Path], dict[str, str]] = lambda folder: {}
    lock: str = ""


DUE: Final = 40_000
LATER: Final = 12_000
NEVER: Final = 3_000
LOCKED: Final = 250

#: Locks some due statuses, like a session that is editing them.
LOCK_USER_STATUSES: Final = f"SELECT user_id FROM user_statuses WHERE user_id % 160 = 1 AND user_id <= {DUE} FOR UPDATE"  # noqa: S608
_COUNT_USER_STATUSES: Final = """
SELECT count(*) FILTER (WHERE clear_status_at <= now()),
       count(*) FILTER (WHERE clear_status_at > now()),
       count(*) FILTER (WHERE clear_status_at IS NULL)
FROM user_statuses
"""


def seed_user_statuses(folder: Path) -> str:
    """Fill the table in under a second; return a summary line."""
    add_user_statuses(DUE, LATER, NEVER, every="100 milliseconds")
    database.execute_sql("ANALYZE user_statuses")
    return (
        f"{DUE + LATER + NEVER:,} user statuses: {DUE:,} due, {LATER:,} due later, {NEVER:,} never; "
        f"{LOCKED} of those due are locked by another session"
    )


def count_user_statuses() -> dict[str, int]:
    """Return the number of statuses of each kind."""
    due, later, never = database.execute_sql(_COUNT_USER_STATUSES).fetchone()
    return {f"due ({LOCKED} locked by another session)": due, "due later": later, "never due": never}


IMPORTS: Final = 3_000
STUCK_IMPORTS: Final = 600
ENTITIES: Final = 5  # of each import
RELATIONS: Final = ("self", "members", "labels", "milestones", "badges", "boards")
#: Entities with a tracker that another session has locked, like a worker that is still running.
HELD: Final = 40

#: Locks a tracker of some stale entities, like a session that is working on it.
LOCK_IMPORTS: Final = f"""
SELECT id FROM bulk_import_trackers WHERE status = 1 AND bulk_import_entity_id IN (
    SELECT id FROM bulk_import_entities WHERE status IN (0, 1) AND updated_at < now() - interval '24 hours'
    ORDER BY id LIMIT {HELD}
) FOR UPDATE
"""  # noqa: S608 - of constants
_COUNT_IMPORTS: Final = """
SELECT (SELECT count(*) FROM bulk_imports WHERE status IN (0, 1) AND updated_at < now() - interval '24 hours'),
       (SELECT count(*) FROM bulk_imports WHERE status = 3),
       (SELECT count(*) FROM bulk_import_entities WHERE status IN (0, 1) AND updated_at < now() - interval '24 hours'),
       (SELECT count(*) FROM bulk_import_entities WHERE status = 3),
       (SELECT count(*) FROM bulk_import_trackers WHERE status IN (0, 1, 3)),
       (SELECT count(*) FROM bulk_import_trackers WHERE status = 4)
"""


def seed_imports(folder: Path) -> str:
    """Fill the three tables in about a second; return a summary line."""
    add_imports(IMPORTS, STUCK_IMPORTS, ENTITIES, RELATIONS)
    database.execute_sql("ANALYZE bulk_imports; ANALYZE bulk_import_entities; ANALYZE bulk_import_trackers")
    entities = IMPORTS * ENTITIES
    return (
        f"{IMPORTS:,} bulk imports with {entities:,} entities and {entities * len(RELATIONS):,} trackers: "
        f"{STUCK_IMPORTS:,} imports and their entities are stale; {HELD} of these have a tracker locked by another "
        "session"
    )


def count_imports() -> dict[str, int]:
    """Return the number of rows of each kind."""
    names = (
        *("imports stale", "imports timed out"),
        *(f"entities stale ({HELD} locked by another session)", "entities timed out"),
        *("trackers open (with those of fresh imports)", "trackers timed out"),
    )
    return dict(zip(names, database.execute_sql(_COUNT_IMPORTS).fetchone(), strict=True))


STALE: Final = 2_000
NEVER_CAME: Final = 500  # prepared, but the client never uploaded
GOING_ON: Final = 400
UNKNOWN_STORE: Final = 3  # of a store that is not configured: they stay and count as failed

_LOCATION: Final = "artifacts"
_HOUR: Final = 3600
_FOLDERS: Final = 256  # as many as two hexadecimal digits

_objects = Path()


def seed_uploads(folder: Path) -> str:
    """Fill an object store, which is a folder, and the Redis hash of pending uploads; return a summary line."""
    global _objects
    _objects = _store(folder)
    for number in range(_FOLDERS):
        (_objects / f"{number:02x}").mkdir(parents=True)
    now = int(time.time())
    made: dict[str, int] = {}
    for number in range(STALE + NEVER_CAME + GOING_ON):
        path = _path(number)
        # Stale uploads are spread over the two days before 3 h ago. The others began in the last hour.
        age = 3 * _HOUR + 30 * (number + 1) if number < STALE + NEVER_CAME else number % _HOUR
        made[f"{_LOCATION}:{path}"] = now - age
        if not STALE <= number < STALE + NEVER_CAME:
            os.close(os.open(_objects / path, os.O_CREAT))
    made |= {f"packages:{_path(number)}": now - 9 * _HOUR for number in range(UNKNOWN_STORE)}
    client: Any = shared_redis.get()
    client.hset(pending_uploads.KEY, mapping=made)
    return (
        f"{len(made):,} pending uploads: {STALE:,} stale, {NEVER_CAME:,} stale without an object, "
        f"{GOING_ON} active, {UNKNOWN_STORE} of a store that is not configured"
    )


def uploads_settings(folder: Path) -> dict[str, str]:
    """Return one store in a local folder."""
    return {"OBJECT_STORES": json.dumps({_LOCATION: f"file://{_store(folder)}"})}


def count_uploads() -> dict[str, int]:
    """Return the number of entries and objects of each kind."""
    counts = {"stale": 0, "active": 0, "of an unknown store": 0}
    stale_before = time.time() - 3 * _HOUR
    for upload in pending_uploads.each():
        if upload.location != _LOCATION:
            counts["of an unknown store"] += 1
        elif upload.prepared_at is not None and upload.prepared_at.timestamp() < stale_before:
            counts["stale"] += 1
        else:
            counts["active"] += 1
    return counts | {"objects in the store": sum(len(files) for _, _, files in os.walk(_objects))}


def _store(folder: Path) -> Path:
    return folder / "objects"


def _path(number: int) -> str:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return f"{digest[:2]}/{digest[2:18]}"


PROJECTS: Final = 40
LOOSE: Final = 30  # branches per project to delete, each in a file
PACKED: Final = 45  # packed refs per project to delete
KEPT: Final = ("refs/heads/main", "refs/heads/develop", "refs/tags/v1.0")
GONE: Final = 5  # refs per project that were already deleted by hand
_LOCKED: Final = "refs/heads/fix-000"  # in the first project, with the lock file of another git process
_NO_REFS: Final = ("HEAD", "refs/heads/a..b", "--all")

_COUNT_REFS: Final = """
SELECT count(*) FILTER (WHERE status = 1), count(*) FILTER (WHERE status = 2), count(DISTINCT project_id)
FROM batched_git_ref_updates_deletions
"""


def seed_refs(folder: Path) -> str:
    """Create the repositories and fill the table in under a second; return a summary line."""
    loose = [f"refs/heads/fix-{number:03}" for number in range(LOOSE)]
    packed = [f"refs/merge-requests/{number}/head" for number in range(PACKED)]
    gone = [f"refs/heads/gone-{number}" for number in range(GONE)]
    for project in range(1, PROJECTS + 1):
        _make_repository(_root(folder) / hashed_path(project), [*KEPT, *loose], packed)
    (_root(folder) / hashed_path(1) / f"{_LOCKED}.lock").touch()
    with database.atomic():
        refs = [*loose, *packed, *gone]
        add_ref_deletions(PROJECTS, refs)
        add_ref_deletions(2, _NO_REFS)
    database.execute_sql("ANALYZE batched_git_ref_updates_deletions")
    global _repositories
    _repositories = _root(folder)
    rows = PROJECTS * len(refs) + 2 * len(_NO_REFS)
    return (
        f"{PROJECTS} bare git repositories with {len(KEPT) + LOOSE + PACKED} refs each, and {rows:,} refs to delete: "
        f"{PROJECTS * GONE} already gone, {2 * len(_NO_REFS)} invalid, one locked by another git process"
    )


def refs_settings(folder: Path) -> dict[str, str]:
    """Return the settings of the scene: where its repositories are."""
    return {"REPOSITORIES_ROOT": str(_root(folder))}


def count_refs() -> dict[str, int]:
    """Return the number of rows of each kind, and of refs in all repositories."""
    pending, processed, projects = database.execute_sql(_COUNT_REFS).fetchone()
    there = (
        sum(_refs_in(_repositories / hashed_path(project)) for project in range(1, projects + 1))
        if _repositories
        else 0
    )
    return {"pending": pending, "processed": processed, "refs in the repositories": there}


#: The folder that `seed_refs` used.
_repositories: Path | None = None


def _root(folder: Path) -> Path:
    return folder / "repositories"


def _make_repository(path: Path, loose: list[str], packed: list[str]) -> None:
    """Create a bare repository with one commit for all refs, without git, which would be slow for 40 of them."""
    (path / "refs/heads").mkdir(parents=True)
    (path / "HEAD").write_text("ref: refs/heads/main\n")
    (path / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n")
    tree = _add_object(path, "tree", b"")
    who = b"A Developer <developer@example.com> 1767225600 +0000"
    commit = _add_object(path, "commit", b"tree %s\nauthor %s\ncommitter %s\n\nBegin\n" % (tree.encode(), who, who))
    for ref in loose:
        file = path / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{commit}\n")
    lines = "".join(f"{commit} {ref}\n" for ref in sorted(packed))
    (path / "packed-refs").write_text(f"# pack-refs with: peeled fully-peeled sorted \n{lines}")


def _add_object(path: Path, kind: str, content: bytes) -> str:
    whole = b"%s %d\0%s" % (kind.encode(), len(content), content)
    name = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    file = path / "objects" / name[:2] / name[2:]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(zlib.compress(whole))
    return name


def _refs_in(path: Path) -> int:
    # Counted while git runs: a folder that git has just removed is skipped.
    loose = sum(not file.endswith(".lock") for _, _, files in os.walk(path / "refs") for file in files)
    packed = (path / "packed-refs").read_text().splitlines()
    return loose + sum(not line.startswith("#") for line in packed)


STUCK_BUILDS: Final = 2_000  # of each kind: canceling, running, scheduled, pending
AT_WORK: Final = 1_500
ENDED: Final = 20_000
DAMAGED: Final = 3  # canceling, with the largest possible version: they cannot be dropped, only doomed

_BUILD_STATUSES: Final = ("canceling", "running", "scheduled", "pending")
_OLD: Final = "(now() AT TIME ZONE 'UTC') - interval '1 hour'"
_COUNT_BUILDS: Final = f"""
SELECT count(*) FILTER (WHERE status = 'canceling' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status = 'running' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status = 'scheduled' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status = 'pending' AND updated_at < {_OLD}),
       count(*) FILTER (WHERE status IN ('canceling', 'running', 'scheduled', 'pending') AND updated_at >= {_OLD}),
       count(*) FILTER (WHERE failure_reason = 3),
       count(*) FILTER (WHERE failure_reason = 7),
       count(*) FILTER (WHERE failure_reason = 12)
FROM ci_builds
"""  # noqa: S608 - of constants
_BUILD_KINDS: Final = (
    *(f"stuck in {status}" for status in _BUILD_STATUSES),
    "active",
    "failed: stuck_or_timeout_failure",
    "failed: stale_schedule",
    "failed: data_integrity_failure",
)


def seed_builds(folder: Path) -> str:
    """Fill the table in under a second; return a summary line."""
    add_builds(STUCK_BUILDS, AT_WORK, ENDED, DAMAGED)
    database.execute_sql("ANALYZE ci_builds")
    return (
        f"{4 * STUCK_BUILDS + AT_WORK + ENDED:,} CI builds: {STUCK_BUILDS:,} each stuck in "
        f"{', '.join(_BUILD_STATUSES)}, {AT_WORK:,} active, {ENDED:,} ended; {DAMAGED} of the canceling ones "
        "are damaged and cannot be dropped"
    )


def count_builds() -> dict[str, int]:
    """Return the number of builds of each kind."""
    return dict(zip(_BUILD_KINDS, database.execute_sql(_COUNT_BUILDS).fetchone(), strict=True))


_REFS: Final = Scene("GIT REFS", seed_refs, count_refs, settings=refs_settings)
#: Scenes of the built-in workers.
FAMILIES: Final = (
    Scene("USER STATUSES", seed_user_statuses, count_user_statuses, lock=LOCK_USER_STATUSES),
    Scene("BULK IMPORTS", seed_imports, count_imports, lock=LOCK_IMPORTS),
    Scene("DIRECT UPLOADS", seed_uploads, count_uploads, settings=uploads_settings),
    *([_REFS] if shutil.which("git") else []),  # its refs are real and deleted by git
    Scene("CI BUILDS", seed_builds, count_builds),
)
SCENES: Final = (*FAMILIES, Scene("CLOSED ACCOUNTS", accounts.seed, accounts.count, settings=accounts.settings))

Counted = dict[str, dict[str, int]]


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of all scenes."""
    return {name: value for scene in SCENES for name, value in scene.settings(folder).items()}


def counted() -> Counted:
    """Return the current numbers by scene and kind."""
    return {scene.title: scene.counted() for scene in SCENES}


@contextmanager
def others_at_work(url: str) -> Iterator[None]:
    """Lock rows of the scenes in concurrent sessions."""
    with ExitStack() as stack:
        for scene in SCENES:
            if scene.lock:
                session = stack.enter_context(closing(psycopg2.connect(url)))
                session.cursor().execute(scene.lock)
        yield


def compared(before: Counted, after: Counted) -> Table:
    """Return a table with one row per kind, grouped by scene: the numbers before and now."""
    rows = table("", ">BEFORE", ">NOW", title="\nwhat changed")
    for title, kinds in after.items():
        rows.add_row(Text(title, style="bold"), "", "")
        for kind, now in kinds.items():
            rows.add_row(f"  {kind}", f"{before[title].get(kind, 0):,}", f"{now:,}")
    return rows
