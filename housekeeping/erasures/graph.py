"""Tables that reach a subject, at any depth, with the decision about each link; refused unless all are decided.

`read_reach` reads the graph of cascades (`sweeps.dependents`). A cascade ends at rows that it keeps; here rows that are
kept lead on to their own dependents. Links that lead back, towards the subject, do not: replies to a comment that is
kept are not the subject's. `cut_links` finds sweeps that cut the links to rows of the subject, and
`stored_views` materialized views with copies of its rows.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from peewee import Model, PeeweeException

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DeclarationError, DependentsRefused
from housekeeping.core.logs import counted
from housekeeping.database.catalog import TableFacts, escaped, quoted_name, read_table, sql_name
from housekeeping.database.connection import database
from housekeeping.database.errors import Kind, is_unavailable, kind_of
from housekeeping.ledger.table_sizes import read_named
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.cascade import CascadeStage
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.dependents import Graph, GraphReader, Link, NeededRights, names_of, read_graph, without_spaces
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Stage
from housekeeping.sweeps.subjects import Keep, Subject, TableDecision
from housekeeping.sweeps.validate_tables import recorded, updated_columns

#: A table: names of its database and its own.
TableName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Branch:
    """A link that leads to the subject, and what becomes of the rows by it.

    Attributes:
      reason: Why the rows are kept; None if they are deleted.
      values: The new values of columns, as PostgreSQL writes them; empty if the rows are deleted, or kept as they are.
      leads_on: Whether what depends on the rows is erased as well.
      leads_back: Whether it is a link of a table to itself, or to a table that depends on it.
      distance: Number of links from the rows that it refers to until the subject.
      types: Column -> type of each column of the table.
    """

    link: Link
    reason: str | None
    values: Mapping[str, str | None]
    leads_on: bool
    leads_back: bool
    types: Mapping[str, str] = field(repr=False)
    distance: int = 0

    @property
    def deletes(self) -> bool:
        return self.reason is None

    @property
    def table(self) -> TableName:
        return self.link.database, self.link.table

    @property
    def parent(self) -> TableName:
        return self.link.parent_database, self.link.parent

    @property
    def is_local(self) -> bool:
        """Whether both tables are in one database."""
        return self.link.database == self.link.parent_database

    @property
    def releases(self) -> bool:
        """Whether the new values end the reference."""
        return any(each in self.values for each in self.link.columns)

    @property
    def owns(self) -> bool:
        """Whether the rows are deleted, or lose more than the reference."""
        return self.deletes or not set(self.values) <= set(self.link.columns)


@dataclass(frozen=True, slots=True)
class Reach:
    """The tables that reach a subject.

    Attributes:
      branches: All links that are decided, nearest first.
      root: The subject's table.
      rights: The rights on each table that erasures and exports need.
    """

    subject: Subject
    root: TableName
    branches: tuple[Branch, ...]
    _graph: Graph
    rights: Mapping[TableName, Sequence[str]] = field(default_factory=dict)

    def below(self, table: TableName) -> list[Branch]:
        """Return the links to rows of a table."""
        return [each for each in self.branches if each.parent == table]

    def into(self, table: TableName) -> list[Branch]:
        """Return the links by which rows of a table lead on, without those that lead back."""
        return [each for each in self.branches if each.table == table and each.leads_on and not each.leads_back]

    def trees_of(self, table: TableName) -> list[Branch]:
        """Return the links of a table to itself by which rows are deleted."""
        return [each for each in self.below(table) if each.table == table and each.deletes]

    def model_of(self, table: TableName) -> type[Model]:
        """Return a model of a table; see `Graph.model_of`."""
        return self._graph.model_of(table[1], table[0])

    def cascade_of(self, table: TableName) -> Graph:
        """Return the graph of the rows that are deleted with rows of a table of the same database.

        A row that is kept, or that another database has, prevents the deletion as long as it refers to a deleted one.
        By then it has been changed so that it does not.
        """
        links, seen, waiting = list[Link](), {table}, deque([table])
        while waiting:
            for branch in self.below(waiting.popleft()):
                if branch.deletes and branch.is_local:
                    links.append(replace(branch.link, decision="delete"))
                    if branch.table not in seen:
                        seen.add(branch.table)
                        waiting.append(branch.table)
                elif branch.deletes or branch.releases:
                    links.append(replace(branch.link, decision="keep"))
        return Graph(table[1], tuple(links), table[0], 0, self.model_of(table))

    def kept_by(self, table: TableName) -> list[Branch]:
        """Return the links to rows of a table that belong to the subject and are kept unchanged."""
        kept = [each for each in self.branches if each.table == table and not (each.deletes or each.values)]
        return [each for each in kept if not each.leads_back]

    def nearer_owners(self, branch: Branch) -> list[Branch]:
        """Return the links that lead from the same table to the subject in fewer steps, and whose rows are its own."""
        own = [each for each in self.branches if each.table == branch.table and each.owns]
        return [each for each in own if each.distance < branch.distance]

    def steps(self) -> Iterator[Branch]:
        """Yield the links whose rows are changed, or deleted by themselves, each after those that depend on them.

        Rows that are deleted because of a deleted row of the same database belong to the cascade of that one.
        """
        visited: set[TableName] = set()

        def visit(table: TableName) -> Iterator[Branch]:
            visited.add(table)
            for branch in self.below(table):
                if branch.table not in visited and branch.leads_on:
                    yield from visit(branch.table)
            for branch in self.below(table):
                # What a Reference leads to may be written, or left, after the subject's row was deleted.
                is_lasting = table == self.root and branch.link.on_delete is None
                is_of_cascade = branch.deletes and branch.is_local and self.is_deleted(table) and not is_lasting
                if branch.values or (branch.deletes and not is_of_cascade):
                    yield branch

        yield from visit(self.root)

    def is_deleted(self, table: TableName) -> bool:
        """Return whether every row of a table that belongs to the subject is deleted."""
        return table == self.root or all(each.deletes for each in self.branches if each.table == table)

    def may_be_deleted(self, table: TableName) -> bool:
        """Return whether rows of a table are deleted."""
        return table == self.root or any(each.deletes for each in self.branches if each.table == table)

    def may_be_changed(self, table: TableName) -> bool:
        """Return whether rows of a table are deleted, or get new values."""
        return self.may_be_deleted(table) or any(each.values for each in self.branches if each.table == table)

    @property
    def tables(self) -> list[TableName]:
        """All tables, the subject's first."""
        return list(dict.fromkeys((self.root, *(each.table for each in self.branches))))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the subject's row by which it is found, references lead to it, or objects are named."""
        compared = [name for each in self.below(self.root) for name in each.link.parent_columns]
        named = [name for each in self.subject.objects for name in each.columns]
        by = [] if self.subject.by is None else [self.subject.by]
        return tuple(dict.fromkeys((*compared, *named, *by)))


