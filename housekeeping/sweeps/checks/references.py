"""Foreign keys that reference the rows that a stage deletes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from peewee import Column

from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.sweeps.stages.actions import Delete
from housekeeping.sweeps.stages.call import Call
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

#: Stale rows that are looked up in each referencing table.
SAMPLE: Final = 100

_ACTIONS: Final = {"a": "NO ACTION", "r": "RESTRICT", "c": "CASCADE", "n": "SET NULL", "d": "SET DEFAULT"}
#: A constraint of a partitioned table has one for each partition below it; only the topmost is listed.
_REFERENCES: Final = """
WITH RECURSIVE ours (id) AS (
    SELECT to_regclass(%s)::oid UNION SELECT inhrelid FROM ours JOIN pg_inherits ON inhparent = ours.id
)
SELECT conrelid::regclass::text, confdeltype::text, relkind = 'p',
    ARRAY(SELECT quote_ident(attname) FROM unnest(conkey) WITH ORDINALITY AS one (number, place)
          JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY place),
    ARRAY(SELECT attname::text FROM unnest(confkey) WITH ORDINALITY AS one (number, place)
          JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY place),
    EXISTS (
        SELECT FROM pg_index WHERE indrelid = conrelid AND indisvalid AND indpred IS NULL
        AND (indkey::smallint[])[0:cardinality(conkey) - 1] @> conkey
    ),
    has_table_privilege(conrelid, 'SELECT') AND has_schema_privilege(relnamespace, 'USAGE')
FROM pg_constraint AS one JOIN pg_class ON pg_class.oid = conrelid
WHERE contype = 'f' AND confrelid IN (SELECT id FROM ours) AND NOT EXISTS (
    SELECT FROM pg_constraint AS above WHERE above.oid = one.conparentid AND above.confrelid IN (SELECT id FROM ours)
) ORDER BY 1, 4
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key that references a table whose rows are deleted.

    Attributes:
      stage: The stage that deletes them.
      table: The referencing table, as SQL has it.
      columns: Its columns, as SQL has them.
      referenced: The table whose rows are deleted.
      referenced_columns: The columns that are referenced.
      on_delete: What PostgreSQL does with the referencing rows.
      indexed: Whether an index begins with the referencing columns.
      partitioned: Whether the referencing table is partitioned.
      readable: Whether the current role may read it.
      handled: Whether the action of the stage is one of your own, which may delete the referencing rows itself.
      called: Whether a function is called for each row before it is deleted.
      archived: Whether the deleted rows move to an archive.
      referenced_rows: How many of the sampled rows are referenced; None if not counted.
      sampled_rows: How many stale rows were looked up.
    """

    stage: str
    table: str
    columns: Sequence[str]
    referenced: str
    referenced_columns: Sequence[str]
    on_delete: str
    indexed: bool
    partitioned: bool
    readable: bool
    handled: bool
    called: bool = False
    archived: bool = False
    referenced_rows: int | None = None
    sampled_rows: int | None = None

    @property
    def restricts(self) -> bool:
        """Whether a referenced row cannot be deleted."""
        return self.on_delete in ("NO ACTION", "RESTRICT") and not self.handled

    @property
    def level(self) -> Literal["fine", "warning"]:
        """``warning`` if the foreign key needs a remedy, otherwise ``fine``."""
        return "warning" if self.way_out else "fine"

    @property
    def text(self) -> str:
        """Description of the foreign key and its effect, in one line."""
        key = f"{self.table} ({', '.join(self.columns)}) references {self.referenced}, ON DELETE {self.on_delete}"
        return f"{key}, {'indexed' if self.indexed else 'not indexed'}: {self._effect()}"

    @property
    def way_out(self) -> str | None:
        """Remedy; None if none is needed."""
        steps = []
        if not self.indexed:
            concurrently = "" if self.partitioned else " CONCURRENTLY"
            steps.append(f"CREATE INDEX{concurrently} ON {self.table} ({', '.join(self.columns)})")
        if self.restricts and self.referenced_rows != 0:
            steps.append(
                f"leave referenced rows out of `stale`, or delete the rows of {self.table} first by a sweep of their "
                "own, or declare the foreign key ON DELETE CASCADE"
            )
        return "; ".join(steps) or None

    def as_json(self) -> dict[str, Any]:
        """One element of ``references`` in ``housekeeping plan --json``."""
        names = (
            "table",
            "columns",
            "on_delete",
            "indexed",
            "referenced_rows",
            "sampled_rows",
            "level",
            "text",
            "way_out",
        )
        return {"pass": self.stage, **{name: getattr(self, name) for name in names}}

    def _effect(self) -> str:
        scan = "" if self.indexed else "; each deleted row reads all of it"
        if self.handled:
            return f"the sweep's own action decides about its rows{scan}"
        if self.on_delete == "CASCADE":
            return f"its rows are deleted as well, and not counted{' or archived' if self.archived else ''}{scan}"
        if not self.restricts:
            kept = "; a restore does not change them back" if self.archived else ""
            return f"its rows are changed as well, and not counted{kept}{scan}"
        if self.referenced_rows is not None:
            if not self.sampled_rows:
                return "no row is stale now"
            sample = "the only stale row" if self.sampled_rows == 1 else f"the first {self.sampled_rows} stale rows"
            if self.referenced_rows == 0:
                return f"none of {sample} is referenced"
            verb = "is" if self.referenced_rows == 1 else "are"
            return f"{self.referenced_rows} of {sample} {verb} referenced and cannot be deleted{self._again()}"
        unknown = "it has no index" if not self.indexed else "this role cannot read it" if not self.readable else ""
        counted = f" (not counted, {unknown})" if unknown else ""
        return f"referenced rows cannot be deleted{counted}{self._again()}{scan}"

    def _again(self) -> str:
        return "; every run calls the function of its Call for them again" if self.called else ""


def references(stages: Sequence[Stage]) -> list[Reference]:
    """Return the foreign keys that reference the rows of the stages that delete.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    found = []
    for stage in stages:
        delete = _delete_of(stage)
        if not isinstance(stage, TableStage) or delete is None:
            continue
        rows = database.execute_sql(_REFERENCES, (quoted_name(stage.model),)).fetchall()
        handled = type(delete).write is not Delete.write
        meta: Any = stage.model._meta
        for table, action, partitioned, columns, referenced_columns, indexed, readable in rows:
            called = isinstance(getattr(stage, "action", None), Call)
            key = (stage.name, table, columns, meta.table_name, referenced_columns, _ACTIONS[action])
            archived = delete.archive_to is not None
            found.append(Reference(*key, indexed, partitioned, readable, handled, called, archived))
    return found


