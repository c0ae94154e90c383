"""write_loop: the statements of one loop of an emitted function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..emit.hand_over import Rows
from ..emit.links import find_links
from ..emit.loop import Carried, Loop
from ..emit.loop_index import Index
from ..emit.statements import (
    Statements,
    by_condition,
    delete,
    indented,
    under_conditions,
)
from ..graph import Value

if TYPE_CHECKING:
    from ..emit.write_function import Function


class LoopWriter:
    """Writes a loop, in the order in which its statements run.

    function: that the loop is in, with which it shares names. after: names that are
    read after the loop.
    """

    def __init__(self, function: Function, loop: Loop, after: Collection[str]) -> None:
        self.function, self.loop, self.after = function, loop, after
        self.names = function.names
        self.index = Index(loop)
        self.before: list[str] = []
        self.begin: list[tuple[str, str]] = []  # (condition, line)
        self.end: list[tuple[str, str]] = []
        self.made = {v.name for node in loop.body for v in node.results}
        # Where a value is first made.
        self.positions = {name: own[0] for name, own in loop.makers.items()}
        self.last = {
            v.name: o for o, node in enumerate(loop.body) for v in node.operands
        }
        # The last iteration's values, by name in the body.
        self.finals = {
            inner.name: name
            for name, inner, t in loop.instances()
            if t == loop.count - 1
        }
        # What is returned of some iterations: as what, and of which.
        self.handed: dict[str, tuple[str, list[int]]] = {}
        self.inside: set[str] = set()  # what is given or carried, as locals of the body
        # What is one value wherever both are given is one local.
        self.alike: dict[str, set[str]] = {}

    def write(self) -> tuple[list[str], set[str]]:
        """(statements, names that are set after the loop and read)."""
        self.take_scanned()
        self.name_handed()
        kept = [r for r in self.function.between.rows if r.loop is self.loop]
        self.before += [f"{self.function.rows_name(rows)} = {{}}" for rows in kept]
        left = [one for one in self.loop.carried if not self.carry(one)]
        body = self.body(kept)
        for rows in kept:
            self.keep(rows)
        for name, (text, own) in self.handed.items():
            line = f"{text} = {self.names[name]}"
            self.end.append((self.index.condition(own), line))
        self.end = by_condition(self.end)
        for at, one in enumerate(left, 1):
            times = self.loop.times_of(one.next.name)
            name, value = self.text(one.next), self.text(one.value)
            later = {*self.handed, *(other.next.name for other in left[at:])}
            gone = [] if one.next.name in later else [name]
            moved = [f"{value} = {name}", *delete(gone)]
            self.end += [(self.index.condition(times), line) for line in moved]
        there = self.leave()
        lines = [*under_conditions(self.begin), *body, *under_conditions(self.end)]
        lines = [*self.before, f"for i in {self.index.range}:", *indented(lines)]
        still = {self.names[name] for name in there}
        last = self.loop.count - 1
        over = [
            self.names[one.value.name]
            for one in self.loop.carried
            if last in self.loop.times_of(one.next.name)
        ]
        over = [*over, *map(self.names.__getitem__, sorted(self.loop.lasting))]
        return [*lines, *delete(name for name in over if name not in still)], there

    def text(self, v: Value) -> str:
        return self.function.name(v)

    # --- what comes in -------------------------------------------------------------

    def take_scanned(self) -> None:
        """Begins iterations with their parts of rows that an earlier loop left."""
        function, loop, index = self.function, self.loop, self.index
        taken: dict[tuple[int, tuple[int, ...]], tuple[Rows, dict[str, str]]] = {}
        listed: dict[tuple[int, ...], dict[Value, Sequence[Value]]] = {}
        again: list[tuple[str, str]] = []  # what several names stand for
        held: dict[str, dict[int, Value]] = {}  # by local: what it is in iterations
        for scanned in loop.scanned:
            inside = scanned.value.name
            if function.kind(scanned) == "table":
                texts = [function.tables[v.name] for v in scanned.values]
                self.names[inside] = index.text(texts, scanned.times)
                continue
            self.inside.add(inside)
            sources, others = function.between.parts_of(function.number, loop, scanned)
            for source in sources:
                key = id(source.rows), source.times
                _, own = taken.setdefault(key, (source.rows, {}))
                inner = source.value.name
                if inside not in self.names:
                    ours = dict(zip(scanned.times, scanned.values, strict=True))
                    known = held.get(own.get(inner, ""), {})
                    one = known and all(known.get(t, v) == v for t, v in ours.items())
                    self.names[inside] = own[inner] if one else function.fresh(inner)
                    held.setdefault(self.names[inside], {}).update(ours)
                    self.share(inside)
                name = own.setdefault(inner, self.names[inside])
                if name != self.names[inside]:
                    line = f"{self.names[inside]} = {name}"
                    again.append((index.condition(source.times), line))
            texts = list(map(self.text, others.values()))
            if others and not sources and index.turns(texts, scanned.times):
                in_turn = index.text(texts, scanned.times)
                line = f"{self.text(scanned.value)} = {in_turn}"
                self.begin.append((index.condition(scanned.times), line))
            elif others:
                listed.setdefault((*others,), {})[scanned.value] = [*others.values()]
        for (_, times), (rows, own) in taken.items():
            assert rows.shift is not None, "a loop reads rows in order"
            (first, step), (at, by) = rows.loop.index, rows.shift
            place = index.of(first + step * at, step * by)
            targets = ", ".join(own.get(v.name, "_") for v in rows.all)
            line = f"[{targets}] = {function.rows_name(rows)}.pop({place})"
            self.begin.append((index.condition(times), line))
        self.begin = by_condition(self.begin) + again
        tables = [*listed.items()]
        for at, (times, columns) in enumerate(tables, 1):
            later = (own for _, more in tables[at:] for own in more.values())
            self.list_given(times, columns, {v.name for own in later for v in own})

    def share(self, inside: str) -> None:
        """Notes that all names of the same local are one."""
        own = {n for n in self.inside if self.names.get(n) == self.names[inside]}
        self.alike.update(dict.fromkeys(own, own))

    def list_given(
        self,
        times: Sequence[int],
        listed: Mapping[Value, Sequence[Value]],
        others: Collection[str],
    ) -> None:
        """Puts operands that follow no rule into a dict, row by row. listed: value of
        the body -> its values in these iterations. others: names that are listed
        later."""
        function, index = self.function, self.index
        name = function.fresh("given")
        columns = (map(self.text, own) for own in listed.values())
        rows = [f"[{', '.join(row)}]" for row in zip(*columns, strict=True)]
        pairs = zip(times, rows, strict=True)
        entries = (f"{index.keys[t]}: {row}" for t, row in pairs)
        self.before.append(f"{name} = {{{', '.join(entries)}}}")
        gone = {v.name for own in listed.values() for v in own} - {*self.after, *others}
        gone -= {one.first.name for one in self.loop.carried if one.first}
        gone -= self.last.keys()
        self.before += delete(sorted(self.names[n] for n in gone if n in self.names))
        for n in gone:
            self.names.pop(n, None)
        own = ", ".join(map(self.text, listed))
        line = f"[{own}] = {name}.pop({index.of(*self.loop.index)})"
        self.begin.append((index.condition(times), line))

    def carry(self, one: Carried) -> bool:
        """Name what an iteration hands to the next; whether the next value can have the
        name at once, as nobody reads the old one any more."""
        loop = self.loop
        if one.first is not None:
            first = self.text(one.first)
            mine = first.isidentifier() and one.first.name in self.names
            others = {*self.after, *self.last}
            alone = sum(c.first == one.first for c in loop.carried) == 1
            if mine and alone and one.first.name not in others:
                self.names[one.value.name] = self.names.pop(one.first.name)
            else:
                self.before.append(f"{self.text(one.value)} = {first}")
        self.inside.add(one.value.name)
        alone = sum(c.next == one.next for c in loop.carried) == 1
        alone &= one.next.name not in self.names  # what is returned has its own
        read = self.last.get(one.value.name, -1)
        if alone and read <= self.positions[one.next.name]:
            self.names[one.next.name] = self.text(one.value)
            return True
        return False

    def bound(self) -> dict[str, set[int]]:
        """Name in the body -> the iterations that have it, when they begin (what is
        carried or given) or once they have made it."""
        loop, every = self.loop, set(range(self.loop.count))
        turns = {name: set(loop.times_of(name)) for name in loop.makers}
        for one in loop.carried:
            own = {t + 1 for t in turns[one.next.name]} | ({0} if one.first else set())
            turns[one.value.name] = own & every
        turns |= {one.value.name: {*one.times} for one in loop.scanned}
        for name in loop.lasting:
            turns[name] = every - {*range(min(turns[name]))}
        return turns

    # --- what it does --------------------------------------------------------------

    def name_handed(self) -> None:
        """Names the function's results by the layer's number; results of some
        iterations alone are locals, stored at their end."""
        texts: dict[str, dict[int, str]] = {}
        for name, inner, t in self.loop.instances():
            if name in self.function.tables:
                texts.setdefault(inner.name, {})[t] = self.function.tables[name]
        for name, own in texts.items():
            text = self.index.text([*own.values()], [*own])
            if len(own) == len(self.loop.times_of(name)):
                self.names[name] = text
            else:
                self.handed[name] = text, [*own]

    def body(self, kept: Sequence[Rows]) -> list[str]:
        """The statements of an iteration. kept: what others read of it later."""
        stays = {one.next.name for one in self.loop.carried} | self.loop.lasting
        stays |= self.handed.keys()
        stays |= {name for name, final in self.finals.items() if final in self.after}
        function, alive, turns = self.function, self.function.alive, self.bound()
        read_later = {name for rows in kept for name in rows.values}
        for rows in kept:
            for name in rows.values:
                turns[name] = turns[name] - rows.iterations
        stays |= {name for name, own in turns.items() if not own}
        body, links = Statements(alive.peak), self.links({*stays, *read_later})
        waiting: list[int] = []  # what the next statement has in it
        for o, node in enumerate(self.loop.body):
            waiting.append(o)
            if o in links:
                self.names[node.out.name] = function.expression(node, self.index)
                continue
            own = [n for one in waiting for n in self.loop.nodes(one)]
            times, when = self.loop.times(o), self.condition(o)
            t = 1 if 1 in times else times[0]
            line = function.statement(node, self.index, t)
            results = {self.text(v) for v in node.results}
            if when:  # elsewhere the names stand for what they did
                body.end(results)
            body.add([line], alive.level(own), when)
            body.again(results)
            read = [v for one in waiting for v in self.loop.body[one].operands]
            original = self.originals(waiting)
            stays |= {self.loop.body[one].out.name for one in waiting[:-1]}  # no names
            waiting.clear()
            for v in dict.fromkeys((*read, *node.results)):
                alike = self.alike.get(v.name, {v.name})
                if alike & stays or any(self.last.get(n, o) > o for n in alike):
                    continue
                ours = v.name in self.inside and self.text(v) not in results
                if ours or v.name in self.made:
                    freed = alive.freed(original[v.name], self.loop.nodes(o)[0])
                    own_turns = set[int]().union(*(turns[name] for name in alike))
                    there = self.index.condition(own_turns)
                    body.free([(self.text(v), freed)], there)
        return body.end()

    def originals(self, places: Sequence[int]) -> dict[str, str]:
        """The names of nodes' results in the first iteration that runs them."""
        names: dict[str, str] = {}
        for o in places:
            node, first = self.loop.body[o], self.loop.nodes(o)[0]
            own = (*node.operands, *node.outs), (*first.operands, *first.outs)
            for inner, v in zip(*own, strict=True):
                if inner is not None and v is not None:
                    names[inner.name] = v.name
        return names

    def links(self, stays: Collection[str]) -> set[int]:
        """Positions of nodes that are written within the only node that reads them."""
        if not self.function.chains:
            return set()
        function, loop = self.function, self.loop
        keep = {*stays, *self.made.intersection(self.names)}
        ends = {o for name, o in self.last.items() if name not in stays}
        tables = (one for one in loop.scanned if function.kind(one) == "table")
        standing = {*function.tables, *(one.value.name for one in tables)}
        when = list(map(self.condition, range(len(loop.body))))
        return find_links(loop.body, keep, ends, standing, when)

    def condition(self, o: int) -> str:
        """The condition under which a node of the body runs."""
        return self.index.condition(self.loop.times(o))

    def keep(self, rows: Rows) -> None:
        """Keep for another loop, or function, what it reads of an iteration."""
        row = f"{self.function.rows_name(rows)}[{self.index.of(*self.loop.index)}]"
        condition = self.index.condition(rows.iterations)
        early, late = rows.row(carried=True), rows.row(carried=False)
        if early:  # what is carried has its value only as long as nobody replaces it
            values = ", ".join(map(self.text, early))
            self.begin.append((condition, f"{row} = [{values}]"))
        if late:
            values = ", ".join(map(self.text, late))
            self.end.append((condition, f"{row} {'+=' if early else '='} [{values}]"))

    def leave(self) -> set[str]:
        """Names the last iteration's values that are read later; returns the names."""
        there = set()
        for inner, final in self.finals.items():
            if final in self.after and final not in self.function.tables:
                self.names[final] = self.names[inner]
                there.add(final)
        for one in self.loop.carried:
            final = self.finals.get(one.next.name, "")
            if final in there:
                self.names[final] = self.names[one.value.name]
        return there
