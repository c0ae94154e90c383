"""write_function: the statements of one emitted function."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..builder import unused
from ..emit.hand_over import HandOver, Rows
from ..emit.links import find_links
from ..emit.loop import Item, Loop, Scanned
from ..emit.names import RESERVED, RESIDUALS
from ..emit.spell import spell, targets
from ..emit.statements import Statements
from ..emit.write_loop import Index, LoopWriter
from ..graph import Node, Value
from ..stage.storages import Alive


class Function:
    """Writes a function, statement by statement.

    texts: value -> its named dims. tables: value -> the expression of a value that
    exists anyway. between, number: the values that this part has from others. alive:
    the memory in use at each statement. device: where it makes tensors. taken: names
    with other meanings. chains: whether views of views are one statement.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        tables: Mapping[str, str],
        between: HandOver,
        number: int,
        alive: Alive,
        device: str = "c.device",
        taken: Collection[str] = (),
        chains: bool = True,
    ) -> None:
        self.texts, self.tables, self.device = texts, tables, device
        self.alive, self.chains = alive, chains
        self.between, self.number = between, number
        self.names: dict[str, str] = {}
        self.taken = {*RESERVED, *taken}  # names that no other local may have
        self.arrived: Sequence[Value] = ()
        self._rows_names: dict[int, str] = {}

    # --- names ---------------------------------------------------------------------

    def name(self, v: Value) -> str:
        """How a value is read, the same at every mention."""
        if v.name in self.names:
            return self.names[v.name]
        if v.name in self.tables:
            return self.tables[v.name]
        self.names[v.name] = self.fresh(self.between.nickname(v.name))
        return self.names[v.name]

    def fresh(self, wanted: str) -> str:
        """Returns an unused identifier close to the wanted name."""
        stem = re.sub(r"\W+", "_", wanted.partition("@")[0])
        # "0.weight" is left of a module that is one of a list, inside a layer.
        name = unused(stem if stem.isidentifier() else f"_{stem}", self.taken)
        self.taken.add(name)
        return name

    def rows_name(self, rows: Rows) -> str:
        if id(rows) not in self._rows_names:
            self._rows_names[id(rows)] = self.fresh("rows")
        return self._rows_names[id(rows)]

    # --- the whole -----------------------------------------------------------------

    def arrive(
        self,
        arguments: Sequence[Value],
        residuals: Sequence[Value],
        rows: Sequence[Rows],
    ) -> list[str]:
        """Unpacks residuals and rows of an earlier function. arguments: as they are."""
        for v in arguments:
            self.name(v)
        names = [*map(self.name, residuals), *map(self.rows_name, rows)]
        self.arrived = [*arguments, *residuals]
        taken = f"[{', '.join(names)}] = {RESIDUALS}"
        return [taken, f"{RESIDUALS}.clear()"] if names else []

    def body(self, items: Sequence[Item], results: Sequence[Value]) -> list[str]:
        """The items as text, with each local deleted after its last use."""
        keep = {v.name for v in results}
        arrived = {v.name: v for v in self.arrived}
        reads = [self._reads(item) for item in items]
        last: dict[str, int] = dict.fromkeys(arrived, -1)
        for i, read in enumerate(reads):
            last.update(dict.fromkeys(read, i))
        local = set(arrived)
        among_loops = [
            n
            for item, r in zip(items, reads, strict=True)
            if isinstance(item, Loop)
            for n in r
        ]
        made = {v.name for n in items if isinstance(n, Node) for v in n.results}
        ends = {last[n] for n in last if n in {*arrived, *made} - keep}
        links: set[int] = set()
        if self.chains:
            links = find_links(items, {*keep, *among_loops}, ends, self.tables)
        waiting: list[Node] = []  # what is written where it is read
        body = Statements(self.alive.peak)
        unread = (n for n in arrived if last[n] < 0 and n not in keep)
        body.free((self.names[n], arrived[n].bytes) for n in unread)
        for i, item in enumerate(items):
            body.add(self._take_singles(reads[i].values(), local))
            if isinstance(item, Node) and i in links:
                self.names[item.out.name] = self.expression(item)
                waiting.append(item)
                continue
            if isinstance(item, Node):
                body.add([self.statement(item)], self.alive.level([*waiting, item]))
                local.update(v.name for v in item.results)
                own = (v for n in (*waiting, item) for v in n.operands)
                mentioned = [v.name for v in (*own, *item.results)]
                waiting.clear()
            else:
                after = {n for n, at in last.items() if at > i} | keep
                text, made = LoopWriter(self, item, after).write()
                body.end()
                body.add(text)
                local |= made
                mentioned = [*reads[i], *made]
            done = item if isinstance(item, Node) else item.unrolled()[-1]
            dead = [
                (self.names[n], self.alive.freed(n, done))
                for n in dict.fromkeys(mentioned)
                if n in local and n in self.names
                if last.get(n, i) <= i and n not in keep
            ]
            body.free(dead)
        body.add(self._take_singles(results, local))
        return body.lines  # the rest goes when the function returns

    def _reads(self, item: Item) -> dict[str, Value]:
        """The values that an item reads by name."""
        if isinstance(item, Node):
            return {v.name: v for v in item.operands}
        reads = item.outside
        reads |= {c.first.name: c.first for c in item.carried if c.first}
        for scanned in item.scanned:
            if self.kind(scanned) != "table":
                _, others = self.between.parts_of(self.number, item, scanned)
                reads |= {v.name: v for v in others.values()}
        return reads

    def _take_singles(self, read: Iterable[Value], local: set[str]) -> list[str]:
        """Take what is read for the first time of one iteration of a loop."""
        lines = []
        for v in read:
            single = self.between.single(self.number, v)
            if single is None or v.name in self.names:
                continue
            rows, _, t = single
            values = {
                inner.name: name
                for name, inner, at in rows.loop.instances()
                if at == t and inner.name in rows.values
            }
            wanted = []
            for inner in rows.all:
                own = values[inner.name]
                if (self.number, own) in self.between.singles:
                    self.names[own] = self.fresh(inner.name)
                    wanted.append(self.names[own])
                    local.add(own)
                else:
                    wanted.append("_")
            first, step = rows.loop.index
            key = first + step * t
            lines.append(f"[{', '.join(wanted)}] = {self.rows_name(rows)}.pop({key})")
        return lines

    def expression(self, node: Node, index: Index | None = None) -> str:
        choose = str if index is None else index.choose
        return spell(node, self.name, choose, self.device)

    def statement(self, node: Node, index: Index | None = None, t: int = 0) -> str:
        """The line of a node: its call, named dims and place in the source. t: the
        iteration of a loop that it is from."""
        text = self.expression(node, index)
        if left := targets(node, self.name):
            text = f"{left} = {text}"
        dims = [self.texts.get(v.name.partition("@")[0], "") for v in node.results]
        notes = [d for d in dict.fromkeys(dims) if d]
        where = str(node.location) if index is None else index.remark(node, t)
        comment = "  ".join([*notes, *([where] if where else [])])
        return f"{text}  # {comment}" if comment else text

    def kind(self, scanned: Scanned) -> str:
        """How the values that a loop is given are read."""
        texts = [self.tables.get(v.name) for v in scanned.values]
        if None not in texts:
            return "table"
        return "kept"
