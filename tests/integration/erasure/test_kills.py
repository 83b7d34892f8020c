"""Erasures that are killed at every point, also between objects and rows, and in two databases."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from housekeeping import Call, Objects, ObjectStoreSettings, Settings, Subject
from tests.integration.erasure import shop
from tests.integration.erasure.shop import ERASED, NAMES, PERSON, ask, row, rows, with_key
from tests.internals.core import MessageContext, current_message, shared_redis
from tests.internals.database import database
from tests.internals.erasures import Erasure, execute
from tests.internals.ledger import NOW, Run
from tests.internals.ledger import SILENCE as RUN_SILENCE
from tests.internals.testing import run_in_process
from tests.session_settings import NEEDS_SESSION

#: Many processes.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("customers")]


def _begin_again(settings: Settings, folder: Path) -> None:
    database.execute_sql(f"TRUNCATE {', '.join(NAMES)} CASCADE")
    database.execute_sql(shop.ROWS, {"id": shop.MARKER_ID, "mail": shop.MARKER})
    Run.delete().execute()
    Erasure.delete().execute()
    (folder / f"users/{shop.MARKER_ID}").mkdir(parents=True, exist_ok=True)
    for name in ("a", "b"):
        (folder / f"users/{shop.MARKER_ID}/{name}").write_text("x")
    client = shared_redis.get()
    for key in client.scan_iter(f"{settings.namespace}:*"):
        client.delete(key)


@NEEDS_SESSION
def test_killed_erasure_ends_like_any_other(settings: Settings, tmp_path: Path) -> None:
    subject = Subject(
        "person",
        "account",
        tables=PERSON.tables,
        references=PERSON.references,
        objects=[Objects("avatars", "users/{id}/")],
        also=[Call(lambda key: (tmp_path / "told").write_text(key))],
    )
    given = settings.model_copy(update={"object_stores": {"avatars": ObjectStoreSettings(url=f"file://{tmp_path}")}})

    def killed_at(point: int | None) -> tuple[bool, int]:
        _begin_again(settings, tmp_path)
        number, alive = ask(given, subject), random.getrandbits(62)

        def run() -> None:
            token = current_message.set(MessageContext("one-message"))
            try:
                execute(number, with_key(given), {"person": subject})
            finally:
                current_message.reset(token)

        ended = run_in_process(run, point, alive)
        # A PostgreSQL backend continues for a moment after its client is gone, and keeps its locks.
        database.execute_sql("SELECT pg_advisory_lock(%s)", (alive,))
        database.execute_sql("SELECT pg_advisory_unlock(%s)", (alive,))
        # The killed run is silent for a minute, and the lease of a dead run is taken over.
        Run.update(heartbeat_at=NOW - 2 * RUN_SILENCE).where(Run.outcome.is_null()).execute()
        run()
        done = row(number)
        where = ended.points[-2:]
        assert (done.state, done.error, done.key, done.found) == ("done", None, None, None), where
        assert rows() == ERASED, where
        assert list(tmp_path.glob(f"users/{shop.MARKER_ID}/*")) == [], where
        assert (tmp_path / "told").read_text() == str(shop.MARKER_ID)
        tables = {name: each for name, each in done.counts.items() if name in NAMES}
        assert tables["item"] == {"deleted": 8} and tables["orders"] == {"anonymised": 4}, where
        assert not Run.select().where(Run.cursor.is_null(False)).exists()
        return ended.killed, len(ended.points)

    _, points = killed_at(None)
    assert points > 50
    for point in range(points + 1):
        if not killed_at(point)[0]:
            break