def sampled_references(stages: Sequence[Stage], now: datetime) -> list[Reference]:
    """Return `references` with counts: how many of the first stale rows are referenced. Needs an index.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    by_name = {stage.name: stage for stage in stages if isinstance(stage, TableStage)}
    return [
        _with_number(by_name[each.stage], each, now) if each.restricts and each.indexed and each.readable else each
        for each in references(stages)
    ]


def warn_of_references(stages: Sequence[Stage]) -> None:
    """Log each foreign key that references the rows of the stages that delete."""
    for each in references(stages):
        if each.way_out is None:
            logger.info("Deleted rows are referenced", text=each.text)
        else:
            logger.warning("Deleted rows are referenced", text=each.text, way_out=each.way_out)


def _delete_of(stage: Stage) -> Delete | None:
    action = getattr(stage, "action", None)
    action = action.then if isinstance(action, Call) else action
    return action if isinstance(action, Delete) else None


def _with_number(stage: TableStage, reference: Reference, now: datetime) -> Reference:
    meta: Any = stage.model._meta
    columns = [
        Column(meta.table, name).alias(f"column_{number}") for number, name in enumerate(reference.referenced_columns)
    ]
    sample = stage.model.select(*columns).where(stage.stale(now)).order_by(*stage.order).limit(SAMPLE)
    sql, parameters = database.get_sql_context().sql(sample).query()
    same = " AND ".join(f"other.{name} = sample.column_{number}" for number, name in enumerate(reference.columns))
    exists = f"EXISTS (SELECT FROM {reference.table} AS other WHERE {same})".replace("%", "%%")
    # Names come from the catalog, quoted by PostgreSQL.
    row: Any = database.execute_sql(
        f"SELECT count(*), count(*) FILTER (WHERE {exists}) FROM ({sql}) AS sample",  # noqa: S608
        parameters,
    ).fetchone()
    return replace(reference, sampled_rows=row[0], referenced_rows=row[1])
