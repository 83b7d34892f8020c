"""Stage that deletes rows with everything that depends on them, in bounded transactions, from the leaves up.

A run picks a group of stale parents and walks down from it (`cascade_walk`). Rows on which no other row depends any
more are deleted, one batch per transaction. The rows left in the database are the only state: after a killed run,
the next one walks down again.

Each transaction first locks what its rows depend on, up to the parents, and checks that these are still stale and not
on hold. So no dependent of a parent is changed after the commit that made it fresh. The rows are deleted by another
statement, which sees every dependent that was committed before the locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, Self

from peewee import Column, Model, PeeweeException, Query

from housekeeping.core.errors import RowNotChanged
from housekeeping.database.catalog import key_of, table_ids
from housekeeping.database.connection import database, handle_of
from housekeeping.database.errors import is_unavailable
from housekeeping.database.queries import CompiledQuery
from housekeeping.sweeps.actions import BLOCKED, CLEARED_DEPENDENTS, DELETED_DEPENDENTS, archive_in, columns_of_table
from housekeeping.sweeps.cascade_statements import CascadeTable, Statements, Values, Window, is_local
from housekeeping.sweeps.cascade_walk import Chunk, ChunkResult, Group, TimeIsUp, Walk, key_text
from housekeeping.sweeps.dependents import Graph, Link
from housekeeping.sweeps.stage import (
    DETAILS,
    Batch,
    BatchResult,
    ExpectedChange,
    Failure,
    Position,
    merged,
)
from housekeeping.sweeps.table_stage import ARCHIVED_ROWS, NOT_CHANGED, TableStage

#: A parent that takes longer than this share of the run's time is continued after the others.
_SHARE: Final = 0.25
#: Keys of blocked parents, and of those to process last, that the ledger keeps for each worker.
_MOST_KEYS: Final = 100
#: Key of the details: stage -> keys of the parents that the next run processes last.
_POSTPONED: Final = "postponed"
_ROW_OF: Final = "row of "
_NO_TIME: Final = datetime(1, 1, 1, tzinfo=UTC)


class _RowPosition(tuple[Any, ...]):
    """Position of a row of a batch, for bisection: its table, its database and its key. Not a cursor."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class CascadeStage(TableStage):
    """Stage of parents whose dependents are deleted before them.

    Attributes:
      delete: What is decided about the dependents.
      graph: Their tables; None until they are read from the catalog.
      holds: Database and table -> model and hold of each declared sweep that holds rows of it.
      archived_columns: Table -> its archive and the columns that are moved there; empty without archives.
      calls: Calls the function of a `Call` for the parents; None without one.
    """

    delete: Any
    graph: Graph | None = None
    holds: Mapping[tuple[str, str], Sequence[Any]] = field(default_factory=dict)
    archived_columns: Mapping[type[Model], tuple[type[Model], Sequence[str]]] = field(default_factory=dict)
    calls: Any = None
    #: The walk of the current run. Copies of the stage, of another size, share it.
    walks: dict[Any, Walk] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_timed(self) -> bool:  # type: ignore[override]  # a variable of other stages
        """Whether the duration of a batch depends on the database alone: False if a function is called."""
        return self.calls is None

    def on_real_columns(self) -> Self:
        real = replace(super().on_real_columns(), graph=self._read_graph())
        sources = real.archives().items()
        columns = {source: (archive, columns_of_table(source)) for archive, source in sources}
        return replace(real, archived_columns=columns)

    def _read_graph(self) -> Graph:
        return self.graph or self.delete.read_graph(self.model)

    def archives(self) -> dict[type[Model], type[Model]]:
        """Return the archive of each table whose rows are deleted or cleared, and the table; those of leaves first.

        Raises:
          DependentsRefused: The dependents cannot be deleted or archived as declared.
          peewee.PeeweeException: The catalog cannot be read.
        """
        if self.delete.archive_to is None:
            return {}
        graph = self._read_graph()
        marked = [*graph.relinked, *(each for each in graph.links if each.decision == "clear")]
        cleared = {each.table for each in marked}
        sources = [(name, graph.model_of(name)) for name in graph.tables]
        schema = self.delete.archive_to
        return {archive_in(schema, source, of_cleared=name in cleared): source for name, source in sources}

    def with_graph(self) -> Self:
        """Return the stage with the graph of its dependents, even if the current role lacks rights on them.

        Raises:
          DependentsRefused: The dependents cannot be deleted or archived as declared.
          peewee.PeeweeException: The catalog cannot be read.
        """
        return replace(self, graph=self.delete.read_graph(self.model, checks_rights=False))

    def cleared_columns(self) -> list[tuple[type[Model], tuple[str, ...], bool]]:
        """Return table and columns of each link that the stage clears, and whether they get their default."""
        graph = self._read_graph()
        links = [each for each in graph.links if each.decision == "clear"]
        return [(graph.model_of(each.table), each.cleared or each.columns, bool(each.defaults)) for each in links]

    def links_in_circles(self) -> dict[type[Model], tuple[Link, ...]]:
        """Return table -> links by which a restore may reach a row before the row that it depends on."""
        graph = self._read_graph()
        found: dict[type[Model], tuple[Link, ...]] = {}
        for each in (*graph.relinked, *graph.in_circles(graph.relinked)):
            model = graph.model_of(each.table)
            found[model] = (*found.get(model, ()), each)
        return found

    def with_holds(self, holding: Callable[[], Iterable[tuple[str, str, Any]]]) -> Self:
        assert self.graph is not None
        holds: dict[tuple[str, str], list[Any]] = {}
        tables, holding_in = _changed_tables(self.graph), dict[str, list[Any]]()
        for _, of_database, stage in holding():
            holding_in.setdefault(of_database, []).append(stage)
        for of_database, stages in holding_in.items():
            here = [name for at, name in tables if at == of_database]
            changed = [self.graph.model_of(name, of_database) for name in here]
            with database.using(of_database):
                ids = table_ids([*(each.model for each in stages), *changed]) if here else []
            for stage, held in zip(stages, ids, strict=False):
                for name, number in zip(here, ids[len(stages) :], strict=True):
                    if number is not None and number == held:
                        holds.setdefault((of_database, name), []).append((stage.model, stage.hold))
        return replace(self, holds=holds)

    def is_position(self, position: Position) -> bool:
        return not str(position[0]).startswith(_ROW_OF) and super().is_position(position)

    def statements_of_a_run(self, now: datetime) -> list[Query]:
        """Return statements that need the rights of a run; without a graph, only those on parents. Executes none."""
        root: Any = self.model
        found: list[Any] = [root.select(*self.key).where(self.stale(now)).for_update(), root.delete()]
        if (graph := self.graph) is None:
            return found
        for link in graph.links:
            if link.decision == "keep" or link.database != graph.database:
                continue
            model: Any = graph.model_of(link.table)
            found.append(model.select(*key_of(model)).for_update())
            if link.decision == "delete":
                found.append(model.delete())
            else:
                table = model._meta.table
                found.append(model.update({Column(table, each): None for each in link.cleared or link.columns}))
        return found

    def describe(self, position: Position) -> dict[str, Any]:
        if not isinstance(position, _RowPosition):
            return super().describe(position)
        name = position[0].removeprefix(_ROW_OF)
        table = self._statements(_NO_TIME).table(name, position[1])
        return {"table": name, **dict(zip(table.key, position[2:], strict=True))}

    def _statements(self, now: datetime, run_id: int | None = None) -> Statements:
        assert self.graph is not None, "the stage is not that of a run"
        return Statements(self.graph, self.holds, self.stale, now, self.archived_columns, run_id)

    def _walk(self, batch: Batch) -> Walk:
        run = self.purpose(batch)
        if run not in self.walks:
            self.walks.clear()
            walk = self.walks[run] = Walk(self._statements(batch.now, batch.run_id))
            walk.sees_all = batch.after is None
            for details in reversed(batch.details):
                walk.last |= dict.fromkeys(details.get(_POSTPONED, {}).get(self.name, ()))
        return self.walks[run]

    # -- before the transaction

    def prepare(self, batch: Batch) -> BatchResult:
        """Walk down to the rows that the next transaction changes, which are `Walk.chunk`.

        Call the function of a `Call` for each parent that is picked. Return what has happened since the last commit
        without a change of the database, and where the stage continues.
        """
        walk = self._walk(batch)
        walk.outcome = None
        group = walk.group
        if group is not None and not (group.front == batch.after and walk.stack and group.is_checked):
            walk.end()
        try:
            if walk.group is None:
                moved = self._pick(batch, walk)
                if moved is not None:
                    return moved
            group = walk.group
            assert group is not None
            if _takes_long(batch, group):
                walk.postpone_largest()
            chunk = walk.next_chunk(self.batch_size, lambda: not batch.time_is_up())
        except TimeIsUp:
            return self._step(batch, walk, None, batch.after)
        if chunk is not None and not walk.is_last(chunk):
            return self._step(batch, walk, chunk, batch.after)
        return self._step(batch, walk, chunk, group.end, exhausted=group.exhausted)

    def _step(
        self, batch: Batch, walk: Walk, chunk: Chunk | None, position: Position | None, *, exhausted: bool = False
    ) -> BatchResult:
        exhausted = exhausted and not (walk.deferred or walk.postponed)
        if exhausted and (walk.sees_all or batch.until is not None):
            walk.forget_missing()
        counts = merged(walk.counts, self._count_last(walk))
        failures, unreachable = tuple(walk.failures), walk.unreachable
        walk.chunk, walk.counts, walk.failures = chunk, {}, []
        return BatchResult(counts, position, exhausted, failures=failures, unreachable=unreachable)

    def _count_last(self, walk: Walk) -> dict[str, Any]:
        """Return the details with the parents that the next run processes last, if they have changed."""
        keys = list(walk.last)[:_MOST_KEYS]
        if keys == walk.last_noted:
            return {}
        walk.last_noted = keys
        return {DETAILS: {_POSTPONED: {self.name: keys}}}

    def _pick(self, batch: Batch, walk: Walk) -> BatchResult | None:
        """Begin a group of parents. If there are none, return where the stage continues."""
        rows = self._parents(batch, walk)
        width = len(walk.statements.root.columns_by(None))
        positions = [self.position_of(row[:-width]) for row in rows]
        end, exhausted = self.position_after(batch, positions[-1] if positions else None, len(rows))
        is_again = not (rows or walk.deferred)
        last = walk.take_last() if exhausted and not rows else {}
        if last:
            rows = self._parents(replace(batch, only=list(last.values())), walk)
            positions = [self.position_of(row[:-width]) for row in rows]
        if not rows:
            return self._step(batch, walk, None, end, exhausted=exhausted)
        values = [row[-width:] for row in rows]
        by_key = {walk.statements.root.key_in(row): each for row, each in zip(values, positions, strict=True)}
        walk.begin(Group(batch.after, end, exhausted, by_key, batch.spent(), is_checked=is_again), values)
        if not last:
            walk.defer()
        if not is_again:
            self._leave_blocked(batch, walk)
            if self.calls is not None:
                self._call(batch, walk)
        return None

    def _parents(self, batch: Batch, walk: Walk) -> list[tuple[Any, ...]]:
        """Return the next stale parents, with the values of their window at the end of each row."""
        known = self._known(walk.statements.root)
        return self.run_statement(batch, "parents", lambda batch: self.rows(batch, locks=False).select_extend(*known))

    def _leave_blocked(self, batch: Batch, walk: Walk) -> None:
        """Skip and count parents with a dependent that is kept, before any of their rows is changed."""
        blocked = None
        while blocked is None:
            blocked = walk.blocked(lambda: not batch.time_is_up(), lambda: _takes_long(batch, walk.group))
        for number, link in blocked.items():
            walk.counts = merged(walk.counts, self._count_blocked(batch, walk, number, link.table))
            walk.forget(0, number)

    @staticmethod
    def _count_blocked(batch: Batch, walk: Walk, parent: int, table: str) -> dict[str, Any]:
        """Return the counts of a parent that stays because of a row of this table."""
        assert walk.group is not None
        key = key_text(list(walk.group.by_key)[parent])
        since = _blocked_since(batch, table, key)
        of_table: dict[str, Any] = {"rows": 1, "since": since}
        if walk.keys_noted < _MOST_KEYS:
            walk.keys_noted += 1
            of_table["keys"] = {key: since}
        return {BLOCKED: 1, DETAILS: {BLOCKED: {table: of_table}}}

    def _call(self, batch: Batch, walk: Walk) -> None:
        """Call the function for the parents. Skip locked ones, and those for which it failed."""
        group = walk.group
        assert group is not None
        positions = list(group.by_key.values())
        numbers = {self.key_values(each): number for number, each in enumerate(positions)}
        live = [each for number, each in enumerate(positions) if walk.stack[0].rows[number] is not None]
        if not live:
            return
        taken = self.calls.prepare(replace(batch, only=live))
        called = {self.key_values(each) for each in taken.called}
        for key, number in numbers.items():
            if key not in called:
                walk.forget(0, number)
        walk.failures += [failure for _, failure in taken.failures]
        if not taken.complete and group.end != group.front:
            # It was not called for the parents behind this one; the next group begins with them.
            group.end, group.exhausted = taken.position, False

    # -- in the transaction

    def expected(self, batch: Batch, prepared: BatchResult) -> ExpectedChange | None:
        """Return the change of rows without any links to them, or of a full batch of dependents."""
        walk = self._walk(batch)
        chunk = walk.chunk
        if chunk is None or not (chunk.link or (chunk.level and _changes_at_once(walk, chunk))):
            return None
        window = walk.stack[chunk.level]
        parts = _chain(walk, chunk)
        text, values = walk.statements.expected(parts, window, chunk.link, chunk.most)

        def done(first: int, last: int) -> None:
            walk.outcome = ChunkResult(chunk.numbers) if chunk.link is None else ChunkResult(ends=(first, last))

        expected = ChunkResult(chunk.numbers) if chunk.link is None else ChunkResult(ends=(0, 0))
        counts = merged(prepared.counts, _counts_of(self.delete, chunk, window, expected))
        return ExpectedChange(text, values, replace(prepared, unreachable=walk.unreachable, counts=counts), done)

    def apply(self, batch: Batch, prepared: BatchResult) -> BatchResult:  # type: ignore[override]
        """Lock the rows and the chain that they depend on. Change those that still belong to it."""
        walk = self._walk(batch)
        walk.outcome = None
        walk.list_unseen()
        result = prepared if batch.only is None else BatchResult(exhausted=False)
        if walk.chunk is None:
            return result
        chunk = self._part(walk, walk.chunk, batch)
        window = walk.stack[chunk.level]
        read = self._read_parents(walk, chunk) if self.needs_rows() and chunk.level == 0 else {}
        outcome = _change(walk, window, chunk)
        walk.outcome = outcome
        failures = [self._unchanged(window, number) for number in outcome.unchanged]
        rejected = self._reject(batch, walk, chunk.level, outcome.unchanged)
        gone: list[Values] = []
        if read:
            gone = window.keys(outcome.done)
            gone += [of.table.key_in(row) for of, row in outcome.aside if of is window]
        return replace(
            result,
            unreachable=walk.unreachable,
            counts=merged(merged(result.counts, _counts_of(self.delete, chunk, window, outcome)), rejected),
            rows=self.records([read[key] for key in gone if key in read]),
            failures=[*result.failures, *failures],
        )

    def _part(self, walk: Walk, chunk: Chunk, batch: Batch) -> Chunk:
        """Return the rows of a chunk that are in this part of its bisection."""
        if batch.only is None:
            return chunk
        only, window = set(batch.only), walk.stack[chunk.level]
        left = [number for number in chunk.numbers if window.rows[number] is not None]
        numbers = [number for number in left if self._row_position(window, number) in only]
        return replace(chunk, numbers=numbers)

    def _read_parents(self, walk: Walk, chunk: Chunk) -> dict[Values, tuple[Any, ...]]:
        """Return the parents of a chunk by key, as events and log lines need them."""
        assert walk.group is not None
        root, window = walk.statements.root, walk.stack[0]
        keys = window.keys(chunk.numbers)
        aside = [each for unit in chunk.units.values() for each in unit.aside]
        keys += [root.key_in(row) for of, row in aside if of is window]
        positions = [walk.group.by_key[key] for key in keys]
        query = self._selected(with_texts=False).select_extend(*self._known(root)).where(self.is_one_of(positions))
        width = len(root.columns_by(None))
        return {root.key_in(row[-width:]): row for row in CompiledQuery(query).rows()}

    def _known(self, root: CascadeTable) -> list[Any]:
        """Return the columns of the parents' window."""
        table: Any = self.model._meta.table
        columns = ((each, Column(table, each)) for each in root.columns_by(None))
        return [column if root.is_integer(name) else column.cast("text") for name, column in columns]

    def _unchanged(self, window: Window, number: int) -> Failure:
        return Failure(self.describe(self._row_position(window, number)), RowNotChanged(NOT_CHANGED))

    @staticmethod
    def _row_position(window: Window, number: int) -> Position:
        (key,), table = window.keys([number]), window.table
        return _RowPosition((f"{_ROW_OF}{table.name}", table.database, *key))

    def positions(self, batch: Batch, prepared: Any = None) -> list[Position]:
        walk = self._walk(batch)
        walk.list_unseen()
        if walk.chunk is None:
            return []
        window = walk.stack[walk.chunk.level]
        return [self._row_position(window, number) for number in walk.chunk.numbers]

    def after_all(self, batch: Batch, prepared: BatchResult, positions: Sequence[Position]) -> BatchResult:
        return prepared

    def fallback(self, batch: Batch, error: BaseException) -> BatchResult | None:
        """Count the row as failed, and its parent as blocked."""
        walk = self._walk(batch)
        assert batch.only is not None and walk.chunk is not None
        counts = self._reject(batch, walk, walk.chunk.level, self._part(walk, walk.chunk, batch).numbers)
        return BatchResult(counts, failures=[Failure(self.describe(batch.only[0]), error)])

    def _reject(self, batch: Batch, walk: Walk, level: int, numbers: Iterable[int]) -> dict[str, Any]:
        """Note that rows were rejected. Return the counts of their parents."""
        counts: dict[str, Any] = {}
        for number in numbers:
            parent = walk.reject(level, number)
            if parent is not None:
                blocked = self._count_blocked(batch, walk, parent, walk.stack[level].table.name)
                counts = merged(counts, blocked)
        return merged(counts, self._count_last(walk))

    def resumes_at(self, position: Position | None) -> Position | None:
        for walk in self.walks.values():
            if walk.group is not None:
                return walk.group.end
        return position

    # -- after the transaction

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        super().after_commit(batch, result)
        walk = self._walk(batch)
        chunk, outcome, walk.outcome = walk.chunk, walk.outcome, None
        if chunk is not None:
            # What the parts of a bisected batch have left stays in this run.
            walk.settle(chunk, outcome, chunk.numbers if batch.only is None else ())
            walk.give_up_rejected()
        if batch.only is None:
            walk.chunk = None


