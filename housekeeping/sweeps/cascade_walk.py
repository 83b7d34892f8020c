"""Walk of a cascade through its graph: a stack of windows of rows, each depending on rows of the window below.

Only rows that were found and not yet changed are in memory. `Walk.next_chunk` looks for dependents of the top window
until it has rows without any, and returns some of these; `Walk.settle` applies the outcome of their transaction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.logs import logger as named_logger
from housekeeping.database.errors import is_unavailable
from housekeeping.sweeps.cascade_statements import Pending, Statements, Values, Window, is_local
from housekeeping.sweeps.dependents import Link
from housekeeping.sweeps.stage import Failure, Position

logger = named_logger(__name__)

#: Rows of a window. So the entries of an index that deleted rows leave behind are not read again for each batch.
WINDOW: Final = 10_000
#: Rows of a table that a group leaves out of its queries, such as locked ones, until it gives up their parents.
_MOST_LEFT: Final = 1000
#: Rejected dependents of a parent after which the run gives it up: while they fail, no run can delete it.
_MOST_REJECTED: Final = 100
#: Rows to take for the dependents of a batch, in proportion to those that should suffice.
_MARGIN: Final = 1.2
#: Passes over the rows of a batch to order them. Rows that are still out of order after that form a circle.
_MOST_PASSES: Final = 50

#: Level of a window in the stack, and the number of a row in it.
RowPlace = tuple[int, int]
_TableId = tuple[str, str]
#: Table and key.
_RowId = tuple[_TableId, Values]


@dataclass(slots=True)
class Unit:
    """Rows that depend on each other in a circle, so that one statement deletes all of them.

    The walk reaches the row that is lowest on the stack last, and deletes them then. It sets the others aside before.

    Attributes:
      places: The rows on the stack.
      aside: The rows that were set aside, with their window.
    """

    places: set[RowPlace]
    aside: list[tuple[Window, Values]] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """Rows of the top window without remaining dependents, or rows whose dependents are changed without being read.

    Attributes:
      numbers: Their numbers, in the order of the window.
      units: The circles among them, by number.
      link: The link of the dependents to change unseen; None to change the rows themselves.
      most: The number of these dependents.
    """

    level: int
    numbers: list[int]
    units: dict[int, Unit] = field(default_factory=dict)
    link: Link | None = None
    most: int = 0


@dataclass(slots=True)
class ChunkResult:
    """What a transaction did to the rows of a chunk, valid once it has committed.

    Attributes:
      done: Numbers of the rows that were deleted or cleared.
      ends: Positions in the chunk of the first and the last row whose dependents were changed without being read.
      aside: Further rows of the circles that these rows belong to, which were deleted with them.
      unchanged: Numbers of the rows that PostgreSQL left as they were, without an error.
      gone: Rows on which the chunk depends and that are locked, deleted or no longer stale, or depend on other rows.
    """

    done: list[int] = field(default_factory=list)
    ends: tuple[int, int] | None = None
    aside: list[tuple[Window, Values]] = field(default_factory=list)
    unchanged: list[int] = field(default_factory=list)
    gone: set[RowPlace] = field(default_factory=set)


@dataclass(slots=True)
class Group:
    """Stale parents that are processed together.

    Attributes:
      front: Where the stage was before the group. The cursor stays there until the group is done.
      end, exhausted: Where it is after the group, and whether no parent is left there.
      by_key: Position of each parent, by its key.
      began_at: The share of the run's time at which the group began, or postponed a parent.
      is_checked: Whether its parents with a dependent that is kept have been removed.
      rejected: Parent -> keys of the rejected rows that depend on it, with their tables, and its own.
    """

    front: Position | None
    end: Position | None
    exhausted: bool
    by_key: dict[Values, Position]
    began_at: float
    is_checked: bool = False
    rejected: dict[int, set[_RowId]] = field(default_factory=dict)


def key_text(key: Values) -> str:
    """Return a key as the ledger stores it."""
    return ",".join(map(str, key))


class Walk:
    """The walk of one run.

    Attributes:
      stack: The parents, and above them what was found to depend on the rows below.
      group: The parents; None between two groups.
      postponed: Parents that are continued after all others, by key.
      deferred: Parents that begin after all others, because earlier runs have postponed them, or because the search for
        their kept dependents took long.
      last: Keys of parents that the next run processes after all others: those that took long, and those with rejected
        dependents.
      counts, failures: What to record with the next commit, besides the changes of its batch.
      last_noted: Those of `last` that the ledger has.
      sees_all: Whether the run has begun at the front of the stage.
      keys_noted: Number of keys of blocked parents that the run has noted.
      unreachable: The error of a database that could not be reached.
      chunk: What the next transaction changes; None if it changes nothing.
      outcome: What the open transaction has done.
    """

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.stack: list[Window] = []
        self.group: Group | None = None
        self.postponed: dict[Values, Position] = {}
        self.deferred: dict[Values, Position] = {}
        self.last: dict[str, None] = {}
        #: Those that this run has found to be still there.
        self._still_last: set[str] = set()
        self.counts: dict[str, Any] = {}
        self.failures: list[Failure] = []
        self.last_noted: list[str] = []
        self.sees_all = True
        self.keys_noted = 0
        self.unreachable: BaseException | None = None
        self.chunk: Chunk | None = None
        self.outcome: ChunkResult | None = None
        #: Rows of circular tables that are on the stack or were set aside.
        self._places: dict[_TableId, dict[Values, RowPlace | Unit]] = {}
        self._units: dict[RowPlace, Unit] = {}
        #: Rows of circular tables -> the rows that they were found to depend on.
        self._above: dict[_RowId, list[_RowId]] = {}
        #: Rows that stay in this run; queries leave them out.
        self._left: dict[_TableId, dict[Values, None]] = {}
        #: The last known number of dependents of a row that has some, by link.
        self._dependents_per_row: dict[Link, float] = {}
        #: Rows that a link has already reached and that still have the reference; queries leave them out, too.
        self._known: dict[Link, dict[Values, None]] = {}

    def begin(self, group: Group, rows: Sequence[Values]) -> None:
        """Begin with these parents."""
        root = self.statements.root
        self.group = group
        pending = [Pending(link) for link in root.follows()]
        self.stack = [Window(root, None, root.columns_by(None), list(rows), [0] * len(rows), pending)]
        self._places, self._units, self._above, self._left, self._known = {}, {}, {}, {}, {}
        if root.circular:
            self._places[root.id] = {root.key_in(row): (0, number) for number, row in enumerate(rows)}

    def end(self) -> None:
        """End the group."""
        for key in self.group.by_key if self.group is not None and self.last else ():
            if key_text(key) not in self._still_last:
                self.last.pop(key_text(key), None)
        self.group, self.stack = None, []

    def defer(self) -> None:
        """Remove the parents that earlier runs have postponed from the group."""
        assert self.group is not None
        for number, key in enumerate(self.group.by_key if self.last else ()):
            if key_text(key) in self.last:
                self._postpone(number, self.deferred)

    def take_last(self) -> dict[Values, Position]:
        """Return the next parents to process after all others, and forget them."""
        found = self.deferred or self.postponed
        self._still_last.difference_update(map(key_text, found))
        if self.deferred:
            self.deferred = {}
        else:
            self.postponed = {}
        return found

    def forget_missing(self) -> None:
        """Forget which parents to process last, except those that this run has found. Use it after a complete run."""
        self.last = {key: None for key in self.last if key in self._still_last}

    def _process_last(self, parent: Values) -> None:
        self.last[key_text(parent)] = None
        self._still_last.add(key_text(parent))

    def next_chunk(self, size: int, may_continue: Callable[[], bool]) -> Chunk | None:
        """Return the next rows to change, walking down as far as needed; None if the group has no more.

        Raises:
          TimeIsUp: The run must end.
        """
        while self.stack:
            window = self.stack[-1]
            if window.pending:
                if not may_continue():
                    raise TimeIsUp
                chunk = self._unseen_below(window, window.pending[0], size)
                if chunk is not None:
                    return chunk
                continue
            chunk = self._chunk(window, size)
            if chunk is not None:
                return chunk
            self.stack.pop()
        return None

    def is_last(self, chunk: Chunk) -> bool:
        """Return whether the group is done once this chunk is."""
        rows = self.stack[0].rows
        return chunk.level == 0 and chunk.link is None and sum(row is not None for row in rows) <= len(chunk.numbers)

    def blocked(self, may_continue: Callable[[], bool], takes_long: Callable[[], bool]) -> dict[int, Link] | None:
        """Return the parents with a dependent that is kept, at any depth, and the link to it. Changes no row.

        If it takes long, defer the parent with the most dependents so far and return None. A last one is not deferred.

        Raises:
          TimeIsUp: The run must end.
        """
        leading, root, group = self.statements.leading_to_kept(), self.stack[0], self.group
        assert group is not None
        # Without the parents that were deferred.
        live = [number for number, row in enumerate(root.rows) if row is not None]
        parents = Window(root.table, None, root.columns, [root.rows[number] for number in live], [], [])
        may_defer = len(live) > 1 or not group.exhausted
        found, looked_at, seen = dict[int, Link](), Counter[int](), dict[_TableId, set[Values]]()
        # No recursion: a tree of rows may be deeper than Python's stack.
        looking = [self._look_for_kept(parents, live, leading, found, seen)]
        try:
            while looking:
                page = next(looking[-1], None)
                if page is None:
                    looking.pop()
                    continue
                looking.append(self._look_for_kept(*page, leading, found, seen))
                looked_at.update(page[1])
                if not may_continue():
                    raise TimeIsUp
                if may_defer and takes_long():
                    ((largest, _),) = looked_at.most_common(1)
                    self._postpone(largest, self.deferred)
                    return None
        finally:
            while looking:  # each has a savepoint within that of the one before
                looking.pop().close()
        group.is_checked = True
        return found

    def _look_for_kept(
        self,
        window: Window,
        roots: Sequence[int],
        leading: Sequence[Link],
        found: dict[int, Link],
        seen: dict[_TableId, set[Values]],
    ) -> Generator[tuple[Window, list[int]], None, None]:
        """Add the parents of rows with kept dependents to `roots`. Yield the rows to look below, with their parents."""
        for link in window.table.links:
            live = [number for number, root in enumerate(roots) if root not in found]
            if link not in leading or not live:
                continue
            if link.decision == "keep":
                for place in self.statements.having(link, window, live):
                    found.setdefault(roots[live[place - 1]], link)
                continue
            table = self.statements.of_link(link)
            for page in self.statements.pages(link, window, live, WINDOW):
                rows = [(roots[live[place - 1]], tuple(values)) for place, *values in page]
                if table.circular:
                    known = seen.setdefault(table.id, set())
                    rows = [each for each in rows if table.key_in(each[1]) not in known]
                    known.update(table.key_in(row) for _, row in rows)
                below = Window(table, link, table.columns_by(link), [row for _, row in rows], [], [])
                yield below, [root for root, _ in rows]

    # -- down

    def _unseen_below(self, window: Window, pending: Pending, size: int) -> Chunk | None:
        """Return rows with a full batch of dependents by a link, which can be changed unseen. Otherwise look below."""
        link, numbers = pending.link, pending.numbers
        per_row = self._dependents_per_row.get(link)
        if not pending.has_dependents:
            live = [n for n in (range(len(window.rows)) if numbers is None else numbers) if window.rows[n] is not None]
            own = self.statements.root.database
            is_flat = not self._units and all(not each.is_tree and each.table.database == own for each in self.stack)
            is_unseen = is_flat and not pending.is_listed and self.statements.changes_unseen(link)
            if per_row is None or not is_unseen:
                # The first batch tells how many dependents a row has.
                self._look_below(window, pending, live, size if is_unseen else WINDOW)
                return None
            places = self.statements.having(link, window, live, with_held=False) if live else []
            numbers, pending.has_dependents = [live[place - 1] for place in sorted(places)], True
        assert numbers is not None and per_row is not None
        # Some more, as they may have fewer dependents than the last ones.
        rows = math.ceil(size / per_row * _MARGIN) + 1
        first = list(islice((number for number in numbers if window.rows[number] is not None), rows))
        if not first:
            window.pending.remove(pending)
            return None
        pending.numbers = [*first, *numbers[numbers.index(first[-1]) + 1 :]]
        if len(first) < rows:
            pending.is_listed, pending.has_dependents = True, False
            return None
        return Chunk(len(self.stack) - 1, first, link=link, most=size)

    def _look_below(self, window: Window, pending: Pending, live: list[int], most: int = WINDOW) -> None:
        """Look for dependents of these rows by a link, and push up to so many as a window."""
        link, below = pending.link, len(self.stack) - 1
        if not live:
            window.pending.remove(pending)
            return
        table = self.statements.of_link(link)
        known = self._known.setdefault(link, {})
        without = [*self._left.get(table.id, ()), *known]
        try:
            found = self.statements.find(link, window, live, most, without=without)
        except PeeweeException as error:
            if is_local(link) or not is_unavailable(error):
                raise
            # The run ends with the error, once it is done with the other parents.
            self.unreachable = error
            self._drop({self.root_of((below, number)) for number in live})
            return
        is_whole, key = len(found) < most, len(table.key)
        recurses = self.statements.recurses(link)
        pushed = Window(table, link, table.columns_by(link), [], [], [], is_tree=recurses)
        level, hits, generations = len(self.stack), list[tuple[int, int, Any]](), list[int]()
        places = self._places.setdefault(table.id, {}) if table.circular and not pushed.clears else None
        if places is None:
            if link.on_delete is None:  # a Reference may name columns that are not unique
                found = list({tuple(row[1 : 1 + key]): row for row in found}.values())
            pushed.rows = [row[1:] for row in found]
            pushed.owners = [live[row[0] - 1] for row in found]
            if found:
                self._dependents_per_row.setdefault(link, len(found) / len(set(pushed.owners)))
            found = []
        for place, *values in found:
            assert places is not None
            owner, generation = live[place - 1], 1
            if recurses:
                hangs_from, values = tuple(values[:key]), values[key:]
                if hangs_from[0] is not None:
                    at = places.get(hangs_from)
                    if not isinstance(at, tuple) or at[0] != level:
                        continue  # it is found from the row itself
                    owner, generation = -1 - at[1], generations[at[1]] + 1
            row = tuple(values)
            above = (window, window.rows[owner]) if owner >= 0 else (pushed, pushed.rows[-1 - owner])
            self._above.setdefault((table.id, row[:key]), []).append(
                (above[0].table.id, above[0].table.key_in(above[1] or ()))
            )
            at = places.get(row[:key])
            if at is not None:
                if not (isinstance(at, tuple) and at[0] == level and pushed.owners[at[1]] == owner):
                    hits.append((owner, generation, at))
                    known[row[:key]] = None
                continue
            places[row[:key]] = (level, len(pushed.rows))
            pushed.rows.append(row)
            pushed.owners.append(owner)
            generations.append(generation)
        last = max(generations, default=1)
        if recurses and not is_whole and last > 1:
            # The last generation was cut off.
            while generations and generations[-1] == last:
                generations.pop()
                dropped = pushed.rows.pop()
                pushed.owners.pop()
                assert places is not None and dropped is not None
                del places[dropped[:key]]
            hits = [each for each in hits if each[1] < last]
        following = [
            Pending(each) for each in (() if pushed.clears else table.follows()) if not (recurses and each is link)
        ]
        if recurses and not is_whole:
            edge = [n for n, each in enumerate(generations) if each == last - 1] if last > 1 else None
            following.insert(0, Pending(link, edge))
        if is_whole or last > 1 or not (pushed.rows or hits):
            window.pending.remove(pending)
        if pushed.rows:
            pushed.pending = following
            self.stack.append(pushed)
        for owner, _, at in hits:
            self._join((below, owner) if owner >= 0 else (level, -1 - owner), at)

    def owner(self, place: RowPlace) -> RowPlace | None:
        """Return the row that a row depends on; None for a parent."""
        level, number = place
        if level == 0:
            return None
        owner = self.stack[level].owners[number]
        return (level, -1 - owner) if owner < 0 else (level - 1, owner)

    def _join(self, place: RowPlace, other: RowPlace | Unit) -> None:
        """Join two rows, and the rows between them, into one unit, because they can only be deleted together."""
        of_other = other if isinstance(other, Unit) else self._units.get(other)
        unit = self._units.get(place) or of_other or Unit(set())
        lowest = min(unit.places, default=None)
        waiting: list[RowPlace | Unit] = [place, other]
        while waiting:
            each = waiting.pop()
            known = each if isinstance(each, Unit) else self._units.get(each)
            if known is unit:
                continue
            if known is not None:
                unit.places |= known.places
                unit.aside += known.aside
                self._units.update(dict.fromkeys(known.places, unit))
                for window, values in known.aside:
                    self._places[window.table.id][window.table.key_in(values)] = unit
                added = unit.places  # its rows have had another lowest one
            else:
                assert isinstance(each, tuple)
                unit.places.add(each)
                self._units[each] = unit
                added = {each}
            least = min(added, default=None)
            if least is not None and (lowest is None or least < lowest):
                lowest, added = least, unit.places
            for member in added:
                owner = self.owner(member)
                if owner is not None and lowest is not None and owner > lowest and owner not in unit.places:
                    waiting.append(owner)

    # -- up

    def _chunk(self, window: Window, size: int) -> Chunk | None:
        """Return rows from the end of the window, where the last generation of a tree is."""
        level = len(self.stack) - 1
        numbers: list[int] = []
        units: dict[int, Unit] = {}
        owners, taken = set[RowPlace | None](), 0
        while window.rows and window.rows[-1] is None:
            window.rows.pop()
        if not self._units and None not in window.rows[-size:]:  # most windows
            numbers = list(range(max(0, len(window.rows) - size), len(window.rows)))
            return Chunk(level, numbers, {}) if numbers else None
        for number in reversed(range(len(window.rows))):
            row = window.rows[number]
            if row is None:
                continue
            unit = self._units.get((level, number))
            if unit is not None:
                if min(unit.places) != (level, number):
                    if (level, number) in owners:  # it is locked with the rows that depend on it, and set aside then
                        break
                    self._set_aside(unit, level, number)
                    continue
                units[number] = unit
            if taken and taken + 1 + (len(unit.aside) if unit else 0) > size:
                units.pop(number, None)
                break
            taken += 1 + (len(unit.aside) if unit else 0)
            numbers.append(number)
            owners.add(self.owner((level, number)))
            if taken >= size:
                break
        return Chunk(level, numbers[::-1], units) if numbers else None

    def _set_aside(self, unit: Unit, level: int, number: int) -> None:
        window = self.stack[level]
        row = window.rows[number]
        assert row is not None
        window.rows[number] = None
        unit.aside.append((window, row))
        unit.places.discard((level, number))
        self._units.pop((level, number), None)
        self._places[window.table.id][window.table.key_in(row)] = unit

    def forget(self, level: int, number: int) -> None:
        """Remove a row from its window and from all other records of the walk."""
        window = self.stack[level]
        row = window.rows[number]
        if row is None:
            return
        window.rows[number] = None
        places = self._places.get(window.table.id)
        if places is not None and not window.clears:
            places.pop(window.table.key_in(row), None)
            self._above.pop((window.table.id, window.table.key_in(row)), None)
        unit = self._units.pop((level, number), None)
        if unit is not None:
            unit.places.discard((level, number))

    def chain(self, level: int, numbers: Iterable[int]) -> dict[int, list[int]]:
        """Return the rows that these rows depend on, by level, without the rows themselves."""
        found: dict[int, list[int]] = {}
        own, current = set(numbers), set(numbers)
        for at in range(level, 0, -1):
            owners = self.stack[at].owners
            below: set[int] = set()
            waiting = current
            while waiting:
                upper = {owners[number] for number in waiting}
                below.update(each for each in upper if each >= 0)
                waiting = {-1 - each for each in upper if each < 0} - current
                current |= waiting
            others = current - own if at == level else current
            if others:
                found[at] = sorted(others)
            current = below
        if level > 0:
            found[0] = sorted(current)
        return found

    def topmost_first(self, rows: Iterable[_RowId]) -> list[_RowId]:
        """Return rows of circular tables, each after those of them that it depends on, except in circles."""
        depths = dict.fromkeys(rows, 0)
        for _ in range(_MOST_PASSES):  # the rows come almost in this order; circles have no end
            is_changed = False
            for row in depths:
                depth = max((depths[each] + 1 for each in self._above.get(row, ()) if each in depths), default=0)
                if depth > depths[row]:
                    depths[row], is_changed = depth, True
            if not is_changed:
                break
        return sorted(depths, key=lambda row: depths[row])

    def settle(self, chunk: Chunk, outcome: ChunkResult | None, numbers: Iterable[int]) -> None:
        """Apply the outcome of a transaction, and skip the other rows of the chunk for the rest of the run."""
        if chunk.link is not None:
            self._settle_unseen(chunk, outcome.ends if outcome else None)
            return
        window = self.stack[chunk.level]
        done = outcome.done if outcome else ()
        for number in done:
            if window.table.circular:
                self.forget(chunk.level, number)
            else:
                window.rows[number] = None
        if outcome and outcome.gone:
            self._drop(set(outcome.gone))
        for number in numbers:
            if window.rows[number] is not None:
                self._leave(chunk.level, number)

    def list_unseen(self) -> None:
        """Read the dependents that the chunk would change unseen, and make some of them the chunk; None without any."""
        chunk = self.chunk
        if chunk is None or chunk.link is None:
            return
        window, numbers = self.stack[chunk.level], chunk.numbers
        window.pending[0].numbers = (window.pending[0].numbers or [])[len(numbers) :]
        window.pending.insert(0, Pending(chunk.link, numbers, is_listed=True))
        self._look_below(window, window.pending[0], [number for number in numbers if window.rows[number] is not None])
        self.chunk = self._chunk(self.stack[-1], chunk.most) if len(self.stack) > chunk.level + 1 else None

    def _settle_unseen(self, chunk: Chunk, ends: tuple[int, int] | None) -> None:
        """Continue behind the rows whose dependents are gone. Have the dependents read where that is not certain."""
        assert chunk.link is not None
        pending = self.stack[chunk.level].pending
        pending[0].numbers = (pending[0].numbers or [])[len(chunk.numbers) :]
        if ends is None:  # the answer was lost
            pending.insert(0, Pending(chunk.link, chunk.numbers, is_listed=True))
            return
        first, last = ends
        self._dependents_per_row[chunk.link] = chunk.most / (last - first + 1)
        last_row, *others = chunk.numbers[last - 1 :]
        if first == last and pending[0].last_row == last_row:
            # It has so many dependents that changed ones would be read again with each batch.
            pending[0].numbers = [*others, *pending[0].numbers]
            pending.insert(0, Pending(chunk.link, [last_row], is_listed=True))
        else:
            pending[0].numbers, pending[0].last_row = [last_row, *others, *pending[0].numbers], last_row

    def _leave(self, level: int, number: int) -> None:
        """Skip a row for the rest of the run. The rows that it still depends on stay, too."""
        window = self.stack[level]
        left = self._left.setdefault(window.table.id, {})
        left.update(dict.fromkeys(window.keys([number])))
        if len(left) > _MOST_LEFT and level > 0:
            self._drop({self.root_of((level, number))})
        else:
            self.forget(level, number)

    def root_of(self, place: RowPlace) -> RowPlace:
        while (owner := self.owner(place)) is not None:
            place = owner
        return place

    def _drop(self, dropped: set[RowPlace]) -> None:
        """Remove rows, and all that depend on them, from the stack."""
        for level in range(min(dropped)[0], len(self.stack)):
            window = self.stack[level]
            here = {number for at, number in dropped if at == level}
            for number in range(len(window.rows)):
                if number in here or self.owner((level, number)) in dropped:
                    dropped.add((level, number))
                    self.forget(level, number)

    def postpone_largest(self) -> None:
        """Remove the parent with the most rows in the top window from the group, to process it last.

        One with rejected rows is not continued in this run, which would only try them again.
        """
        group, window, level = self.group, self.stack[-1], len(self.stack) - 1
        assert group is not None
        roots: dict[int, int] = {}
        for number, row in enumerate(window.rows):
            if row is not None:
                _, root = self.root_of((level, number))
                roots[root] = roots.get(root, 0) + 1
        is_only_one = sum(row is not None for row in self.stack[0].rows) < 2
        if not roots or (is_only_one and group.exhausted and not (self.deferred or self.postponed)):
            return
        root = max(roots, key=lambda each: roots[each])
        logger.info("A parent is continued after the others", dependents=roots[root])
        self._postpone(root, self.postponed)

    def _postpone(self, root: int, later: dict[Values, Position]) -> None:
        """Remove a parent from the group, to process it last."""
        assert self.group is not None
        key, position = list(self.group.by_key.items())[root]
        self._process_last(key)
        if root not in self.group.rejected:
            later[key] = position
        self._drop({(0, root)})

    def reject(self, level: int, number: int) -> int | None:
        """Note that a row was rejected. Return its parent if no other row of this parent was rejected before."""
        assert self.group is not None
        _, root = self.root_of((level, number))
        is_first = root not in self.group.rejected
        (key,) = self.stack[level].keys([number])
        self.group.rejected.setdefault(root, set()).add((self.stack[level].table.id, key))
        self._process_last(list(self.group.by_key)[root])
        return root if is_first and level > 0 else None

    def give_up_rejected(self) -> None:
        """Skip the parents with many rejected rows for the rest of the run."""
        rejected = self.group.rejected if self.group is not None else {}
        many = {root for root, rows in rejected.items() if len(rows) >= _MOST_REJECTED}
        if dropped := {(0, root) for root, row in enumerate(self.stack[0].rows) if root in many and row is not None}:
            self._drop(dropped)


class TimeIsUp(Exception):
    """The run must end before the next chunk is known."""
