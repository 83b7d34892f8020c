"""Audit of committed changes. Triggers record each change in its own transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos.families import Family, Place

#: ``audit`` has a row per changed row. The transaction id gives the time of the commit.
_OWN: Final = ("runs", "leases", "held_leases", "ticks")
_TABLES: Final = """
CREATE TABLE audit (
    seq bigserial PRIMARY KEY,
    xid xid NOT NULL DEFAULT pg_current_xact_id()::xid,
    tbl text NOT NULL,
    op text NOT NULL,
    old jsonb,
    new jsonb
);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.audit (tbl, op, old, new) VALUES (
        TG_TABLE_NAME,
        TG_OP,
        CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END,
        CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END
    );
    RETURN NULL;
END
$$;
"""
#: Each dropped partition is a deleted row of its table.
_DROPS: Final = """
CREATE FUNCTION note_drops() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.audit (tbl, op, old)
    SELECT '{table}', 'DELETE', jsonb_build_object('id', object_name) FROM pg_event_trigger_dropped_objects()
    WHERE object_type = 'table' AND schema_name = '{schema}' AND starts_with(object_name, '{table}_');
END
$$;
CREATE EVENT TRIGGER {schema} ON sql_drop EXECUTE FUNCTION {schema}.note_drops();
"""
#: Commits at which a row is not in exactly one of two tables. Changes of one row follow each other, as they lock it.
_MISPLACED: Final = """
SELECT id, number FROM (
    SELECT id, sum(change) OVER (PARTITION BY id ORDER BY seq) AS number FROM (
        SELECT coalesce(new, old)->>'id' AS id, min(seq) AS seq,
            sum(CASE op WHEN 'INSERT' THEN 1 WHEN 'DELETE' THEN -1 ELSE 0 END) AS change
        FROM audit WHERE tbl IN (%s, %s) GROUP BY xid::text, 1
    ) AS commits
) AS states WHERE number <> 1
"""
_TRIGGER: Final = "CREATE TRIGGER note AFTER {events} ON {table} FOR EACH ROW EXECUTE FUNCTION {schema}.note()"
_EFFECTS: Final = """
SELECT xid::text, tbl, coalesce(old->>'id', old->>'user_id') FROM audit
WHERE tbl NOT IN ('runs', 'leases', 'held_leases', 'ticks') AND (
    op = 'DELETE'
    OR (op = 'UPDATE' AND (old->>'status' <> new->>'status' OR old->>'author_id' IS DISTINCT FROM new->>'author_id'))
)
"""
#: Ledger updates of batches. Closing the row of a run that failed, was lost or was ended by a
#: shutdown is not among them: it counts nothing new, but may write `failed` for the first time.
_BATCHES: Final = """
SELECT xid::text, (new->>'id')::bigint, (new->>'epoch')::bigint FROM audit
WHERE tbl = 'runs' AND op = 'UPDATE' AND old->>'outcome' IS NULL
  AND CASE
        WHEN new->>'outcome' IS NULL THEN
          (old->'counts', old->'cursor') IS DISTINCT FROM (new->'counts', new->'cursor')
        WHEN new->>'outcome' = 'partial' AND new->>'reason' = 'shutdown' THEN
          ((old->'counts') - 'failed', old->'cursor') IS DISTINCT FROM ((new->'counts') - 'failed', new->'cursor')
        ELSE new->>'outcome' IN ('done', 'partial')
      END
ORDER BY pg_xact_commit_timestamp(xid), seq
"""
_BEGUN: Final = "SELECT xid::text, (new->>'id')::bigint FROM audit WHERE tbl = 'runs' AND op = 'INSERT'"
_TAKEN: Final = "SELECT xid::text, new->>'key' FROM audit WHERE tbl = 'leases'"
_COUNTED: Final = "SELECT id, {counted} FROM {own}.runs WHERE worker = '{worker}'"
_LAST: Final = "SELECT DISTINCT ON (worker) outcome FROM {own}.runs ORDER BY worker, id DESC"
_ENDS: Final = """
SELECT worker, outcome, reason, count(*), max(id), max(started_at)::text, max(counts::text) FROM {own}.runs
GROUP BY worker, outcome, reason ORDER BY worker, max(id)
"""
_TAKEN_OVER: Final = """
SELECT extract(epoch FROM min(pg_xact_commit_timestamp(xid)))::float8 FROM audit
WHERE tbl = 'runs' AND op = 'INSERT' AND new->>'worker' = %s
  AND extract(epoch FROM pg_xact_commit_timestamp(xid)) > %s
"""

#: Leases and ticks, in the database, that were taken from a holder before its time.
_TAKEN_TOO_EARLY: Final = """
SELECT coalesce(new->>'key', concat_ws(' ', new->>'worker', new->>'tick')), old->>'holder', new->>'holder' FROM audit
WHERE tbl IN ('held_leases', 'ticks') AND op = 'UPDATE' AND old->>'holder' <> new->>'holder'
  AND coalesce(old->>'expires_at', old->>'due_at')::timestamptz > pg_xact_commit_timestamp(xid)
"""
#: Ticks that a process has taken, with the number of their completed runs, and of all that have ended.
_TICKS: Final = """
SELECT worker, tick, count(id) FILTER (WHERE outcome = 'done'), count(id) FILTER (WHERE outcome IS NOT NULL)
FROM (SELECT DISTINCT new->>'worker' AS worker, (new->>'tick')::timestamptz AS tick FROM audit
      WHERE tbl = 'ticks' AND new->>'due_at' IS NULL AND (new->>'attempts')::int > 0) AS ended