def read_reach(subject: Subject, *, needs: Literal["erasure", "export"] | None = "erasure") -> Reach:
    """Read the tables that reach a subject, with a decision about each link.

    Parameters:
      needs: What the current role must have the rights for.

    Raises:
      DependentsRefused: A link has no decision, one cannot be carried out, or the role lacks a right; nothing was
        changed. The text has the line to add.
      peewee.PeeweeException: A catalog cannot be read.
    """
    with database.using(subject.database):
        reader = GraphReader({}, subject.references, otherwise="delete")
        graph = reader.read(subject.model)
        reader.refuse_distributed()
        refuse_unknown_columns(subject)
    return _Decider(subject, reader, graph).decide(needs)


def refuse_unknown_columns(subject: Subject) -> None:
    """Refuse a subject whose `by` or objects name a missing column of its table, in the current database.

    Raises:
      DependentsRefused: There is no such column.
      peewee.PeeweeException: The catalog cannot be read.
    """
    table = read_table(subject.model)  # a migration may have renamed a column since it was read
    named = [] if subject.by is None else [(subject.by, "by")]
    named += [(name, f"Objects({each.location!r})") for each in subject.objects for name in each.columns]
    for name, where in named:
        if table.exists and name not in table.columns:
            raise DependentsRefused(
                f"{quoted_name(subject.model)} has no column {name!r}, "
                f"which {where} of Subject({subject.name!r}) names",
                f"it has {', '.join(sorted(table.columns))}",
            )