def _changed_tables(graph: Graph) -> list[tuple[str, str]]:
    """Return database and name of each table whose rows are deleted or changed."""
    changed = [(each.database, each.table) for each in graph.links if each.decision in ("delete", "clear")]
    return list(dict.fromkeys(((graph.database, graph.root), *changed)))


def _takes_long(batch: Batch, group: Group | None) -> bool:
    """Return whether the group has had its share of the run's time, which begins again if it has."""
    assert group is not None
    if batch.spent() - group.began_at <= _SHARE:
        return False
    group.began_at = batch.spent()
    return True


def _blocked_since(batch: Batch, table: str, key: str) -> str:
    """Return since when a parent has been blocked: the time of the first run that found it blocked."""
    for details in batch.details:
        known = details.get(BLOCKED, {}).get(table, {}).get("keys", {}).get(key)
        if known is not None:
            return str(known)
    return batch.now.isoformat()


def _counts_of(delete: Any, chunk: Chunk, window: Window, outcome: ChunkResult) -> dict[str, Any]:
    """Return the counts of a transaction, and those of the dependents by table."""
    changed: list[tuple[Link | None, int]] = [(window.link, len(outcome.done))]
    changed += [(of.link, 1) for of, _ in outcome.aside]
    if outcome.ends is not None:
        changed.append((chunk.link, chunk.most))
    counts: dict[str, int] = {delete.rows_counted_as: 0}
    by_table: dict[str, dict[str, int]] = {}
    for link, number in changed:
        if link is None:
            counts[delete.rows_counted_as] += number
        elif number:
            clears = link.decision == "clear"
            name, kind = (CLEARED_DEPENDENTS, "cleared") if clears else (DELETED_DEPENDENTS, "deleted")
            counts[name] = counts.get(name, 0) + number
            of_table = by_table.setdefault(link.table, {})
            of_table[kind] = of_table.get(kind, 0) + number
    if delete.archive_to is not None:
        counts[ARCHIVED_ROWS] = sum(counts.values())
    return {**counts, DETAILS: {"dependents": by_table}} if by_table else counts


