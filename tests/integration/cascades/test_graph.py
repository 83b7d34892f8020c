"""The graph of dependents: which links it has, what is decided about them, and which declarations are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from peewee import BigAutoField

from housekeeping import BaseModel, DeclarationError, Delete, Reference, Settings
from tests.integration.conftest import Do
from tests.internals.database import Database, key_of
from tests.internals.sweeps import Graph, read_graph
from tests.session_settings import set_in_session


class Account(BaseModel):
    id = BigAutoField()


@pytest.fixture
def do(do: Do) -> Do:
    do("CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz)")
    return do


def graph(dependents: Any = True, *references: Reference) -> Graph:
    return read_graph(Account, dependents, references)


def lines(found: Graph) -> list[str]:
    return [f"{each.parent} <- {each.name} {each.decision}" for each in found.links]


def refusal(dependents: Any = True, *references: Reference) -> str:
    with pytest.raises(DeclarationError) as refused:
        graph(dependents, *references)
    return str(refused.value)


SHOP = """
CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE);
CREATE TABLE order_item (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders (id) ON DELETE CASCADE);
CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account (id) ON DELETE SET NULL,
    approved_by bigint DEFAULT 0 REFERENCES account (id) ON DELETE SET DEFAULT);
CREATE TABLE vote (id bigint PRIMARY KEY, comment_id bigint REFERENCES comment (id) ON DELETE CASCADE);
"""


def test_constraints_decide_and_cleared_rows_keep_their_dependents(do: Do) -> None:
    do(SHOP)

    found = graph()

    assert lines(found) == [
        "account <- comment.approved_by clear",
        "account <- comment.author_id clear",
        "account <- orders.account_id delete",
        "orders <- order_item.order_id delete",
    ]
    assert [(each.cleared, each.defaults) for each in found.links_of("account")[:2]] == [
        (("approved_by",), ("0",)),
        (("author_id",), ()),
    ]
    assert found.tables == ("comment", "order_item", "orders", "account")
    assert [each.name for each in found.links_of("orders")] == ["order_item.order_id"]
    assert found.model_of("account") is Account
    assert [column.column_name for column in key_of(found.model_of("order_item"))] == ["id"]


def test_mapping_overrides_the_constraints_by_table_and_by_link(do: Do) -> None:
    do(SHOP)

    found = graph({"comment": "delete", "comment.author_id": "keep", "order_item": "keep"})

    assert lines(found) == [
        "account <- comment.approved_by delete",
        "account <- comment.author_id keep",
        "account <- orders.account_id delete",
        "comment <- vote.comment_id delete",
        "orders <- order_item.order_id keep",
    ]


def test_rows_below_a_kept_row_are_not_in_the_graph(do: Do) -> None:
    do(SHOP)

    assert "order_item" not in str(lines(graph({"orders": "keep"})))


@pytest.mark.parametrize("rule", ["", "ON DELETE RESTRICT"])
def test_link_without_a_decision_is_refused_with_the_line_to_add(do: Do, rule: str) -> None:
    do(f"CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) {rule})")

    text = refusal()
    found = graph({"invoice.account_id": "keep"})

    assert text == (
        f"1 link has no decision: invoice.account_id (references account, {rule or 'ON DELETE NO ACTION'}); decide "
        '"delete", "clear" or "keep" for it: dependents={"invoice.account_id": "keep"}'
    )
    assert lines(found) == ["account <- invoice.account_id keep"]


def test_links_behind_a_new_decision_are_refused_next(do: Do) -> None:
    do(
        "CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id));"
        "CREATE TABLE payment (id bigint PRIMARY KEY, invoice_id bigint REFERENCES invoice (id))"
    )

    text = refusal({"invoice": "delete"})

    assert "1 link has no decision: payment.invoice_id" in text
    assert text.endswith('dependents={"invoice": "delete", "payment.invoice_id": "keep"}')


def test_without_dependents_nothing_is_refused(do: Do) -> None:
    do("CREATE TABLE invoice (account_id bigint REFERENCES account (id))")

    assert lines(graph(None)) == ["account <- invoice.account_id None"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("order_items", "did you mean 'order_item'?"),
        ("orders.acount_id", "did you mean 'orders.account_id'?"),
        (
            "zzz",
            "the links are comment.approved_by, comment.author_id, orders.account_id, order_item.order_id; declare one "
            "without a foreign key in references",
        ),
    ],
)
def test_name_that_fits_no_link_is_refused(do: Do, name: str, hint: str) -> None:
    do(SHOP)

    assert refusal({name: "delete"}) == f"no link has the name {name!r}; {hint}"


def test_misspelled_name_is_refused_before_the_link_that_it_leaves_undecided(do: Do) -> None:
    do(SHOP)
    do("CREATE TABLE badge (id bigint PRIMARY KEY, account_id bigint REFERENCES account)")

    assert refusal({"badge.acount_id": "delete"}).endswith("; did you mean 'badge.account_id'?")


def test_several_links_composite_keys_and_schemas_are_followed(do: Do, settings: Settings) -> None:
    other = f"{settings.namespace}_other"
    do(
        f"CREATE SCHEMA {other};"
        f'CREATE TABLE {other}."Item" (id bigint, "Day" date, seller bigint REFERENCES account (id) ON DELETE CASCADE,'
        ' buyer bigint REFERENCES account (id) ON DELETE CASCADE, PRIMARY KEY (id, "Day"));'
        "CREATE TABLE note (id bigint PRIMARY KEY, item bigint, day date,"
        f' FOREIGN KEY (item, day) REFERENCES {other}."Item" (id, "Day"))'
    )

    found = graph({f"{other}.Item.seller": "delete", "note.item, day": "delete"})
    do(f"DROP SCHEMA {other} CASCADE")

    item = f'{other}."Item"'
    assert lines(found) == [
        f"account <- {item}.buyer delete",
        f"account <- {item}.seller delete",
        f"{item} <- note.item,day delete",
    ]
    assert (found.links[2].columns, found.links[2].parent_columns) == (("item", "day"), ("id", "Day"))


def test_name_with_a_schema_is_all_links_of_that_table(do: Do, settings: Settings) -> None:
    other = f"{settings.namespace}_other"
    do(
        f"CREATE SCHEMA {other};"
        f"CREATE TABLE {other}.mail (id bigint PRIMARY KEY, seller bigint REFERENCES account (id),"
        " buyer bigint REFERENCES account (id));"
        "CREATE TABLE mail (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id))"
    )

    found = graph({f"{other}.mail": "clear", "mail.account_id": "delete"})
    do(f"DROP SCHEMA {other} CASCADE")

    assert lines(found) == [
        "account <- mail.account_id delete",
        f"account <- {other}.mail.buyer clear",
        f"account <- {other}.mail.seller clear",
    ]


def test_trees_and_circles_end(do: Do) -> None:
    do(
        "CREATE TABLE folder (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE,"
        " parent_id bigint REFERENCES folder (id) ON DELETE CASCADE);"
        "CREATE TABLE file (id bigint PRIMARY KEY, folder_id bigint REFERENCES folder (id) ON DELETE CASCADE);"
        "ALTER TABLE folder ADD COLUMN cover_id bigint REFERENCES file (id) ON DELETE CASCADE;"
        "ALTER TABLE account ADD COLUMN home_id bigint REFERENCES folder (id) ON DELETE SET NULL"
    )

    found = graph()

    assert lines(found) == [
        "account <- folder.account_id delete",
        "folder <- account.home_id clear",
        "folder <- file.folder_id delete",
        "folder <- folder.parent_id delete",
        "file <- folder.cover_id delete",
    ]
    assert found.tables == ("file", "folder", "account")


PARTITIONS = """
CREATE TABLE entry (id bigint, day date, account_id bigint {rule}, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);
CREATE TABLE entry_1 PARTITION OF entry FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
CREATE TABLE entry_2 PARTITION OF entry DEFAULT;
"""


def test_partitions_are_one_table(do: Do) -> None:
    do(PARTITIONS.format(rule="REFERENCES account (id) ON DELETE CASCADE"))
    do(
        "CREATE TABLE note (id bigint PRIMARY KEY, entry_id bigint, day date,"
        " FOREIGN KEY (entry_id, day) REFERENCES entry (id, day) ON DELETE CASCADE);"
        "CREATE TABLE mark (id bigint PRIMARY KEY, entry_id bigint, day date,"
        " FOREIGN KEY (entry_id, day) REFERENCES entry_1 (id, day) ON DELETE CASCADE)"
    )

    assert lines(graph()) == [
        "account <- entry.account_id delete",
        "entry <- mark.entry_id,day delete",
        "entry <- note.entry_id,day delete",
    ]


def test_constraints_of_single_partitions_are_one_link_of_their_table(do: Do) -> None:
    do(PARTITIONS.format(rule=""))
    do("ALTER TABLE entry_1 ADD FOREIGN KEY (account_id) REFERENCES account (id) ON DELETE CASCADE")
    one = lines(graph())

    do("ALTER TABLE entry_2 ADD FOREIGN KEY (account_id) REFERENCES account (id) ON DELETE SET NULL")

    assert one == ["account <- entry.account_id delete"]
    assert "entry.account_id (references account, ON DELETE CASCADE and SET NULL)" in refusal()


def test_tables_that_inherit_count_with_their_parent(do: Do) -> None:
    do(
        "CREATE TABLE item (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE);"
        "CREATE TABLE special_item (PRIMARY KEY (id)) INHERITS (item);"
        "CREATE TABLE note (id bigint PRIMARY KEY, item_id bigint REFERENCES special_item (id) ON DELETE CASCADE)"
    )

    assert lines(graph()) == ["account <- item.account_id delete", "item <- note.item_id delete"]


def test_sweep_on_one_partition_has_the_links_to_its_rows(do: Do) -> None:
    do(PARTITIONS.format(rule=""))
    do(
        "CREATE TABLE note (id bigint PRIMARY KEY, entry_id bigint, day date,"
        " FOREIGN KEY (entry_id, day) REFERENCES entry (id, day) ON DELETE CASCADE);"
    )

    class Entry1(BaseModel):
        id = BigAutoField()

        class Meta:
            table_name = "entry_1"

    assert lines(read_graph(Entry1, True, ())) == ["entry_1 <- note.entry_id,day delete"]


def test_missing_index_has_its_statement(do: Do) -> None:
    do(SHOP)
    do("CREATE INDEX ON orders (account_id, id); CREATE INDEX ON order_item (id, order_id)")

    found = {each.name: each for each in graph().links}

    assert found["orders.account_id"].indexed
    item = found["order_item.order_id"]
    assert item.index_statement == "CREATE INDEX CONCURRENTLY ON order_item (order_id)"
    assert not item.large


@pytest.mark.parametrize(("rows", "large"), [(9000, False), (11_500, True)])
def test_table_is_large_above_ten_thousand_rows_before_it_was_analyzed(do: Do, rows: int, large: bool) -> None:
    do(SHOP)
    do("INSERT INTO orders VALUES (1)")
    do(f"INSERT INTO order_item SELECT n, 1 FROM generate_series(1, {rows}) AS n; ANALYZE order_item")

    (item,) = graph().links_of("orders")

    assert item.large is large
    assert abs(item.rows - rows) < 200


def test_columns_that_a_partial_set_null_names_are_cleared(do: Do, postgres: Database) -> None:
    if postgres.server_version < 150000:
        pytest.skip("PostgreSQL 15 has SET NULL (columns)")
    do(
        "ALTER TABLE account ADD COLUMN tenant bigint NOT NULL, ADD UNIQUE (tenant, id);"
        "CREATE TABLE comment (id bigint PRIMARY KEY, tenant bigint NOT NULL, author bigint,"
        " FOREIGN KEY (tenant, author) REFERENCES account (tenant, id) ON DELETE SET NULL (author))"
    )

    (link,) = graph().links

    assert (link.columns, link.cleared, link.decision) == (("tenant", "author"), ("author",), "clear")


def test_foreign_key_that_is_not_enforced_needs_a_decision(do: Do, postgres_18: None) -> None:
    do(
        "CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint"
        " REFERENCES account (id) ON DELETE CASCADE NOT ENFORCED)"
    )

    assert "1 link has no decision: comment.author_id (references account, a Reference)" in refusal()
    assert lines(graph({"comment": "delete"})) == ["account <- comment.author_id delete"]
    assert graph(None).links == ()  # PostgreSQL ignores it when it deletes the account


@pytest.mark.parametrize("decision", ["delete", "clear"])
def test_foreign_key_with_a_period_can_only_keep_rows(do: Do, postgres_18: None, decision: str) -> None:
    do(
        "ALTER TABLE account ADD number int4range, ADD valid daterange, ADD UNIQUE (number, valid WITHOUT OVERLAPS);"
        "CREATE TABLE contract (id bigint PRIMARY KEY, number int4range, valid daterange,"
        " FOREIGN KEY (number, PERIOD valid) REFERENCES account (number, PERIOD valid));"
        "CREATE INDEX ON contract (number)"
    )

    (link,) = graph({"contract": "keep"}).links

    # Rows of all periods are kept: a row may refer to several accounts, each of which covers a part of its period.
    assert (link.columns, link.parent_columns, link.indexed) == (("number",), ("number",), True)
    assert refusal({"contract": decision}).startswith(
        'contract.number is a foreign key with a PERIOD, so that its rows may refer to rows that stay; decide "keep"'
    )


def test_column_that_is_not_null_cannot_be_cleared(do: Do) -> None:
    do("CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint NOT NULL REFERENCES account (id))")

    assert refusal({"comment": "clear"}) == (
        "comment.author_id cannot be cleared, because author_id is NOT NULL; ALTER TABLE comment ALTER COLUMN "
        'author_id DROP NOT NULL, or decide "delete" or "keep" for it: dependents={"comment.author_id": "delete"}'
    )


def test_table_without_a_key_is_refused_unless_its_rows_are_kept(do: Do) -> None:
    do("CREATE TABLE tag (account_id bigint REFERENCES account (id) ON DELETE CASCADE)")

    assert refusal().startswith("tag has no primary key; ALTER TABLE tag ADD COLUMN id bigint")
    assert lines(graph({"tag": "keep"})) == ["account <- tag.account_id keep"]


def test_missing_rights_are_refused_with_the_grants(do: Do, postgres: Database, settings: Settings) -> None:
    other, role = f"{settings.namespace}_other", f"{settings.namespace}_cleaner"
    do(SHOP)
    do(
        f"CREATE SCHEMA {other};"
        f"CREATE TABLE {other}.mail (id bigint PRIMARY KEY, account_id bigint REFERENCES account ON DELETE CASCADE);"
        f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {settings.namespace} TO {role};"
        f"GRANT SELECT, DELETE, UPDATE ON account, orders TO {role}; GRANT SELECT ON order_item TO {role}"
    )
    set_in_session(postgres, f"SESSION AUTHORIZATION {role}")

    try:
        text = refusal()
        do(text.partition("; ")[2])
        found = graph()
    finally:
        set_in_session(postgres, "SESSION AUTHORIZATION DEFAULT")
        do(f"DROP OWNED BY {role}; DROP ROLE {role}; DROP SCHEMA {other} CASCADE")

    mail = f"{other}.mail"
    assert text == (
        f"the role lacks rights on comment, {mail}, order_item; "
        f"GRANT SELECT, UPDATE (approved_by), UPDATE (author_id) ON comment TO {role}; "
        f"GRANT USAGE ON SCHEMA {other} TO {role}; GRANT SELECT, DELETE, UPDATE (account_id) ON {mail} TO {role}; "
        f"GRANT DELETE, UPDATE (order_id) ON order_item TO {role}"
    )
    assert len(found.links) == 5


def test_reference_to_a_table_in_a_closed_schema_is_refused_with_the_grant(
    do: Do, postgres: Database, settings: Settings
) -> None:
    other, role = f"{settings.namespace}_other", f"{settings.namespace}_cleaner"
    do(f"CREATE SCHEMA {other}; CREATE TABLE {other}.mail (id bigint PRIMARY KEY, account_id bigint);")
    do(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {settings.namespace} TO {role}")
    set_in_session(postgres, f"SESSION AUTHORIZATION {role}")

    try:
        text = refusal(True, Reference(f"{other}.mail.account_id", "account.id"))
    finally:
        set_in_session(postgres, "SESSION AUTHORIZATION DEFAULT")
        do(f"DROP OWNED BY {role}; DROP ROLE {role}; DROP SCHEMA {other} CASCADE")

    assert text.endswith(f"permission denied for schema {other}; GRANT USAGE ON SCHEMA {other} TO {role}")


def test_rows_that_policies_may_hide_are_refused(do: Do, postgres: Database, settings: Settings) -> None:
    role = f"{settings.namespace}_cleaner"
    do("CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id))")
    do(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {settings.namespace} TO {role}")
    do(f"GRANT SELECT ON account, invoice TO {role}; ALTER TABLE invoice ENABLE ROW LEVEL SECURITY")
    set_in_session(postgres, f"SESSION AUTHORIZATION {role}")

    try:
        text = refusal({"invoice": "keep"})
        do(text.rpartition(", or ")[2])
        found = graph({"invoice": "keep"})
    finally:
        set_in_session(postgres, "SESSION AUTHORIZATION DEFAULT")
        do(f"DROP OWNED BY {role}; DROP ROLE {role}")

    assert text.startswith(f"row-level security on invoice applies to {role}, so that dependents may not be found; ")
    assert len(found.links) == 1


def test_reference_to_a_column_of_an_inheriting_table_alone_is_refused(do: Do) -> None:
    do(
        "CREATE TABLE item (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE);"
        "CREATE TABLE special_item (code text UNIQUE) INHERITS (item);"
        "CREATE TABLE note (id bigint PRIMARY KEY, item text REFERENCES special_item (code) ON DELETE CASCADE)"
    )

    assert refusal().startswith("note.item refers to a column that item lacks, of a table that inherits from it")


ATTACHMENTS = """
CREATE TABLE attachment (id bigint PRIMARY KEY, owner_type text, owner_id bigint);
CREATE TABLE thumbnail (id bigint PRIMARY KEY, attachment_id bigint REFERENCES attachment (id) ON DELETE CASCADE);
"""
OWNER = Reference("attachment.owner_id", "account.id", where="owner_type = 'Account'")


def test_reference_needs_a_decision_and_leads_to_further_tables(do: Do) -> None:
    do(ATTACHMENTS)

    text = refusal(True, OWNER)
    found = graph({"attachment": "delete"}, OWNER)

    assert "attachment.owner_id (references account, a Reference)" in text
    assert text.endswith('dependents={"attachment.owner_id": "keep"}')
    assert lines(found) == ["account <- attachment.owner_id delete", "attachment <- thumbnail.attachment_id delete"]
    assert (found.links[0].where, found.links[0].on_delete) == ("owner_type = 'Account'", None)


@pytest.mark.parametrize(
    ("index", "indexed"),
    [
        ("(owner_id)", True),
        ("(owner_type, owner_id)", True),
        ("(owner_id) WHERE owner_type = 'Account'", True),
        ("(owner_id) WHERE owner_type = 'Team'", False),
        ("(owner_type)", False),
    ],
)
def test_index_of_a_reference_is_one_that_postgresql_would_use(do: Do, index: str, indexed: bool) -> None:
    do(ATTACHMENTS)
    do(f"CREATE INDEX ON attachment {index}")

    (link, _) = graph({"attachment": "delete"}, OWNER).links

    assert link.indexed is indexed


def test_references_may_depend_on_one_another_in_any_order(do: Do) -> None:
    do("CREATE TABLE a (id bigint PRIMARY KEY, account bigint); CREATE TABLE b (id bigint PRIMARY KEY, a bigint)")

    found = graph({"a": "delete", "b": "delete"}, Reference("b.a", "a.id"), Reference("a.account", "account.id"))

    assert lines(found) == ["account <- a.account delete", "a <- b.a delete"]


REFUSED = [
    (Reference("nothing.x", "account.id"), "there is no table 'nothing'"),
    (Reference("attachment.owner", "account.id"), "attachment has no column 'owner'; it has id, owner_id, owner_type"),
    (Reference("attachment.owner_type", "account.id"), "PostgreSQL says: operator does not exist"),
    (
        Reference("attachment.owner_id", "account.id", where="kind = 1"),
        ', where="kind = 1"): PostgreSQL says: column "kind"',
    ),
    (Reference("attachment.owner_id", "team.id"), "refers to team, which does not depend on the deleted rows"),
    (Reference("attachment.owner_id", "public.account.id"), "; write account instead"),
    (Reference("attachment.owner_id", "acount.id"), "; write account instead"),
    (Reference("attachment.owner_id", "account.id", database="archive"), "HOUSEKEEPING_DATABASES"),
]


@pytest.mark.parametrize(("reference", "text"), REFUSED)
def test_wrong_reference_is_refused(do: Do, reference: Reference, text: str) -> None:
    do(ATTACHMENTS)
    do("CREATE TABLE team (id bigint PRIMARY KEY)")

    assert text in refusal({"attachment": "delete"}, reference)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("attachment", "account.id"), "'attachment' names no column; write \"table.column\""),
        (("a.x,y", "account.id"), "'a.x,y' has 2 columns, and 'account.id' has 1"),
    ],
)
def test_reference_without_columns_is_refused_at_once(given: Sequence[str], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        Reference(*given)


def test_condition_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(DeclarationError, match="where has a semicolon"):
        Reference("a.x", "b.y", where="true; DROP TABLE a")


@pytest.mark.parametrize("given", [{"dependents": {"a": "remove"}}, {"dependents": "a"}, {"references": [OWNER]}])
def test_wrong_declaration_is_refused_at_once(given: Mapping[str, Any]) -> None:
    with pytest.raises(DeclarationError, match="dependents"):
        Delete(**given)


def test_graph_of_a_missing_table_is_empty(postgres: Database) -> None:
    found = graph()

    assert (found.root, found.links, found.tables) == ('"account"', (), ('"account"',))
