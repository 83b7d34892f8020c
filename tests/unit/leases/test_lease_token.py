from __future__ import annotations

import pytest

from housekeeping.leases.lease_token import Holder, holder_of, new_token


@pytest.mark.parametrize("token", [None, "", "somebody", f"{'9' * 5000}-{'0' * 32}", f"{'9' * 16}-{'0' * 32}"])
def test_nothing_is_known_of_a_token_that_was_not_made_here(token: str | None) -> None:
    assert holder_of(token) == Holder()


def test_a_token_of_ours_says_who_asked_for_it() -> None:
    holder = holder_of(new_token("a.worker"))

    assert holder.worker == "a.worker"
    assert holder.held_for is not None and holder.held_for.total_seconds() < 60
