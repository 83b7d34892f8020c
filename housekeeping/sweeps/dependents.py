"""Graph of the tables whose rows depend on the rows that a sweep deletes, with a decision for each link.

`read_graph` reads the foreign keys, also through partitions, circles and other schemas, and adds declared references.
It refuses a declaration that leaves a link undecided, or that cannot work, before anything changes.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from peewee import Model, PeeweeException

from housekeeping.core.errors import DeclarationError, DependentsRefused
from housekeeping.core.logs import counted, error_line
from housekeeping.database.catalog import (
    TableFacts,
    current_role,
    escaped,
    foreign_keys_to,
    quoted_name,
    read_table_facts,
    role_without_rows,
)
from housekeeping.database.connection import database
from housekeeping.database.errors import NO_RIGHT, Kind, kind_of, sqlstate
from housekeeping.sweeps.tables import describe, model_of
from housekeeping.sweeps.values import Decision, Reference, named_columns

#: What a constraint decides. NO ACTION and RESTRICT refuse the deletion, so they decide nothing.
CONSTRAINT_DECIDES: Final[Mapping[str | None, Decision]] = {
    "CASCADE": "delete",
    "SET NULL": "clear",
    "SET DEFAULT": "clear",
}
#: Rows of a table above which a missing index matters. To read a smaller table for each batch is no problem.
LARGE: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A foreign key or declared `Reference` to rows that are deleted, and what happens to the referencing rows.

    Attributes:
      table: The dependents' table, by its name in SQL; of a partition, the partitioned table.
      columns: Its referencing columns, by name.
      parent, parent_columns, parent_types: The referenced table and columns, likewise, with their types.
      decision: None if neither the constraint nor the declaration decides.
      on_delete: What the constraint does, such as ``NO ACTION``; None for a `Reference` or one that is NOT ENFORCED.
      temporal: Whether the constraint has a PERIOD, so that dependents may refer to other rows with the same columns.
      where: Condition of a `Reference` on the dependents' table.
      table_id: Oid of the dependents' table.
      rows: Estimated rows of the whole table.
      readable: Whether the current role may read it.
      database, parent_database: Names of the databases of the two tables.
      cleared: The columns that ``clear`` changes, by name.
      defaults: SQL of the defaults that they get; empty if they get NULL.
      index_statement: The statement that creates the index by which dependents are found; None if there is one.
    """

    table: str
    columns: tuple[str, ...]
    parent: str
    parent_columns: tuple[str, ...]
    parent_types: tuple[str, ...]
    decision: Decision | None
    on_delete: str | None
    temporal: bool
    where: str | None
    table_id: int
    rows: int
    readable: bool
    database: str
    parent_database: str
    cleared: tuple[str, ...]
    defaults: tuple[str, ...]
    index_statement: str | None

    @property
    def name(self) -> str:
        """The name of the link in a mapping of decisions: ``"order_item.order_id"``."""
        return f"{self.table}.{','.join(self.columns)}"

    @property
    def indexed(self) -> bool:
        """Whether an index finds the dependents of a row."""
        return self.index_statement is None

    @property
    def large(self) -> bool:
        """Whether the table is so large that a missing index matters."""
        return self.rows > LARGE

    @property
    def rule(self) -> str:
        """The kind of link, such as ``ON DELETE CASCADE``."""
        return "a Reference" if self.on_delete is None else f"ON DELETE {self.on_delete}"

    @property
    def source(self) -> str:
        """The dependents' table in a FROM clause, without rows that the condition of a `Reference` excludes."""
        return self.table if self.where is None else f"(SELECT * FROM {self.table} WHERE ({self.where}))"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Graph:
    """The tables whose rows depend on the rows of a table.

    Attributes:
      root: The table, by its name in SQL.
      links: Every link to a row that may be deleted, nearest first. What depends on a row that is kept, or whose
        reference is cleared, stays and is not among them.
      database: Name of the root's database.
      root_rows: Estimated rows of the root.
      rights: Database and table -> rights needed to read the dependents and change them as decided.
    """

    root: str
    links: tuple[Link, ...]
    database: str
    root_rows: int
    _root_model: type[Model] = field(repr=False, compare=False)
    rights: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)

    def links_of(self, table: str, of_database: str | None = None) -> tuple[Link, ...]:
        """Return the links whose parent is this table.

        Parameters:
          of_database: Name of the table's database; None for the root's.
        """
        parent = (of_database or self.database, table)
        return tuple(each for each in self.links if (each.parent_database, each.parent) == parent)

    def reached(self, table: str, of_database: str, without: Sequence[Link] = ()) -> set[tuple[str, str]]:
        """Return database and name of each table whose rows are deleted because they depend on rows of this one.

        Parameters:
          without: Links that are not followed.
        """
        found: set[tuple[str, str]] = set()
        waiting = [(of_database, table)]
        while waiting:
            at, name = waiting.pop()
            for link in self.links_of(name, at):
                if link.decision == "delete" and link not in without and (link.database, link.table) not in found:
                    found.add((link.database, link.table))
                    waiting.append((link.database, link.table))
        return found

    def in_circles(self, without: Sequence[Link] = ()) -> tuple[Link, ...]:
        """Return the foreign keys that may link deleted rows of one or several tables in a circle."""
        return tuple(
            each
            for each in self.links
            if each.decision == "delete" and each.on_delete is not None and each not in without
            if (each.parent_database, each.parent) in self.reached(each.table, each.database, without)
        )

    @property
    def relinked(self) -> tuple[Link, ...]:
        """Links that may be NULL, without which only rows of one table can depend on each other in a circle.

        A restore sets them once all rows are back.
        """
        found: list[Link] = []
        while optional := [each for each in self.in_circles(found) if each.cleared]:
            found.append(optional[-1])
        return tuple(found)

    def path_to(self, link: Link) -> tuple[Link, ...]:
        """Return the shortest way from the root to a link, which is the last one of it."""
        path = [link]
        while (path[0].parent_database, path[0].parent) != (self.database, self.root):
            above = (path[0].parent_database, path[0].parent)
            nearest = (each for each in self.links if each.decision == "delete")
            path.insert(0, next(each for each in nearest if (each.database, each.table) == above))
        return tuple(path)

    def model_of(self, table: str, of_database: str | None = None) -> type[Model]:
        """Return a model of a table of the graph, with its real columns and its primary key.

        Parameters:
          of_database: Name of the table's database; None for the root's.

        Raises:
          DeclarationError: The table has no primary key, or was dropped.
          peewee.PeeweeException: The catalog cannot be read.
        """
        if table == self.root and of_database in (None, self.database):
            return self._root_model
        with database.using(of_database or self.database):
            model: type[Model] = model_of(table)
        return model

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of the root's database whose rows are deleted or changed.

        Each comes after the tables of its dependents, except by links that are `relinked`.
        """
        found: list[str] = []
        visited: set[str] = set()
        relinked = self.relinked

        def visit(table: str) -> None:
            visited.add(table)
            for link in self.links_of(table):
                is_changed = link.decision in ("delete", "clear") and link.database == self.database
                if is_changed and link not in relinked and link.table not in visited:
                    visit(link.table)
            found.append(table)

        for table in (self.root, *(each.table for each in relinked)):
            if table not in visited:
                visit(table)
        return tuple(found)


def read_graph(
    model: type[Model],
    dependents: Literal[True] | Mapping[str, Decision] | None,
    references: Sequence[Reference] = (),
    *,
    archives: bool = False,
    checks_rights: bool = True,
) -> Graph:
    """Read the graph of a table's dependents, in the current database, with a decision for each link.

    Parameters:
      dependents: Decisions by the names of links, which add to those of the constraints; True for no others. None for
        what PostgreSQL itself does: then nothing is refused, and a link without a decision prevents the deletion.
      archives: Whether the deleted and cleared rows are archived, to be restored table by table.
      checks_rights: Whether the current role must have the rights of a run.

    Raises:
      DependentsRefused: A link has no decision, a name matches no link, or a decision cannot be carried out. The text
        has the line to add.
      peewee.PeeweeException: The catalog cannot be read.
    """
    reader = GraphReader(dependents if isinstance(dependents, Mapping) else {}, references)
    graph = reader.read(model)
    if dependents is None:
        return replace(graph, links=tuple(each for each in graph.links if each.on_delete is not None))
    reader.refuse_distributed()
    reader.refuse_problems(graph, checks_rights=checks_rights)
    if archives:
        _refuse_unarchivable(graph)
    rights = {table: tuple(needed) for table, (_, needed) in reader.needed_rights(graph).items()}
    return replace(graph, rights=rights)


def _refuse_unarchivable(graph: Graph) -> None:
    for link in graph.links:
        if link.decision != "keep" and link.database != graph.database:
            raise DependentsRefused(
                f"{link.name} is in the database {link.database!r}, which cannot move rows to the archive",
                'leave out archive_to, or decide "keep"',
            )
    circle = [each for each in graph.in_circles(graph.relinked) if each.table != each.parent]
    if circle:
        names = ", ".join(each.name for each in circle)
        raise DependentsRefused(
            f"{names} link tables in a circle and are NOT NULL, so that a restore could bring back none of them first",
            'leave out archive_to, decide "keep" about one of the links, or allow NULL in one of the columns',
        )


#: Database and SQL name of a table -> its facts, and its needed rights with the updated columns.
NeededRights = dict[tuple[str, str], tuple[TableFacts, dict[str, Sequence[str]]]]
#: A table: the name of its database, and its oid.
_Node = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Edge:
    """A link as read from the catalog or a `Reference`, before its decision."""

    node: _Node
    columns: tuple[str, ...]
    parent: _Node
    parent_columns: tuple[str, ...]
    on_delete: str | None = None
    temporal: bool = False
    set_columns: tuple[str, ...] = ()
    indexed: bool = True
    where: str | None = None


class GraphReader:
    """Reader of one graph.

    Parameters:
      decisions: Decisions by the names of links.
      otherwise: Decision for all other links; None to follow the constraints. If it is given, the table is read even
        without dependents.
    """

    def __init__(
        self, decisions: Mapping[str, Decision], references: Sequence[Reference], otherwise: Decision | None = None
    ) -> None:
        self._otherwise = otherwise
        self._decisions = {without_spaces(name): decision for name, decision in decisions.items()}
        self._references = references
        self._own = database.selected
        self._tables: dict[_Node, TableFacts] = {}
        self._edges: dict[_Node, list[_Edge]] = {}

    def read(self, model: type[Model]) -> Graph:
        name = quoted_name(model)
        root = self._read_from(self._own, name)
        if root is None:  # the first statement on the table reports it
            return Graph(name, (), self._own, 0, model)
        for edge in [self._edge_of(each, node) for each, node in self._read_references()]:
            self._edges.setdefault(edge.parent, []).append(edge)
        links, seen, queue = list[Link](), {root}, deque([root])
        while queue:
            for edge in sorted(self._edges.get(queue.popleft(), ()), key=self._place):
                link = self._link(edge)
                links.append(link)
                if link.decision == "delete" and edge.node not in seen:
                    seen.add(edge.node)
                    queue.append(edge.node)
        return Graph(self._tables[root].name, tuple(links), self._own, self._tables[root].rows, model)

    def _place(self, edge: _Edge) -> tuple[str, tuple[str, ...]]:
        return self._tables[edge.node].name, edge.columns

    def _read_from(self, of_database: str, table: str, *, whole: bool = False) -> _Node | None:
        """Read the foreign keys to a table, to the tables that have them, and so on; None if there is no such table.

        Parameters:
          whole: Whether a partition stands for its partitioned table.
        """
        with database.using(of_database):
            row: Any = database.execute_sql(_IDS, (table,)).fetchone()
            own_id, whole_id = row
            if own_id is None:
                return None
            node: _Node = (of_database, whole_id if whole else own_id)
            if node in self._tables:
                return node
            (start,) = read_table_facts([node[1]])
            keys = foreign_keys_to(start.name, deep=True)
            facts = read_table_facts({node[1], *(key.table_id for key in keys)})
        known, merged = set(self._edges), dict[Any, _Edge]()
        for key in keys:
            edge = _Edge(
                (of_database, key.table_id),
                tuple(key.columns),
                (of_database, key.referenced_id),
                tuple(key.referenced_columns),
                key.on_delete,
                key.temporal,
                tuple(key.set_columns),
                key.indexed,
            )
            same = (edge.node, edge.columns, edge.parent, edge.parent_columns)
            merged[same] = _merged(merged[same], edge) if same in merged else edge
        self._tables |= {(of_database, each.id): each for each in facts}
        for edge in merged.values():
            was_dropped = edge.node not in self._tables or edge.parent not in self._tables
            if edge.parent not in known and not was_dropped:
                self._edges.setdefault(edge.parent, []).append(edge)
        return node

    def _read_references(self) -> list[tuple[Reference, _Node]]:
        """Read the table of each declared reference, before the tables that they refer to are looked up."""
        found = []
        for each in self._references:
            name = each.database or self._own
            if name not in database.by_name():
                raise DependentsRefused(
                    f"{_called(each)} names the database {name!r}, which is not configured",
                    "add it to HOUSEKEEPING_DATABASES",
                )
            table, _ = named_columns(each.referencing)
            with database.using(name):
                try:
                    describe(table)
                except DeclarationError as error:
                    raise DependentsRefused(f"{_called(each)}: {error}") from None
                except PeeweeException as error:
                    if sqlstate(error) != NO_RIGHT:
                        raise
                    grant = f"GRANT USAGE ON SCHEMA {table.rpartition('.')[0]} TO {current_role()}"
                    raise DependentsRefused(f"{_called(each)}: {error_line(error)}", grant) from None
            node = self._read_from(name, table, whole=True)
            assert node is not None, "it was just described"
            found.append((each, node))
        return found

    def _edge_of(self, reference: Reference, node: _Node) -> _Edge:
        """Return the edge of a declared reference, once PostgreSQL accepts its columns and its condition."""
        _, columns = named_columns(reference.referencing)
        _, parent_columns = named_columns(reference.referenced)
        parent = self._parent_of(reference, node)
        for at, names in ((node, columns), (parent, parent_columns)):
            facts = self._tables[at]
            for name in names:
                if name not in facts.columns:
                    way_out = f"it has {', '.join(sorted(facts.columns))}"
                    raise DependentsRefused(f"{_called(reference)}: {facts.name} has no column {name!r}", way_out)
        return _Edge(
            node,
            columns,
            parent,
            parent_columns,
            indexed=self._is_indexed(reference, node, columns, parent, parent_columns),
            where=reference.where,
        )

    def _parent_of(self, reference: Reference, node: _Node) -> _Node:
        named, _ = named_columns(reference.referenced)
        for name in dict.fromkeys((self._own, node[0])):
            for parent, facts in self._tables.items():
                if parent[0] == name and named in facts.spellings:
                    return parent
        names = {each.plain_name for each in self._tables.values()}
        near = difflib.get_close_matches(named.rpartition(".")[2], names, n=1)
        same = [each.name for each in self._tables.values() if each.plain_name in near]
        raise DependentsRefused(
            f"{_called(reference)} refers to {named}, which does not depend on the deleted rows",
            f"write {' or '.join(same)} instead" if same else "name a table that leads to them, or leave it out",
        )

    def _is_indexed(
        self,
        reference: Reference,
        node: _Node,
        columns: Sequence[str],
        parent: _Node,
        parent_columns: Sequence[str],
    ) -> bool:
        """Return whether an index finds the rows that refer to one row, also a partial one that fits the condition.

        Raises:
          DependentsRefused: The columns cannot be compared, or PostgreSQL rejects the condition.
        """
        facts, others = self._tables[node], self._tables[parent].columns
        if facts.closed_schema or "SELECT" not in facts.rights:
            return True  # the missing right is reported
        pairs = zip((facts.columns[each].sql_name for each in columns), parent_columns, strict=True)
        conditions = [f"{name} = (SELECT NULL::{others[other].sql_type})" for name, other in pairs]
        conditions += [] if reference.where is None else [f"({reference.where})"]
        query = f"EXPLAIN (FORMAT JSON) SELECT FROM {facts.name} WHERE {' AND '.join(conditions)}"
        with database.using(node[0]), database.atomic() as transaction:
            try:
                # PostgreSQL scans small tables even if they have a suitable index.
                database.execute_sql("SET LOCAL enable_seqscan = off")
                explained: Any = database.execute_sql(escaped(query), ()).fetchone()
            except PeeweeException as error:
                if kind_of(error) not in (Kind.STATEMENT, Kind.ROW):
                    raise
                way_out = _as_text(facts, columns, self._tables[parent], parent_columns)
                raise DependentsRefused(
                    f"{_called(reference)}: PostgreSQL says: {error_line(error)}", way_out
                ) from None
            transaction.rollback()
        found = list(_nodes(explained[0][0]["Plan"]))
        scans = [each for each in found if each.get("Relation Name") or each["Node Type"] == "Bitmap Index Scan"]
        names = [facts.columns[each].sql_name for each in columns]
        by_index = [each for each in scans if any(name in each.get("Index Cond", "") for name in names)]
        return bool(by_index) and not any(each["Node Type"] == "Seq Scan" for each in scans)

    def _link(self, edge: _Edge) -> Link:
        table, parent = self._tables[edge.node], self._tables[edge.parent]
        own = CONSTRAINT_DECIDES.get(edge.on_delete)
        decision = next(
            (self._decisions[name] for name in names_of(table, edge) if name in self._decisions), self._otherwise or own
        )
        nullable = tuple(each for each in edge.columns if not table.columns[each].not_null)
        cleared = edge.set_columns if own == decision == "clear" else nullable
        defaults = tuple(table.columns[each].default or "NULL" for each in cleared or edge.columns)
        columns = ", ".join(table.columns[each].sql_name for each in edge.columns)
        concurrently = "" if table.is_partitioned else " CONCURRENTLY"
        return Link(
            table=table.name,
            columns=edge.columns,
            parent=parent.name,
            parent_columns=edge.parent_columns,
            parent_types=tuple(
                parent.columns[each].sql_type if each in parent.columns else "text" for each in edge.parent_columns
            ),
            decision=decision,
            on_delete=edge.on_delete,
            temporal=edge.temporal,
            where=edge.where,
            table_id=table.id,
            rows=table.rows,
            readable=table.closed_schema is None and "SELECT" in table.rights,
            database=edge.node[0],
            parent_database=edge.parent[0],
            cleared=cleared,
            defaults=defaults if edge.on_delete == "SET DEFAULT" else (),
            index_statement=None if edge.indexed else f"CREATE INDEX{concurrently} ON {table.name} ({columns})",
        )

    def refuse_distributed(self) -> None:
        """Raise DependentsRefused if a table has its rows in shards of Citus, where they cannot be locked together."""
        for facts in self._tables.values():
            if facts.is_distributed:
                raise DependentsRefused(
                    f"{facts.name} is a distributed table of Citus, whose rows cannot be locked with their dependents",
                    "give each table a sweep, or foreign keys between colocated tables ON DELETE CASCADE",
                )

    def refuse_problems(self, graph: Graph, *, checks_rights: bool) -> None:
        """Raise DependentsRefused for the first kind of problem that a run would meet."""
        # First, because the line to add to undecided links repeats these names.
        self.refuse_unfit_names(graph, self._decisions)
        self._refuse_undecided(graph)
        if checks_rights:
            self.refuse_missing_rights(self.needed_rights(graph))  # first, because it names unreadable tables
            self.refuse_hidden_rows(graph)
        self._refuse_impossible(graph)

    def _refuse_undecided(self, graph: Graph) -> None:
        undecided = [each for each in graph.links if each.decision is None]
        if not undecided:
            return
        found = ", ".join(f"{each.name} (references {each.parent}, {each.rule})" for each in undecided)
        # The decision that loses nothing.
        lines: Mapping[str, Decision] = {**self._decisions, **{each.name: "keep" for each in undecided}}
        one = len(undecided) == 1
        raise DependentsRefused(
            f"{counted(len(undecided), 'link')} {'has' if one else 'have'} no decision: {found}",
            f'decide "delete", "clear" or "keep" for {"it" if one else "each"}',
            lines,
        )

    def refuse_unfit_names(self, graph: Graph, names: Iterable[str]) -> None:
        """Raise DependentsRefused for a name that is that of no link or table."""
        # Also of links that are not reached, because their parents stay.
        edges = [each for edges in self._edges.values() for each in edges]
        known = {name for each in edges for name in names_of(self._tables[each.node], each)}
        for name in names:
            if name not in known:
                links = [each for link in graph.links for each in (link.name, link.table)]
                near = difflib.get_close_matches(name, links, n=1)
                fitting = ", ".join(dict.fromkeys(each.name for each in graph.links)) or "none"
                raise DependentsRefused(
                    f"no link has the name {name!r}",
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"the links are {fitting}; declare one without a foreign key in references",
                )

    def _refuse_impossible(self, graph: Graph) -> None:
        for link in graph.links:
            facts = self.facts_of(link)
            if not set(link.parent_columns) <= self._columns_of(link.parent_database, link.parent):
                raise DependentsRefused(
                    f"{link.name} refers to a column that {link.parent} lacks, of a table that inherits from it",
                    "declare a sweep on that table",
                )
            if link.temporal and link.decision != "keep":
                raise DependentsRefused(
                    f"{link.name} is a foreign key with a PERIOD, so that its rows may refer to rows that stay",
                    'decide "keep"',
                    {link.name: "keep"},
                )
            if link.decision == "clear":
                fixed = [each for each in link.cleared or link.columns if facts.columns[each].not_null]
                if fixed and not (link.defaults and all(facts.columns[each].default for each in fixed)):
                    column = facts.columns[fixed[0]].sql_name
                    raise DependentsRefused(
                        f"{link.name} cannot be cleared, because {column} is NOT NULL",
                        f"ALTER TABLE {link.table} ALTER COLUMN {column} DROP NOT NULL, or decide "
                        '"delete" or "keep" for it',
                        {link.name: "delete"},
                    )
            if link.decision != "keep":
                try:
                    graph.model_of(link.table, link.database)
                except DeclarationError as error:
                    raise DependentsRefused(
                        str(error).partition(";")[0],
                        f"ALTER TABLE {link.table} ADD COLUMN id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, or "
                        "make existing columns its primary key",
                    ) from None

    def needed_rights(self, graph: Graph, *, with_root: bool = False) -> NeededRights:
        """Return the rights on each table that are needed to read and change it as decided.

        Parameters:
          with_root: Whether to include the rights to delete the root's rows.
        """
        found: NeededRights = {}
        for (name, _), facts in self._tables.items() if with_root else ():
            if (name, facts.name) == (graph.database, graph.root):
                lock = next(iter(facts.columns))
                found[name, facts.name] = facts, {"SELECT": (), "DELETE": (), _update(facts, [lock]): (lock,)}
        for link in graph.links:
            facts = self.facts_of(link)
            _, rights = found.setdefault((link.database, link.table), (facts, {}))
            rights["SELECT"] = ()
            if link.decision == "delete":
                rights["DELETE"] = ()
            # FOR UPDATE needs the right to update at least one column.
            changed = link.cleared if link.decision == "clear" else link.columns[:1]
            if link.decision != "keep" and changed:
                rights[_update(facts, changed)] = changed
        return found

    def refuse_missing_rights(self, needed: NeededRights) -> None:
        """Raise DependentsRefused if the role lacks one of these rights."""
        statements, tables = dict[str, None](), []
        for facts, rights in needed.values():
            missing = [
                right
                for right, columns in rights.items()
                if not (all(facts.columns[each].may_update for each in columns) if columns else right in facts.rights)
            ]
            if facts.closed_schema is not None:
                statements[f"GRANT USAGE ON SCHEMA {facts.closed_schema} TO {facts.role}"] = None
            if missing:
                statements[f"GRANT {', '.join(missing)} ON {facts.name} TO {facts.role}"] = None
            if missing or facts.closed_schema is not None:
                tables.append(facts.name)
        if tables:
            raise DependentsRefused(f"the role lacks rights on {', '.join(tables)}", "; ".join(statements))

    def refuse_hidden_rows(self, graph: Graph) -> None:
        """Raise DependentsRefused if policies hide rows of a table from the role."""
        for link in graph.links:
            if not self.facts_of(link).has_policies:
                continue
            with database.using(link.database):
                role = role_without_rows(link.table_id)
            if role is not None:
                policy = f"CREATE POLICY housekeeping ON {link.table} TO {role} USING (true)"
                raise DependentsRefused(
                    f"row-level security on {link.table} applies to {role}, so that dependents may not be found",
                    f"ALTER ROLE {role} BYPASSRLS, or {policy}",
                )

    def facts_of(self, link: Link) -> TableFacts:
        """Return the facts of the dependents' table."""
        return self._tables[link.database, link.table_id]

    def _columns_of(self, of_database: str, table: str) -> set[str]:
        found = (facts for node, facts in self._tables.items() if node[0] == of_database and facts.name == table)
        return {column for facts in found for column in facts.columns}


