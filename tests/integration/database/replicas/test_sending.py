from __future__ import annotations

from typing import Any

from housekeeping.database.connection import database
from housekeeping.database.wal_position import WalPositionReader
from tests.integration.database.replicas.conftest import MakeApplication
from tests.integration.database.replicas.standby import Standby
from tests.integration.database.replicas.test_away import NOWHERE, declared


def test_message_is_sent_while_the_primary_is_away(make_application: MakeApplication, standby: Standby) -> None:
    application, seen, now = make_application(standby.url), list[Any](), [0.0]
    application.consistency._positions = WalPositionReader(NOWHERE, clock=lambda: now[0])
    look = declared(application, seen)

    sent = [look.send() for now[0] in (0.0, 59.9, 60.0)]
    standby.catch_up(application.primary)

    assert ["database_position" in message.options for message in sent] == [False, False, False]
    assert len(application.lines("Messages are sent without a position, and read from the primary")) == 2
    assert application.run() == "primary"


def test_a_message_sent_within_a_transaction_reads_from_the_primary(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen)

    with database.atomic():
        database.execute_sql("INSERT INTO notes VALUES ('not committed when it was sent')")
        look.send()
        standby.catch_up(application.primary)

    assert (application.run(), seen) == ("primary", [1])