def _distances(start: TableName, below: Mapping[TableName, Sequence[Branch]]) -> dict[TableName, int]:
    """Return the tables that lead to a table, with their distance from it."""
    found, waiting = {start: 0}, deque([start])
    while waiting:
        at = waiting.popleft()
        for branch in below.get(at, ()):
            if branch.leads_on and branch.table not in found:
                found[branch.table] = found[at] + 1
                waiting.append(branch.table)
    return found


class _Decider:
    """Decisions of a subject about the links of its graph."""

    def __init__(self, subject: Subject, reader: GraphReader, graph: Graph) -> None:
        self._subject, self._reader, self._graph = subject, reader, graph
        self._decisions = {without_spaces(name): decision for name, decision in subject.tables.items()}
        #: Name in `tables` -> what is undecided, and the decision to write.
        self._missing: dict[str, tuple[str, str]] = {}

    def decide(self, needs: Literal["erasure", "export"] | None) -> Reach:
        root = (self._graph.database, self._graph.root)
        branches, seen, waiting = list[Branch](), {root}, deque([root])
        while waiting:
            at = waiting.popleft()
            for link in self._graph.links_of(at[1], at[0]):
                branch = self._branch(link)
                branches.append(branch)
                if branch.leads_on and branch.table not in seen:
                    seen.add(branch.table)
                    waiting.append(branch.table)
        reach = self._without_returns(Reach(self._subject, root, tuple(branches), self._graph))
        self._refuse_missing()
        self._reader.refuse_unfit_names(self._graph, self._decisions)
        reach = replace(reach, branches=tuple(self._checked(reach, each) for each in reach.branches))
        for branch in reach.branches:
            self._refuse_lost(reach, branch)
            self._refuse_contradiction(reach, branch)
        whole = replace(self._graph, links=tuple(_as_cascaded(each) for each in reach.branches))
        needed = self._reader.needed_rights(whole, with_root=True)
        if needs is not None:
            reading: NeededRights = {table: (facts, {"SELECT": ()}) for table, (facts, _) in needed.items()}
            self._reader.refuse_missing_rights(needed if needs == "erasure" else reading)
            self._reader.refuse_hidden_rows(whole)
        return replace(reach, rights={table: tuple(rights) for table, (_, rights) in needed.items()})

    def _decision(self, link: Link) -> tuple[TableDecision | None, bool]:
        """Return the decision about a link, and whether it is about this link alone."""
        facts = self._reader.facts_of(link)
        for name in names_of(facts, link):
            if name in self._decisions:
                return self._decisions[name], name not in facts.spellings
        return None, False

    def _branch(self, link: Link) -> Branch:
        decision, is_of_link = self._decision(link)
        types = {name: each.sql_type for name, each in self._reader.facts_of(link).columns.items()}
        if decision is None or isinstance(decision, Delete):
            if decision is None:
                self._miss(link)
            return Branch(link, None, {}, leads_on=True, leads_back=False, types=types)
        ends = is_of_link and isinstance(decision, Keep) and set(decision.anonymise) <= set(link.columns)
        return Branch(link, decision.reason, decision.anonymise, leads_on=not ends, leads_back=False, types=types)

    def _without_returns(self, reach: Reach) -> Reach:
        """Let rows that are kept lead on to nothing by links that lead back."""
        below: dict[TableName, list[Branch]] = {}
        for branch in reach.branches:
            below.setdefault(branch.parent, []).append(branch)
        distance, leading = _distances(reach.root, below), {each: _distances(each, below) for each in below}
        found = []
        for branch in reach.branches:
            is_closer = distance.get(branch.table, 0) <= distance[branch.parent]
            leads_back = is_closer and branch.parent in leading.get(branch.table, {branch.table: 0})
            if leads_back and branch.leads_on:
                self._refuse_return(reach, branch, leading)
                branch = replace(branch, leads_on=branch.deletes)
            found.append(replace(branch, leads_back=leads_back, distance=distance[branch.parent]))
        return replace(reach, branches=tuple(found))

    def _refuse_return(
        self, reach: Reach, branch: Branch, leading: Mapping[TableName, Mapping[TableName, int]]
    ) -> None:
        link = branch.link
        way_out = f'write "{link.name}": {self._releasing(link)}'
        _, is_of_link = self._decision(link)
        if not is_of_link and (not branch.deletes or branch.table == reach.root):
            self._missing.pop(link.table, None)
            self._note_missing(link.name, link, self._releasing(link))
        elif branch.deletes and branch.table == reach.root:
            raise DependentsRefused(f"{link.name}: Delete() would erase further rows of {link.table}", way_out)
        elif branch.deletes and branch.table != branch.parent:
            circle = leading[branch.table]
            if any(not each.deletes or not each.is_local for each in reach.branches if each.parent in circle):
                raise DependentsRefused(
                    f"{link.name} closes a circle of deleted rows, on which rows that are kept depend", way_out
                )

    def _miss(self, link: Link) -> None:
        """Note that a link has no decision.

        Delete() is not suggested for a link of a table to itself, for a further link of a table with a decision, for
        one of several links unless PostgreSQL cascades by it, or for a link to rows that may stay. It would delete rows
        of others, such as replies, or the payments of an invoice that is kept.
        """
        own = (link.database, link.table)
        links = [each for each in self._graph.links if (each.database, each.table) == own]
        trees = [each for each in links if (each.parent_database, each.parent) == own]
        is_further = any(self._decision(each)[0] is not None for each in links if each not in trees)
        is_one_of_several = len(links) - len(trees) > 1 and link.on_delete != "CASCADE"
        if own == (self._graph.database, self._graph.root) or link in trees:
            self._note_missing(link.name, link, self._releasing(link))
        elif is_further or is_one_of_several:
            self._note_missing(link.name, link, self._releasing(link, 'Keep("why", anonymise={{"{}": None}})'))
        else:
            advice = 'Keep("why")' if self._may_stay(link) else "Delete()"
            self._note_missing(link.name if len(links) > 1 else link.table, link, advice)

    def _may_stay(self, link: Link) -> bool:
        """Return whether a decision, or the one suggested, keeps rows that the link refers to."""
        own = (link.parent_database, link.parent)
        links = [each for each in self._graph.links if (each.database, each.table) == own]
        parents = [each for each in links if (each.parent_database, each.parent) != own]
        decided = [self._decision(each)[0] for each in parents]
        suggested = [self._missing.get(each.name, self._missing.get(each.table)) for each in parents]
        return any(each is not None and not isinstance(each, Delete) for each in decided) or any(
            each is not None and each[1] != "Delete()" for each in suggested
        )

    def _releasing(self, link: Link, form: str = "Anonymise({}=None)") -> str:
        """Return the suggested decision that keeps the rows, without their link if its column can be NULL."""
        columns = self._reader.facts_of(link).columns
        free = next((each for each in link.columns if not columns[each].not_null), None)
        return 'Keep("why")' if free is None else form.format(free)

    def _note_missing(self, name: str, link: Link, decision: str) -> None:
        self._missing.setdefault(name, (f"{link.name} (references {link.parent}, {link.rule})", decision))

    def _refuse_missing(self) -> None:
        if self._missing:
            lines = ", ".join(f'"{name}": {decision}' for name, (_, decision) in self._missing.items())
            texts = "; ".join(text for text, _ in self._missing.values())
            raise DependentsRefused(
                f"{counted(len(self._missing), 'link')} without a decision: {texts}",
                f'add to `tables` of Subject("{self._subject.name}"): {lines}; or Keep("why") or '
                "Anonymise(column=value), for each",
            )

    def _checked(self, reach: Reach, branch: Branch) -> Branch:
        """Return a branch whose new values PostgreSQL takes, as far as that can be known."""
        link, facts = branch.link, self._reader.facts_of(branch.link)
        if link.temporal and (branch.deletes or reach.may_be_deleted(branch.parent)):
            raise DependentsRefused(
                f"{link.name} is a foreign key with a PERIOD, so that its rows may refer to rows that stay",
                "erase its rows by a function of your own, and drop the foreign key",
            )
        if branch.deletes or branch.values or link.on_delete is not None:
            try:
                reach.model_of(branch.table)
            except DeclarationError as error:
                raise DependentsRefused(str(error).partition(";")[0], "add a primary key") from None
        values = dict(branch.values)
        is_bound = not branch.deletes and link.on_delete is not None and reach.may_be_deleted(branch.parent)
        if is_bound and not branch.releases:
            if link.on_delete != "SET NULL":
                raise _must_release(link, facts, f"its foreign key is ON DELETE {link.on_delete}")
            values |= dict.fromkeys(link.cleared or link.columns)
        with database.using(link.database):
            return replace(branch, values=_taken(link, facts, values))

    def _refuse_lost(self, reach: Reach, branch: Branch) -> None:
        """Refuse rows that are kept and would not be found any more once a row that they refer to is deleted."""
        if branch.deletes or branch.releases or branch.parent == reach.root or not reach.may_be_deleted(branch.parent):
            return
        if branch.values or (branch.leads_on and reach.below(branch.table)):
            raise _must_release(
                branch.link,
                self._reader.facts_of(branch.link),
                f"they are not found any more once rows of {branch.link.parent} are deleted",
            )

    def _refuse_contradiction(self, reach: Reach, branch: Branch) -> None:
        """Refuse two links of a table that write different values into one column of a row, by turns."""
        for other in (each for each in reach.branches if each.table == branch.table):
            if not (branch.releases or other.releases):
                for name in branch.values.keys() & other.values.keys():
                    if branch.values[name] != other.values[name]:
                        problem = f"{branch.link.name} and {other.link.name} give {name} different values"
                        raise DependentsRefused(problem, "write the same value")