LEFT JOIN {own}.runs USING (worker, tick) GROUP BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Effect:
    """Processed record and its transaction."""

    xid: str
    table: str
    record: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Update of a run's open row, in order of the commits."""

    xid: str
    run_id: int
    epoch: int | None


class Recorder:
    """Audit of a trial's schema and of the library's schema.

    Parameters:
      schema: The application's.
      own: The library's.
    """

    def __init__(self, place: Place, schema: str, own: str, families: Sequence[Family]) -> None:
        self._place = place
        self._own = own
        self._families = families
        place.do(_TABLES.format(schema=schema))
        events = {f"{own}.{name}": "INSERT OR UPDATE" for name in _OWN}
        for family in families:
            kinds = "UPDATE OR DELETE" if family.archive is None else "INSERT OR UPDATE OR DELETE"
            events |= dict.fromkeys(family.tables, kinds)
            if family.partitions is not None:
                place.do(_DROPS.format(schema=schema, table=family.partitions))
        for table, kinds in events.items():
            place.do(_TRIGGER.format(events=kinds, table=table, schema=schema))

    def complaints(self) -> list[str]:
        """Return every committed change that is wrong."""
        effects = [Effect(*row) for row in self._place.rows(_EFFECTS)]
        batches = [Batch(*row) for row in self._place.rows(_BATCHES)]
        moving = [table for family in self._families for table in family.archive or ()]
        once = [effect for effect in effects if effect.table not in moving]
        return [
            *_doubled(once),
            *_uncounted(effects, batches),
            *self._miscounted(effects, batches),
            *_backwards(batches, self._leases()),
            *self._misplaced(),
            *(f"{key} was taken from {one} by {other}" for key, one, other in self._place.rows(_TAKEN_TOO_EARLY)),
            *self._ticks_without_one_outcome(),
        ]

    def _ticks_without_one_outcome(self) -> Iterator[str]:
        """Yield ended ticks of an installation without Redis that were completed twice, or have no outcome."""
        for worker, tick, done, ended in self._place.rows(_TICKS.format(own=self._own)):
            if done > 1 or not ended:
                yield f"tick {tick} of {worker} has {ended} outcomes, {done} of them done"

    def _misplaced(self) -> Iterator[str]:
        """Yield rows that some commit has left in both or none of a table and its archive."""
        for family in self._families:
            if family.archive is not None:
                for record, number in self._place.rows(_MISPLACED, *family.archive):
                    yield f"{family.archive[0]} {record} was in {number} tables after a commit"

    def _leases(self) -> dict[int, str]:
        """Return the lease of each run by the transaction that drew its epoch."""
        keys = {str(xid): str(key) for xid, key in self._place.rows(_TAKEN)}
        return {run_id: keys[xid] for xid, run_id in self._place.rows(_BEGUN) if xid in keys}

    def _miscounted(self, effects: Sequence[Effect], batches: Sequence[Batch]) -> Iterator[str]:
        """Yield runs whose counts differ from their changed rows."""
        run_of = {batch.xid: batch.run_id for batch in batches}
        changed = Counter((effect.table, run_of.get(effect.xid)) for effect in effects)
        for family in self._families:
            for worker, table, names in family.counted():
                counted = " + ".join(f"coalesce((counts #>> '{{{name}}}')::bigint, 0)" for name in names)
                for run_id, number in self._place.rows(_COUNTED.format(own=self._own, worker=worker, counted=counted)):
                    if number != changed[table, run_id]:
                        yield f"run {run_id} of {worker} counts {number} of {table}, not {changed[table, run_id]}"

    def last_outcomes(self) -> set[str | None]:
        """Return how the last run of each worker ended."""
        return {outcome for (outcome,) in self._place.rows(_LAST.format(own=self._own))}

    def ends(self) -> list[str]:
        """Return how many runs of each worker ended in which way, and when the last of them began."""
        return [str(row) for row in self._place.rows(_ENDS.format(own=self._own))]

    def taken_over_at(self, worker: str, after: float) -> float | None:
        """Return the start of the first run after a time, in seconds since 1970, or None."""
        [[at]] = self._place.rows(_TAKEN_OVER, worker, after)
        return None if at is None else float(at)

    def commits(self) -> int:
        """Return the number of transactions with changes."""
        [[number]] = self._place.rows("SELECT count(DISTINCT xid::text) FROM audit")
        return int(number)


def _doubled(effects: Sequence[Effect]) -> Iterator[str]:
    """Yield records that were processed more than once."""
    times = Counter((effect.table, effect.record) for effect in effects)
    return (f"{table} {record} was processed {number} times" for (table, record), number in times.items() if number > 1)


def _uncounted(effects: Sequence[Effect], batches: Sequence[Batch]) -> Iterator[str]:
    """Yield changes that were not counted by exactly one open run in their transaction."""
    runs = Counter(batch.xid for batch in batches)
    return (
        f"{each.table} {each.record} was counted by {runs[each.xid]} runs" for each in effects if runs[each.xid] != 1
    )


def _backwards(batches: Sequence[Batch], leases: Mapping[int, str]) -> Iterator[str]:
    """Yield batches committed after a batch of a later holder of the same lease."""
    highest: dict[str, int] = {}
    for batch in batches:
        key = leases.get(batch.run_id)
        if key is None or batch.epoch is None:
            continue
        if batch.epoch < highest.get(key, 0):
            yield f"run {batch.run_id} with epoch {batch.epoch} of {key} committed after epoch {highest[key]}"
        highest[key] = max(batch.epoch, highest.get(key, 0))
