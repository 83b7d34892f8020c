"""Page of all tables and what keeps them clean."""

from __future__ import annotations

import re

from flask.testing import FlaskClient

from tests.internals.database import Database


def rows(page: str) -> dict[str, str]:
    """Return the text of each row of the table by the first cell."""
    page = page.replace("<wbr>", "")
    found = [" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)]
    return {each.split()[0]: each for each in found}


def test_page_names_each_table_with_its_state(client: FlaskClient, statuses: object, postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE forgotten (id integer); INSERT INTO forgotten VALUES (1); ANALYZE forgotten")

    page = client.get("/coverage").get_data(as_text=True)

    found = rows(page)
    assert found["forgotten"].split()[1:] == ["undecided", "1", "8", "kB", "?", "-"]
    assert found["user_statuses"].startswith("user_statuses swept user_status_cleanup.batch")
    assert '<span class="alert">1 undecided</span>' in page


def test_name_of_a_table_is_escaped(client: FlaskClient, postgres: Database) -> None:
    postgres.execute_sql('CREATE TABLE "<script>alert(1)</script>" (id integer)')

    page = client.get("/coverage").get_data(as_text=True)

    assert "<script>alert" not in page and "&lt;script&gt;" in page