def _as_cascaded(branch: Branch) -> Link:
    """Return the link with the decision of a cascade that needs the same rights."""
    if branch.values:
        return replace(branch.link, decision="clear", cleared=tuple(branch.values))
    return replace(branch.link, decision="delete" if branch.deletes else "keep")


def _must_release(link: Link, facts: TableFacts, why: str) -> DependentsRefused:
    free = next((each for each in link.columns if not facts.columns[each].not_null), None)
    way_out = f'add anonymise={{"{free or link.columns[0]}": None}} to the decision about {link.table}'
    if free is None:
        way_out = f"ALTER TABLE {link.table} ALTER COLUMN {link.columns[0]} DROP NOT NULL, and {way_out}"
    return DependentsRefused(
        f"rows of {link.table} are kept although {link.name} refers to deleted rows: {why}", way_out
    )


_COLUMNS: Final = """
SELECT array(
    SELECT attname::text FROM pg_attribute
    WHERE attrelid = %(id)s AND attnum > 0 AND (attgenerated <> '' OR attidentity = 'a') AND attname = ANY (%(names)s)
), array(
    SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = %(id)s AND indisunique AND indpred IS NULL
    AND indexprs IS NULL AND NOT EXISTS (
        SELECT FROM unnest(indkey::smallint[]) WITH ORDINALITY AS one (number, place)
        JOIN pg_attribute ON attrelid = indrelid AND attnum = number
        WHERE place <= indnkeyatts AND attname <> ALL (%(written)s)
    )
), coalesce((
    SELECT jsonb_object_agg(conname, pg_get_expr(conbin, conrelid)) FROM pg_constraint
    WHERE conrelid = %(id)s AND contype = 'c' AND to_jsonb(pg_constraint) -> 'conenforced' IS DISTINCT FROM 'false'
    AND NOT EXISTS (
        SELECT FROM unnest(conkey) AS number JOIN pg_attribute ON attrelid = conrelid AND attnum = number
        WHERE attname <> ALL (%(names)s)
    )
), '{}')
"""