def _change(walk: Walk, window: Window, chunk: Chunk) -> ChunkResult:
    """Lock rows and the chain that they depend on, and change them.

    Rows of another database are changed in a transaction of that database, while this one keeps the parents locked.
    """
    if not chunk.numbers:
        return ChunkResult()
    others = {each.table.database for each in walk.stack[: chunk.level + 1]} - {walk.statements.root.database}
    try:
        with ExitStack() as transactions:
            for name in others:
                transactions.enter_context(handle_of(name).atomic())
            return _change_locked(walk, window, chunk)
    except PeeweeException as error:
        if not others and all(map(is_local, window.table.links)) or not is_unavailable(error):
            raise
        walk.unreachable = error
        return ChunkResult(gone={walk.root_of((chunk.level, number)) for number in chunk.numbers})


def _change_locked(walk: Walk, window: Window, chunk: Chunk) -> ChunkResult:
    """Lock rows and their chain by one statement, and change them by further ones, which see all earlier commits."""
    locked, gone = _lock(walk, window, chunk)
    for link in () if window.clears else window.table.links:
        if locked and not is_local(link):
            bound = {locked[place - 1] for place in walk.statements.having(link, window, locked)}
            locked = [number for number in locked if number not in bound]
    if window.table.circular and not window.clears:
        outcome = _delete_together(walk, window, chunk, locked)
    else:
        places = walk.statements.change_free(window, locked) if locked else []
        outcome = ChunkResult([locked[place - 1] for place in places])
        outcome.unchanged = _unchanged(walk, window, sorted(set(locked) - set(outcome.done)))
    outcome.gone = gone
    return outcome


