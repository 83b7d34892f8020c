from __future__ import annotations

import pytest

from tests.internals.leases import Holder, holder_of, new_token


@pytest.mark.parametrize("token", [None, "", "somebody", f"{'9' * 5000}-{'0' * 32}", f"{'9' * 16}-{'0' * 32}"])
def test_token_of_another_form_has_an_unknown_holder(token: str | None) -> None:
    assert holder_of(token) == Holder()


def test_token_describes_its_holder() -> None:
    holder = holder_of(new_token("a.worker"))

    assert holder.worker == "a.worker"
    assert holder.held_for is not None and holder.held_for.total_seconds() < 60
