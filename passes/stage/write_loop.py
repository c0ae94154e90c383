"""write_loop: the statements of one loop of an emitted function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ..graph import LAYER, Node, Value
from ..stage.hand_over import Rows
from ..stage.layer_numbers import in_turn, range_text
from ..stage.links import find_links
from ..stage.loop import Carried, Loop, Scanned, Varying, numbered, series
from ..stage.spell import constant
from ..stage.statements import Statements, delete, indented, only_if

if TYPE_CHECKING:
    from ..stage.write_function import Function


class Index:
    """The variable of a loop: what is a series in its iterations, as text."""

    def __init__(self, loop: Loop) -> None:
        self.count = loop.count
        self.first, self.step = loop.index

    @property
    def keys(self) -> list[int]:
        """The number that each iteration goes by."""
        return [self.first + self.step * t for t in range(self.count)]

    @property
    def range(self) -> str:
        """The iterations, as an expression."""
        return range_text(self.first, self.keys[-1], self.step)

    def of(self, first: int, step: int) -> str:
        """first + step * iteration."""
        if step % self.step:
            apart = f"(i - {self.first})" if self.first else "i"
            return f"{first} + {step} * ({apart} // {self.step})"
        times = step // self.step
        offset = first - times * self.first
        if not times:
            return str(offset)
        scaled = {1: "i", -1: "-i"}.get(times, f"{times} * i")
        if not offset:
            return scaled
        return f"{scaled} {'+' if offset > 0 else '-'} {abs(offset)}"

    def choose(self, varying: Varying) -> str:
        """A constant in its iteration."""
        progression = series(varying.values)
        if progression:
            return self.of(
                progression[0] - progression[1] * varying.start, progression[1]
            )
        return self._one_of(map(constant, varying.values), varying.start)

    def text(self, texts: Sequence[str], start: int = 0) -> str:
        """One of several expressions, of iterations from `start` on: by a number in it,
        if they differ in that."""
        parts = numbered(texts) if len(texts) > 1 else [texts[0]]
        if parts is None:
            return self._one_of(texts, start)
        own = (
            p if isinstance(p, str) else f"{{{self.of(p[0] - p[1] * start, p[1])}}}"
            for p in parts
        )
        text = "".join(own)
        return text.replace('["', '[f"') if text != texts[0] else text

    def _one_of(self, texts: Iterable[str], start: int) -> str:
        own = list(texts)
        if turns := self.turns(own, start):
            return f"({', '.join(turns)})[i % {len(turns)}]"
        pairs = zip(self.keys[start:], own, strict=False)
        return f"{{{', '.join(f'{key}: {text}' for key, text in pairs)}}}[i]"

    def turns(self, texts: Sequence[str], start: int) -> list[str]:
        """What takes turns in the iterations from `start` on, as i % len says; [] if
        nothing does so, twice at least."""
        count = len(texts)
        for n in range(2, count // 2 + 1) if abs(self.step) == 1 else ():
            if all(text == texts[t % n] for t, text in enumerate(texts)):
                by_turn = {self.keys[start + t] % n: texts[t] for t in range(n)}
                return [by_turn[turn] for turn in range(n)]
        return []

    def remark(self, node: Node) -> str:
        """Where a node of the body comes from, its layer as the variable."""
        module = node.location.module
        if (match := LAYER.search(module)) is None:
            return str(node.location)
        apart = int(match[1]) - self.first - self.step  # of the second iteration
        number = "i" if not apart else f"(i{apart:+d})"
        sign = "+" if match[1].startswith("+") else ""
        there = f"{module[: match.start()]}{sign}{number}{module[match.end() :]}"
        return str(node.location).replace(module, there)

    def condition(self, iterations: Collection[int]) -> str:
        """That an iteration is one of these; "" for all, or none."""
        times = sorted(iterations)
        own = sorted(self.first + self.step * t for t in times)
        if len(own) in (0, self.count):
            return ""
        if len(own) == 1:
            return f"i == {own[0]}"
        if times == list(range(times[0], times[-1] + 1)):
            if own[0] == min(self.keys):
                return f"i < {own[-1] + 1}"
            if own[-1] == max(self.keys):
                return f"i >= {own[0]}"
            return f"i in range({own[0]}, {own[-1] + 1})"
        if turns := in_turn(own, sorted(self.keys)):
            return turns
        return f"i in {set(own)}"


class LoopWriter:
    """Writes a loop, in the order in which its statements run.

    function: what it is part of, whose names it takes and gives. after: names of what
    is read after the loop.
    """

    def __init__(self, function: Function, loop: Loop, after: Collection[str]) -> None:
        self.function, self.loop, self.after = function, loop, after
        self.names = function.names
        self.index = Index(loop)
        self.before: list[str] = []
        self.begin: list[str] = []
        self.end: list[str] = []
        self.made = {v.name for node in loop.body for v in node.results}
        self.positions = {
            v.name: o for o, node in enumerate(loop.body) for v in node.results
        }
        self.last = {
            v.name: o for o, node in enumerate(loop.body) for v in node.operands
        }
        # The last iteration's values, by name in the body.
        self.finals = {
            inner.name: name
            for name, inner, t in loop.instances()
            if t == loop.count - 1
        }
        # What a value of the body is in the first iteration that has it.
        self.original: dict[str, str] = {}
        for name, inner, _ in loop.instances():
            self.original.setdefault(inner.name, name)
        self.original |= {
            one.value.name: one.first.name for one in loop.carried if one.first
        }
        self.original |= {one.value.name: one.values[0].name for one in loop.scanned}
        self.inside: set[str] = set()  # what is given or carried, as locals of the body

    def write(self) -> tuple[list[str], set[str]]:
        """(statements, names of what is there afterwards and read)."""
        self.take_scanned()
        self.name_handed()
        kept = [r for r in self.function.between.rows if r.loop is self.loop]
        self.before += [f"{self.function.rows_name(rows)} = {{}}" for rows in kept]
        left = [one for one in self.loop.carried if not self.carry(one)]
        body = self.body({name for rows in kept for name in rows.values})
        for rows in kept:
            self.keep(rows)
        for one in left:
            times = self.loop.times(self.positions[one.next.name])
            name, value = self.text(one.next), self.text(one.value)
            moved = [f"{value} = {name}", *delete([name])]
            self.end += only_if(self.index.condition(times), *moved)
        there = self.leave()
        lines = [*self.begin, *body, *self.end]
        lines = [*self.before, f"for i in {self.index.range}:", *indented(lines)]
        still = {self.names[name] for name in there}
        last = self.loop.count - 1
        over = (
            self.names[one.value.name]
            for one in self.loop.carried
            if last in self.loop.times(self.positions[one.next.name])
        )
        return [*lines, *delete(name for name in over if name not in still)], there

    def text(self, v: Value) -> str:
        return self.function.name(v)

    # --- what comes in -------------------------------------------------------------

    def take_scanned(self) -> None:
        """Begins iterations with their parts of rows that an earlier loop left."""
        function, loop, index = self.function, self.loop, self.index
        taken: dict[int, tuple[Rows, dict[str, str]]] = {}
        listed = []
        for scanned in loop.scanned:
            kind = function.kind(loop, scanned)
            if kind == "table":
                texts = [function.tables[v.name] for v in scanned.values]
                self.names[scanned.value.name] = index.text(texts, scanned.start)
            elif kind == "listed":
                texts = [self.text(v) for v in scanned.values]
                if index.turns(texts, scanned.start):
                    in_turn = index.text(texts, scanned.start)
                    self.begin.append(f"{self.text(scanned.value)} = {in_turn}")
                    self.inside.add(scanned.value.name)
                else:
                    listed.append(scanned)
            else:
                rows, inner = function.between.rows_of[
                    function.number, id(loop), scanned.value.name
                ]
                _, own = taken.setdefault(id(rows), (rows, {}))
                if inner.name not in own:
                    own[inner.name] = function.fresh(inner.name)
                self.names[scanned.value.name] = own[inner.name]
                self.inside.add(scanned.value.name)
        for rows, own in taken.values():
            assert rows.shift is not None, "a loop reads rows in order"
            (first, step), (at, by) = rows.loop.index, rows.shift
            key = index.of(first + step * at, step * by)
            targets = ", ".join(own.get(v.name, "_") for v in rows.all)
            self.begin.append(f"[{targets}] = {function.rows_name(rows)}.pop({key})")
        if listed:
            self.list_given(listed)

    def list_given(self, listed: Sequence[Scanned]) -> None:
        """Put what is given by no rule into a dict, row by row."""
        function, index = self.function, self.index
        name = function.fresh("given")
        columns = ([self.text(v) for v in g.values] for g in listed)
        rows = [f"[{', '.join(row)}]" for row in zip(*columns, strict=True)]
        pairs = zip(index.keys, rows, strict=True)
        entries = (f"{key}: {row}" for key, row in pairs)
        self.before.append(f"{name} = {{{', '.join(entries)}}}")
        gone = {v.name for g in listed for v in g.values} - set(self.after)
        gone -= {one.first.name for one in self.loop.carried if one.first}
        gone -= self.last.keys()
        self.before += delete(sorted(self.names[n] for n in gone if n in self.names))
        for n in gone:
            self.names.pop(n, None)
        own = ", ".join(self.text(g.value) for g in listed)
        self.begin.append(f"[{own}] = {name}.pop({index.of(*self.loop.index)})")
        self.inside.update(g.value.name for g in listed)

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
        read = self.last.get(one.value.name, -1)
        if alone and read <= self.positions[one.next.name]:
            self.names[one.next.name] = self.text(one.value)
            return True
        return False

    def bound(self) -> dict[str, set[int]]:
        """Names in the body that some iterations are without -> those that have them,
        when they begin (what is carried) or once they have made it."""
        loop, every = self.loop, set(range(self.loop.count))
        made = {v.name: o for o, node in enumerate(loop.body) for v in node.results}
        turns = {name: set(loop.times(o)) for name, o in made.items()}
        for one in loop.carried:
            own = {t + 1 for t in turns[one.next.name]} | ({0} if one.first else set())
            turns[one.value.name] = own & every
        return {name: own for name, own in turns.items() if own != every}

    # --- what it does --------------------------------------------------------------

    def name_handed(self) -> None:
        """Name what the function returns by the layer's number."""
        texts: dict[str, tuple[int, list[str]]] = {}
        for name, inner, t in self.loop.instances():
            if name in self.function.tables:
                _, own = texts.setdefault(inner.name, (t, []))
                own.append(self.function.tables[name])
        for name, (start, own) in texts.items():
            self.names[name] = self.index.text(own, start)

    def body(self, live_out: Collection[str]) -> list[str]:
        """The statements of an iteration. live_out: names that are read after it."""
        stays = {one.next.name for one in self.loop.carried}.union(live_out)
        stays |= {name for name, final in self.finals.items() if final in self.after}
        function, alive, bound = self.function, self.function.alive, self.bound()
        body, links = Statements(alive.peak), self.links(stays)
        waiting: list[int] = []  # what the next statement has in it
        for o, node in enumerate(self.loop.body):
            waiting.append(o)
            if o in links:
                self.names[node.out.name] = function.expression(node, self.index)
                continue
            own = [n for one in waiting for n in self.loop.nodes(one)]
            line, when = function.statement(node, self.index), self.condition(o)
            results = {self.text(v) for v in node.results}
            if when:  # elsewhere the names stand for what they did
                body.end(results)
            body.add([line], alive.level(own), when)
            body.again(results)
            read = [v for one in waiting for v in self.loop.body[one].operands]
            stays |= {self.loop.body[one].out.name for one in waiting[:-1]}  # no names
            waiting.clear()
            for v in dict.fromkeys((*read, *node.results)):
                if v.name in stays or self.last.get(v.name, o) > o:
                    continue
                ours = v.name in self.inside and self.text(v) not in results
                if ours or v.name in self.made:
                    original = self.original.get(v.name, v.name)
                    freed = alive.freed(original, self.loop.nodes(o)[0])
                    there = self.index.condition(bound.get(v.name, ()))
                    body.free([(self.text(v), freed)], there)
        return body.end()

    def links(self, stays: Collection[str]) -> set[int]:
        """Places of what is written where it is read, by as many iterations."""
        if not self.function.chains:
            return set()
        function, loop = self.function, self.loop
        keep = {*stays, *self.made.intersection(self.names)}
        ends = {o for name, o in self.last.items() if name not in stays}
        tables = (one for one in loop.scanned if function.kind(loop, one) == "table")
        standing = {*function.tables, *(one.value.name for one in tables)}
        when = list(map(self.condition, range(len(loop.body))))
        return find_links(loop.body, keep, ends, standing, when)

    def condition(self, o: int) -> str:
        """Under which a node of the body runs."""
        return self.index.condition(self.loop.times(o))

    def keep(self, rows: Rows) -> None:
        """Keep for another loop, or function, what it reads of an iteration."""
        row = f"{self.function.rows_name(rows)}[{self.index.of(*self.loop.index)}]"
        condition = self.index.condition(rows.iterations)
        early, late = rows.row(carried=True), rows.row(carried=False)
        if early:  # what is carried has its value only as long as nobody replaces it
            values = ", ".join(map(self.text, early))
            self.begin += only_if(condition, f"{row} = [{values}]")
        if late:
            values = ", ".join(map(self.text, late))
            self.end += only_if(condition, f"{row} {'+=' if early else '='} [{values}]")

    def leave(self) -> set[str]:
        """Name what is read of the last iteration; returns the names of its values."""
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
