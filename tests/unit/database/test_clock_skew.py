"""Difference of two clocks, by an answer that took some time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.internals.core import ServerClock
from tests.internals.database import ClockSkew

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def skew(before: float, after: float) -> ClockSkew:
    """Return the difference for this machine's seconds past the server's noon, before and after its answer."""
    return ClockSkew.between(NOON + timedelta(seconds=before), NOON, NOON + timedelta(seconds=after))


@pytest.mark.parametrize(
    ("before", "after", "ahead_s"),
    [
        (0, 0, 0),
        (-40, 0, 0),
        (0, 40, 0),
        (-90, 90, 0),
        (7, 8, 7),
        (-8, -7, -7),
        (3600, -1, 0),  # set back while it waited for the answer
        (3600, 7, 7),
    ],
)
def test_only_a_time_outside_of_the_answers_interval_is_a_difference(
    before: float, after: float, ahead_s: float
) -> None:
    assert skew(before, after).seconds == ahead_s


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("apart", "exceeded", "refused"), [(5, False, False), (5.001, True, False), (60, True, False), (60.001, True, True)]
)
def test_over_5_s_is_an_alert_and_over_a_minute_is_refused(
    sign: int, apart: float, exceeded: bool, refused: bool
) -> None:
    found = skew(sign * apart, sign * apart)

    assert (found.exceeded, found.refused) == (exceeded, refused)


@pytest.mark.parametrize(("ahead", "side"), [(172_800, "ahead of"), (-172_800, "behind")])
def test_line_names_both_clocks_and_the_remedy(ahead: float, side: str) -> None:
    here = NOON + timedelta(seconds=ahead)

    line = str(skew(ahead, ahead))

    assert re.fullmatch(
        rf"this machine \(\S+\) says {here:%Y-%m-%d} 12:00:00 UTC, the database 2026-11-22 12:00:00 UTC: "
        rf"172,800\.0 s {side} the database; check NTP on this machine and on the database's",
        line,
    )


def test_server_clock_advances_with_the_monotonic_clock() -> None:
    elapsed = [100.0, 103.5]

    class Advanced(ServerClock):
        def monotonic(self) -> float:
            return elapsed.pop(0)

    assert Advanced(NOON).now() == NOON + timedelta(seconds=3.5)
