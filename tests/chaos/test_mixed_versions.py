"""Test of F10: two releases with different actor arguments run in parallel."""

from __future__ import annotations

import pytest

from tests.acceptance.processes import eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.figures import Figures
from tests.chaos.sending import Sender
from tests.chaos.trial import PATIENCE_S

OLD, NEW = "tests.chaos.shop.old", "tests.chaos.shop.new"
ACTOR = "shop.charge"
WRONG = "SELECT order_number, count(*) FROM charges GROUP BY 1 HAVING count(*) > 1"
COUNT = "SELECT count(*) FROM charges"


@pytest.mark.long
def test_rolling_restart_with_other_arguments_has_each_effect_once(make_trial: MakeTrial, figures: Figures) -> None:
    trial = make_trial((), app=OLD)
    trial.place.do("CREATE TABLE charges (order_number integer, currency text, release text)")
    old = trial.worker()
    # A message that a release cannot run fails there, and its retry reaches the other one.
    for order in range(1, 11):
        trial.sender.send(ACTOR, order, idempotency_key=f"order {order}")
    new = trial.worker(NEW)
    with Sender(NEW, trial.environment) as new_sender:
        for order in range(11, 21):
            trial.sender.send(ACTOR, kwargs={"order_id": order}, idempotency_key=f"order {order}")
            new_sender.send(ACTOR, order + 10, "USD", idempotency_key=f"order {order + 10}")
            new_sender.send(ACTOR, order - 10, idempotency_key=f"order {order - 10}")
        figures.faults["rolling restart with other arguments"] += 1
        eventually(lambda: trial.place.rows(COUNT) >= [(30,)], old, new, patience_s=PATIENCE_S)
        eventually(lambda: not trial.waiting, old, new, patience_s=PATIENCE_S)
        assert old.terminate() == 0
        for order in range(1, 31):
            new_sender.send(ACTOR, order, idempotency_key=f"order {order}")
        eventually(lambda: not trial.waiting, new, patience_s=PATIENCE_S)

    assert trial.place.rows(WRONG) == []
    assert trial.place.rows(COUNT) == [(30,)]