def _changes_at_once(walk: Walk, chunk: Chunk) -> bool:
    """Return whether one statement can lock and change the rows of a chunk. Nothing depends on them then."""
    chain, window = walk.stack[: chunk.level + 1], walk.stack[chunk.level]
    own = walk.statements.root.database
    is_flat = not chunk.units and all(not each.is_tree and each.table.database == own for each in chain)
    is_leaf = window.clears or not window.table.links
    return is_flat and is_leaf and walk.statements.locks_and_changes(window.table, window.link)


def _chain(walk: Walk, chunk: Chunk) -> list[tuple[Any, int]]:
    """Return queries to lock the rows of a chunk, after those that they depend on by level, with their numbers of rows.

    Rows of which only dependents are changed get the same lock as those that they depend on.
    """
    chain = {**walk.chain(chunk.level, chunk.numbers), chunk.level: chunk.numbers}
    parts = []
    for level in range(chunk.level + 1):
        numbers = chain[level]
        of, is_own = walk.stack[level], level == chunk.level
        following = chunk.link if is_own else walk.stack[level + 1].link
        own = of.clearing.columns if of.clearing else ()
        sql = walk.statements.locked(
            of,
            of.values(numbers),
            "UPDATE" if is_own and chunk.link is None else "SHARE",
            below=f"l{level - 1}" if level else "",
            above=following.parent_columns if following else own,
        )
        parts.append((sql, len(numbers)))
    return parts


