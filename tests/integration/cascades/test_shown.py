"""The tree of dependents as ``housekeeping plan`` prints it."""

from __future__ import annotations

import pytest

from housekeeping import Delete, Rows, Sweep
from tests.integration.conftest import Do
from tests.internals.cli import out, print_plan
from tests.internals.insight import plan

SCHEMA = """
CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz);
CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account (id) ON DELETE CASCADE);
CREATE TABLE order_item (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders (id) ON DELETE CASCADE);
CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account (id) ON DELETE SET NULL);
CREATE TABLE invoice (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders (id));
CREATE INDEX ON orders (account_id); CREATE INDEX ON order_item (order_id); CREATE INDEX ON invoice (order_id);
INSERT INTO account SELECT n, '2020-01-01' FROM generate_series(1, 300) AS n;
INSERT INTO orders SELECT n, n FROM generate_series(1, 300) AS n;
INSERT INTO order_item SELECT n, n % 300 + 1 FROM generate_series(1, 1200) AS n;
"""


@pytest.mark.parametrize("kept", [0, 2])
def test_tree_of_dependents_fits_80_columns(
    do: Do, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    do(f"{SCHEMA}; INSERT INTO invoice SELECT n, n FROM generate_series(1, {kept}) AS n")
    rows = Rows("account", stale=lambda row, now: row.closed_at < now, action=Delete(dependents={"invoice": "keep"}))
    monkeypatch.setattr(out, "width", 80)

    print_plan(plan(Sweep("shop.closed_accounts", rows)))

    shown = capsys.readouterr().out
    tree = shown[shown.index("DEPENDENTS") :].splitlines()
    # An invoice keeps its order, the account above it and the items of that order.
    most = "at most " if kept else ""
    assert [" ".join(line.split()) for line in tree[:5]] == [
        "DEPENDENTS DECISION ROWS BATCHES INDEX",
        "comment.author_id clear 0 - missing",
        f"orders.account_id delete {most}300 3 yes",
        f"invoice.order_id keep {kept} - yes",
        f"order_item.order_id delete {most}1,200 12 yes",
    ]
    assert [line.rstrip() for line in tree[5:]] == [
        "",
        "warning: comment (author_id) references account, ON DELETE SET NULL, not",
        "  indexed: author_id of its rows is set to NULL first, in transactions of their",
        "  own; each batch reads all of it",
        "do: CREATE INDEX CONCURRENTLY ON comment (author_id)",
    ]
    assert [line for line in shown.splitlines() if len(line) > 80] == []