_IDS: Final = """
SELECT id::bigint, coalesce(pg_partition_root(id)::oid, id)::bigint FROM (SELECT to_regclass(%s)::oid AS id) AS asked
"""


def _merged(one: _Edge, other: _Edge) -> _Edge:
    """Return the edge of two constraints on the same columns, such as those of single partitions."""
    rules = sorted({each.on_delete for each in (one, other) if each.on_delete is not None})
    return replace(one, on_delete=" and ".join(rules) or None, indexed=one.indexed and other.indexed)


def _as_text(
    facts: TableFacts, columns: Sequence[str], parent: TableFacts, parent_columns: Sequence[str]
) -> str | None:
    """Return how to compare a column of text with one of another type, as in generic relations of Django, if any is."""
    for name, other in zip(columns, parent_columns, strict=True):
        own, theirs = facts.columns[name], parent.columns[other]
        if own.sql_type != theirs.sql_type and own.sql_type.startswith(("text", "character varying")):
            added = f"{other}_text text GENERATED ALWAYS AS ({theirs.sql_name}::text) STORED"
            return f"ALTER TABLE {parent.name} ADD {added}, and refer to {other}_text"
    return None


def _update(facts: TableFacts, columns: Iterable[str]) -> str:
    return f"UPDATE ({', '.join(facts.columns[each].sql_name for each in columns)})"


def names_of(table: TableFacts, edge: _Edge | Link) -> tuple[str, ...]:
    """Return the names that a mapping can use for the link, the most specific first."""
    columns = ",".join(edge.columns)
    return (*(f"{each}.{columns}" for each in table.spellings), *table.spellings)


def without_spaces(name: str) -> str:
    """Return the name of a link without spaces around its commas."""
    return ",".join(each.strip() for each in name.split(","))


def _called(reference: Reference) -> str:
    where = "" if reference.where is None else f', where="{reference.where}"'
    return f'Reference("{reference.referencing}", "{reference.referenced}"{where})'


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