def _lock(walk: Walk, window: Window, chunk: Chunk) -> tuple[list[int], set[tuple[int, int]]]:
    """Lock rows and their chain. Return the rows that still belong to it, and the other rows of the chain."""
    chain = walk.chain(chunk.level, chunk.numbers)
    levels = [(level, walk.stack[level], numbers) for level, numbers in sorted(chain.items())]
    asides = [each for unit in chunk.units.values() for each in unit.aside]
    parts = [(of, of.values(numbers), "SHARE") for _, of, numbers in levels]
    parts.append((window, window.values(chunk.numbers), "UPDATE"))
    parts += [(of, [row], "UPDATE") for of, row in asides]
    found: list[list[int]] = []
    for name, of_database in groupby(parts, lambda part: part[0].table.database):
        queries = [(walk.statements.locked(of, rows, lock), len(rows)) for of, rows, lock in of_database]
        found += walk.statements.lock(name, queries)
    fine: set[tuple[int, int]] = set()
    gone: set[tuple[int, int]] = set()
    for (level, _, numbers), places in zip(levels, found, strict=False):
        kept = {numbers[place - 1] for place in places}
        for number in numbers:
            owner = walk.owner((level, number))
            is_fine = number in kept and (owner is None or owner in fine)
            (fine if is_fine else gone).add((level, number))
    own = {chunk.numbers[place - 1] for place in found[len(levels)]}
    lost = {id(row) for (_, row), places in zip(asides, found[len(levels) + 1 :], strict=True) if not places}
    locked = []
    for number in chunk.numbers:
        owner, unit = walk.owner((chunk.level, number)), chunk.units.get(number)
        is_whole = unit is None or not any(id(row) in lost for _, row in unit.aside)
        if number in own and is_whole and (owner is None or owner in fine):
            locked.append(number)
            fine.add((chunk.level, number))
    return locked, gone


