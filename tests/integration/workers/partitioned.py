"""Tables of real installations: named with a prefix, and partitioned by a part of their primary keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from peewee import Model
from psycopg2.extensions import connection as Connection

from tests.internals.database import Database, key_of

PARTITIONS: Final = (100, 101)


def create_partitioned(postgres: Database, admin: Connection, models: Mapping[str, type[Model]]) -> dict[str, str]:
    """Create a partitioned table ``p_NAME`` for each table, with one more column; return its name by that of the table.

    The plain tables are created as well.
    """
    postgres.create_tables(list(models.values()))
    with admin.cursor() as cursor:
        for name, model in models.items():
            key = ", ".join(column.column_name for column in key_of(model))
            cursor.execute(
                f"CREATE TABLE p_{name} (LIKE {name} INCLUDING DEFAULTS, partition_id bigint NOT NULL DEFAULT 100, "
                f"note text, PRIMARY KEY ({key}, partition_id)) PARTITION BY LIST (partition_id)"
            )
            for partition in PARTITIONS:
                cursor.execute(f"CREATE TABLE p_{name}_{partition} PARTITION OF p_{name} FOR VALUES IN ({partition})")
    return {name: f"p_{name}" for name in models}