def _taken(link: Link, facts: TableFacts, values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return new values as PostgreSQL writes them, once it is known that the columns take them.

    Raises:
      DependentsRefused: A column does not exist or does not take its value, or a constraint forbids it.
    """
    found: dict[str, str | None] = {}
    for name, value in values.items():
        column = facts.columns.get(name)
        if column is None:
            raise DependentsRefused(
                f"{facts.name} has no column {name!r} to anonymise", f"it has {', '.join(sorted(facts.columns))}"
            )
        if value is None and column.not_null:
            raise DependentsRefused(
                f"{facts.name}.{name} cannot be anonymised with None, because it is NOT NULL", "write another value"
            )
        found[name] = None if value is None else _as_text(facts.name, name, value, column.sql_type)
    if not found:
        return found
    written = [name for name, value in found.items() if value is not None]
    given = {"id": link.table_id, "names": list(found), "written": written}
    row: Any = database.execute_sql(_COLUMNS, given).fetchone()
    fixed, unique, checks = row
    if fixed:
        raise DependentsRefused(f"{facts.name}.{fixed[0]} is generated", "leave it out of the values")
    if unique:
        raise DependentsRefused(
            f"{facts.name}: only one row can take these values, because of the unique index {unique[0]}", "write None"
        )
    for name, expression in checks.items():
        columns = ", ".join(
            f"CAST(%s AS {escaped(facts.columns[each].sql_type)}) AS {sql_name(each)}" for each in found
        )
        sql = f"SELECT ({escaped(expression)}) IS NOT FALSE FROM (SELECT {columns}) AS given"  # noqa: S608
        ((allowed,),) = database.execute_sql(sql, list(found.values())).fetchall()
        if not allowed:
            raise DependentsRefused(f"{facts.name}: the constraint {name} forbids these values", "write other values")
    return found


def _as_text(table: str, name: str, value: Any, sql_type: str) -> str:
    """Return a value as PostgreSQL writes it in a column of this type."""
    given = json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
    problem = f"{table}.{name} does not take the value {value!r}"
    try:
        with database.atomic():
            row: Any = database.execute_sql(f"SELECT CAST(%s::text AS {escaped(sql_type)})::text", (given,)).fetchone()
    except PeeweeException as error:
        if kind_of(error) not in (Kind.STATEMENT, Kind.ROW):
            raise
        raise DependentsRefused(problem, f"write a value of the type {sql_type}") from None
    text = str(row[0])
    # A cast cuts a text that is too long for its column; an UPDATE would fail.
    if isinstance(value, str) and sql_type.startswith("character") and text.rstrip() != value.rstrip():
        raise DependentsRefused(problem, f"write a shorter text: its type is {sql_type}")
    return text


@dataclass(frozen=True, slots=True)
class NotReached:
    """Rows of a subject that an erasure does not reach: a sweep has cut their link, or a materialized view stores them.

    Attributes:
      text: Description with the view, or with the sweep, the table and the columns.
      way_out: How to remove or anonymise these rows.
    """

    text: str
    way_out: str


#: Materialized views that read the given tables or their partitions, also through other views. pg_depend has what the
#: rule of a view reads.
_STORED_VIEWS: Final = """
WITH RECURSIVE reading (id, depth) AS (
    (SELECT id, 0 FROM unnest(%s::oid[]) AS given (id)
     UNION SELECT part.relid::oid, 0 FROM unnest(%s::oid[]) AS given (id), pg_partition_tree(id) AS part)
    UNION SELECT ev_class, depth + 1 FROM reading
    JOIN pg_depend ON refclassid = 'pg_class'::regclass AND refobjid = id AND classid = 'pg_rewrite'::regclass
    JOIN pg_rewrite AS r ON r.oid = objid AND ev_class <> id
    WHERE depth < 100
)
SELECT id::regclass::text FROM reading JOIN pg_class AS c ON c.oid = id WHERE relkind = 'm' AND relispopulated
GROUP BY id ORDER BY max(depth), 1
"""


def stored_views(reach: Reach) -> list[NotReached]:
    """Return the materialized views that read tables which an erasure changes, in an order to refresh them.

    Tables that only a function of the view reads are not detected.

    Raises:
      peewee.PeeweeException: A database does not answer.
    """
    found = list[NotReached]()
    for of_database in dict.fromkeys(name for name, _ in reach.tables):
        changed = [table for name, table in reach.tables if name == of_database and reach.may_be_changed((name, table))]
        with database.using(of_database):
            ids = list(read_named(changed).values())
            rows: Any = database.execute_sql(_STORED_VIEWS, (ids, ids)).fetchall()
        for (name,) in rows:
            text = f"the materialized view {name} keeps erased rows until it is refreshed"
            found.append(NotReached(text, f"REFRESH MATERIALIZED VIEW {name}"))
    return found


def cut_links(reach: Reach, sweeps: Iterable[Sweep]) -> list[NotReached]:
    """Return the links to a subject that enabled sweeps cut, by writing their columns or deleting their parents.

    A link is left out if the sweep changes its rows, and their dependents, as an erasure would. Raw SQL within the
    statements, and which rows they change, are not considered.

    Raises:
      peewee.PeeweeException: A database does not answer.
    """
    found = list[NotReached]()
    for sweep in sweeps:
        if sweep.enabled and any(sweep.database == name for name, _ in reach.tables):
            with database.using(sweep.database):
                try:
                    changes = _Changes(reach, sweep.database, sweep.stages_for_run())
                except Exception as error:
                    if is_unavailable(error):
                        raise
                    continue  # runs of the sweep fail with the same error
            found += [cut for branch in reach.branches if (cut := changes.cut(sweep.name, branch)) is not None]
    return found


class _Changes:
    """Changes that the statements of a sweep make to the tables of a subject."""

    def __init__(self, reach: Reach, of_database: str, stages: Iterable[Stage]) -> None:
        self._reach = reach
        written, deleted = dict[str, set[str]](), set[TableName]()
        for stage in stages:
            changes = recorded(stage, SYSTEM_CLOCK.now()).changes
            for model, rights in changes.items():
                written.setdefault(quoted_name(model), set()).update(updated_columns(rights))
            deleting = [model for model, rights in changes.items() if "DELETE" in rights]
            if isinstance(stage, CascadeStage):
                graphs = [stage.graph]
            else:
                graphs = [read_graph(each, None) for each in deleting]
            deleting += [stage.model] if isinstance(stage, PartitionStage) else []
            deleted |= {(of_database, quoted_name(each)) for each in deleting}
            for link in (link for graph in graphs if graph is not None for link in graph.links):
                if link.decision == "delete":
                    deleted.add((link.database, link.table))
                elif link.decision == "clear" and link.database == of_database:
                    written.setdefault(link.table, set()).update(link.cleared or link.columns)
        # A model and the catalog may write a name differently.
        names = {each.link.table_id: each.table for each in reach.branches if each.table[0] == of_database}
        ids = read_named([*written, *(table for name, table in deleted if name == of_database), reach.root[1]])
        if reach.root[0] == of_database:
            names[ids[reach.root[1]]] = reach.root
        self._written = dict[TableName, set[str]]()
        for table, columns in written.items():
            if (named := names.get(ids.get(table, 0))) is not None:
                self._written.setdefault(named, set()).update(columns)
        self._deleted = {names.get(ids.get(each[1], 0), each) if each[0] == of_database else each for each in deleted}

    def cut(self, sweep: str, branch: Branch) -> NotReached | None:
        """Return the link if the sweep cuts it and leaves data of the subject in its rows; otherwise None."""
        link = branch.link
        written = sorted(self._written.get(branch.table, set()) & set(link.columns))
        is_orphaned = link.on_delete is None and branch.parent in self._deleted and branch.table not in self._deleted
        if branch.leads_back or not (written or is_orphaned) or (not branch.deletes and self._does_all(branch)):
            return None
        if written:
            text = f"{sweep} changes {', '.join(f'{link.table}.{each}' for each in written)}"
        else:
            text = f"{sweep} deletes rows of {link.parent}, but not those that refer to them by {link.name}"
        left = sorted(set(branch.values) - self._written.get(branch.table, set()) - set(link.columns))
        if left:
            way_out = f"change {', '.join(left)} in {sweep} as well"
        elif branch.deletes:
            way_out = f"delete these rows in {sweep}, or anonymise them there and in the Subject"
        else:
            way_out = f"change what depends on these rows in {sweep} as well"
        return NotReached(f"{text}; erasures no longer find these rows", way_out)

    def _does_all(self, branch: Branch) -> bool:
        """Return whether the sweep changes the rows of a link, and their dependents, as an erasure would."""
        if branch.deletes:
            return branch.table in self._deleted
        known = self._written.get(branch.table, set()) | set(branch.link.columns)
        below = self._reach.below(branch.table) if branch.leads_on else []
        return set(branch.values) <= known and all(self._does_all(each) for each in below if not each.leads_back)