def _delete_together(walk: Walk, window: Window, chunk: Chunk, locked: Sequence[int]) -> ChunkResult:
    """Delete rows that may depend on each other in one statement, at the end of which PostgreSQL checks them.

    Raises:
      RowNotChanged: PostgreSQL left a row as it was.
    """
    ids = list(locked)
    while ids:
        tables: dict[tuple[str, str], dict[Values, int]] = {window.table.id: {}}
        for number in ids:
            tables[window.table.id].update(dict.fromkeys(window.keys([number]), number))
            for of, row in chunk.units[number].aside if number in chunk.units else ():
                tables.setdefault(of.table.id, {})[of.table.key_in(row)] = number
        keys = {name: list(each) for name, each in tables.items()}
        bound: set[int] = set()
        for name, numbers in tables.items():
            free = walk.statements.free(walk.statements.table(*reversed(name)), keys[name], keys)
            found = {keys[name][place - 1] for place in free}
            bound.update(number for key, number in numbers.items() if key not in found)
        if not bound:
            asides = [each for number in ids if number in chunk.units for each in chunk.units[number].aside]
            ordered = walk.topmost_first((name, key) for name, each in keys.items() for key in each)
            keys = {name: [key for at, key in ordered if at == name] for name in keys}
            if walk.statements.delete_together(keys) < sum(map(len, keys.values())):
                raise RowNotChanged(NOT_CHANGED)
            return ChunkResult(ids, aside=asides)
        # The rows that a remaining row depends on have to remain as well.
        for number in reversed(ids):
            owner = walk.owner((chunk.level, number))
            if number in bound and owner is not None and owner[0] == chunk.level:
                bound.add(owner[1])
        ids = [number for number in ids if number not in bound]
    return ChunkResult()


def _unchanged(walk: Walk, window: Window, numbers: Sequence[int]) -> list[int]:
    """Return which of the rows that were not changed have no dependent, so that something else prevents it."""
    if not numbers:
        return []
    if window.clears:
        return list(numbers)
    places = walk.statements.free(window.table, window.keys(numbers), {})
    return [numbers[place - 1] for place in places]
