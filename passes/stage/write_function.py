"""write_function: the statements of one emitted function."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from passes.graph import LAYER, Node, Value
from passes.stage.hand_over import HandOver, Rows
from passes.stage.loops import Carried, Given, Item, Loop, Varying, numbered, series
from passes.stage.spell import constant, spell, targets

RESERVED = frozenset(
    {"c", "p", "g", "k", "b", "i", "saved", "made", "torch", "F", "kernels", "aten"}
)
RESERVED |= {"inf", "del", "return", "lambda", "and", "or", "not", "is", "in", "_"}
RESERVED |= {"for", "if", "reversed", "range"}


class Function:
    """Writes a function, statement by statement.

    texts: value -> its named dims. tables: value -> how what is there anyway is read.
    between, number: what this part has of others. device: where it makes tensors. taken: names that mean
    something else.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        tables: Mapping[str, str],
        between: HandOver,
        number: int,
        device: str = "c.device",
        taken: Collection[str] = (),
    ) -> None:
        self.texts, self.tables, self.device = texts, tables, device
        self.between, self.number = between, number
        self.names: dict[str, str] = {}
        self.taken = {*RESERVED, *taken}  # names that no other local may have
        self.unpacked: set[tuple[int, int]] = set()
        self._rows_names: dict[int, str] = {}

    # --- names ---------------------------------------------------------------------

    def name(self, v: Value) -> str:
        """How a value is read, the same at every mention."""
        if v.name in self.names:
            return self.names[v.name]
        if v.name in self.tables:
            return self.tables[v.name]
        if v.name not in self.names:
            self.names[v.name] = self.fresh(self.between.nickname(v.name))
        return self.names[v.name]

    def fresh(self, wanted: str) -> str:
        stem = re.sub(r"\W+", "_", wanted.partition("@")[0])
        name, count = stem, 0
        while name in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name

    def rows_name(self, rows: Rows) -> str:
        if id(rows) not in self._rows_names:
            self._rows_names[id(rows)] = self.fresh("rows")
        return self._rows_names[id(rows)]

    # --- the whole -----------------------------------------------------------------

    def arrive(
        self, given: Sequence[Value], saved: Sequence[Value], rows: Sequence[Rows]
    ) -> list[str]:
        """Unpack what an earlier function saved. given: what comes as arguments."""
        for v in given:
            self.name(v)
        names = [*map(self.name, saved), *map(self.rows_name, rows)]
        self.arrived = [*given, *saved]
        return [f"[{', '.join(names)}] = saved", "saved.clear()"] if names else []

    def body(self, items: Sequence[Item], results: Iterable[Value]) -> list[str]:
        """The items as text, with each local deleted after its last use."""
        keep = {v.name for v in results}
        arrived = {v.name: v for v in getattr(self, "arrived", ())}
        reads = [self._reads(item) for item in items]
        last: dict[str, int] = dict.fromkeys(arrived, -1)
        for i, own in enumerate(reads):
            last.update(dict.fromkeys(own, i))
        local = set(arrived)
        lines = _delete(self.names[n] for n in arrived if last[n] < 0 and n not in keep)
        for i, item in enumerate(items):
            after = {n for n, at in last.items() if at > i} | keep
            lines += self._take_singles(item, local)
            if isinstance(item, Node):
                lines.append(self.statement(item))
                local.update(v.name for v in item.results)
                mentioned = (v.name for v in (*item.operands, *item.results))
            else:
                own, made = self._loop(item, after)
                lines += own
                local |= made
                mentioned = (*reads[i], *made)
            dead = [
                self.names[n]
                for n in dict.fromkeys(mentioned)
                if n in local and n not in after and n in self.names
            ]
            lines += _delete(dead)
        return lines

    def _reads(self, item: Item) -> dict[str, Value]:
        """What an item reads by name."""
        if isinstance(item, Node):
            return {v.name: v for v in item.operands}
        own = {v.name for node in item.body for v in node.results}
        own |= {c.value.name for c in item.carried}
        own |= {g.value.name for g in item.given}
        found = {v.name: v for node in item.body for v in node.operands}
        found = {name: v for name, v in found.items() if name not in own}
        found |= {c.first.name: c.first for c in item.carried}
        for given in item.given:
            if self._kind(item, given) == "listed":
                found |= {v.name: v for v in given.values}
        return found

    def _take_singles(self, item: Item, local: set[str]) -> list[str]:
        """Take what this item is the first to read of one iteration of a loop."""
        lines = []
        for v in self._reads(item).values():
            found = self.between.single(self.number, v)
            if found is None or v.name in self.names:
                continue
            rows, _, t = found
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

    def statement(self, node: Node, index: _Index | None = None) -> str:
        choose = str if index is None else index.choose
        text = spell(node, self.name, choose, self.device)
        if left := targets(node, self.name):
            text = f"{left} = {text}"
        dims = [self.texts.get(v.name.partition("@")[0], "") for v in node.results]
        notes = [d for d in dict.fromkeys(dims) if d]
        where = str(node.where)
        if index is not None:
            where = index.module(where, node)
        comment = "  ".join([*notes, *([where] if where else [])])
        return f"{text}  # {comment}" if comment else text

    # --- loops ---------------------------------------------------------------------

    def _kind(self, loop: Loop, given: Given) -> str:
        """How the values that a loop is given are read."""
        if (self.number, id(loop), given.value.name) in self.between.found:
            return "rows"
        texts = [self.tables.get(v.name) for v in given.values]
        return "listed" if None in texts else "table"

    def _loop(self, loop: Loop, after: Collection[str]) -> tuple[list[str], set[str]]:
        """(statements, what is there afterwards or is to be deleted, by name).

        after: what is read after it.
        """
        index = _Index(loop)
        before: list[str] = []
        begin: list[str] = []
        end: list[str] = []
        inside: set[str] = set()  # names of locals of the body
        # What it is given.
        taken: dict[int, tuple[Rows, list[tuple[Value, Given]]]] = {}
        listed: list[Given] = []
        for given in loop.given:
            kind = self._kind(loop, given)
            if kind == "rows":
                key = (self.number, id(loop), given.value.name)
                rows, inner = self.between.found[key]
                taken.setdefault(id(rows), (rows, []))[1].append((inner, given))
            elif kind == "table":
                texts = [self.tables[v.name] for v in given.values]
                self.names[given.value.name] = index.text(texts)
            else:
                listed.append(given)
        for rows, pairs in taken.values():
            names = {inner.name: self.fresh(inner.name) for inner, _ in pairs}
            for inner, given in pairs:
                self.names[given.value.name] = names[inner.name]
            inside.update(given.value.name for _, given in pairs)
            assert rows.shift is not None, "a loop reads rows in order"
            own = ", ".join(names.get(v.name, "_") for v in rows.all)
            first, step = rows.loop.index
            at, by = rows.shift
            key_text = index.of(first + step * at, step * by)
            begin.append(f"[{own}] = {self.rows_name(rows)}.pop({key_text})")
        if listed:
            name = self.fresh("given")
            columns = zip(*([self.name(v) for v in g.values] for g in listed), strict=True)
            entries = [
                f"{key}: [{', '.join(column)}]"
                for key, column in zip(index.keys, columns, strict=True)
            ]
            before.append(f"{name} = {{{', '.join(entries)}}}")
            own = ", ".join(self.name(g.value) for g in listed)
            begin.append(f"[{own}] = {name}.pop({index.of(*loop.index)})")
            inside.update(g.value.name for g in listed)
            gone = {v.name for g in listed for v in g.values} - set(after)
            gone -= {c.first.name for c in loop.carried}
            gone -= {v.name for node in loop.body for v in node.operands}
            before += _delete(sorted(self.names[n] for n in gone if n in self.names))
            for n in gone:
                self.names.pop(n, None)
        # What it keeps for others.
        kept = [r for r in self.between.rows if r.loop is loop]
        keeps = {name for r in kept for name in r.values}
        for rows in kept:
            before.append(f"{self.rows_name(rows)} = {{}}")
        last = _last_uses(loop)
        made = {v.name: v for node in loop.body for v in node.results}
        finals = {inner.name: name for name, inner, t in loop.instances() if t == loop.count - 1}
        # What it carries.
        ends: list[str] = []
        carried_from: set[str] = set()
        for one in loop.carried:
            carried_from.add(one.next.name)
        left: set[str] = set()
        positions = {v.name: o for o, node in enumerate(loop.body) for v in node.results}
        for one in loop.carried:
            first = self.name(one.first)
            simple = first.isidentifier() and one.first.name not in after
            simple = simple and one.first.name in self.names
            simple = simple and sum(c.first == one.first for c in loop.carried) == 1
            simple = simple and one.first.name not in _plain_reads(loop)
            if simple:
                self.names[one.value.name] = first
                self.names.pop(one.first.name)
            else:
                before.append(f"{self.name(one.value)} = {first}")
            name = self.names[one.value.name]
            alone = sum(c.next == one.next for c in loop.carried) == 1
            early = last.get(one.value.name, -1) <= positions[one.next.name]
            if alone and early:
                self.names[one.next.name] = name
            else:
                ends.append(f"{name} = {self.name(one.next)}")
                left.add(one.next.name)
            inside.add(one.value.name)
        # The body itself.
        handed = self._handed(loop, index)
        self.names |= handed
        for o, node in enumerate(loop.body):
            end.append(self.statement(node, index))
            dead = []
            for v in dict.fromkeys((*node.operands, *node.results)):
                if v.name not in made and v.name not in inside:
                    continue
                if last.get(v.name, positions.get(v.name, -1)) != o:
                    continue
                if v.name in keeps or v.name in carried_from or v.name in self.tables:
                    continue
                if finals.get(v.name) in after:
                    continue
                name = self.names.get(v.name)
                rebound = any(self.names.get(w.name) == name for w in node.results if w != v)
                if name is not None and not rebound:
                    dead.append(name)
            end += _delete(dead)
        for rows in kept:
            condition = index.among(rows)
            key_text = index.of(*loop.index)
            name = self.rows_name(rows)
            early_row, late_row = rows.row(carried=True), rows.row(carried=False)
            start = f"[{', '.join(map(self.name, early_row))}]"
            rest = f"[{', '.join(map(self.name, late_row))}]"
            if early_row:
                begin += _only_if(condition, f"{name}[{key_text}] = {start}")
                if late_row:
                    end += _only_if(condition, f"{name}[{key_text}] += {rest}")
            else:
                end += _only_if(condition, f"{name}[{key_text}] = {rest}")
        end += ends
        gone = [self.names[n] for n in sorted(left) if finals[n] not in after]
        end += _delete(dict.fromkeys(gone))
        # What is left of the last iteration.
        there = set()
        for n, final in finals.items():
            if n in self.names and final in after:
                self.names[final] = self.names[n]
                there.add(final)
        for one in loop.carried:
            final = finals[one.next.name]
            if final in after:
                self.names[final] = self.names[one.next.name]
                there.add(final)
        still = {self.names[f] for f in there}
        over = [n for n in dict.fromkeys(self.names[c.value.name] for c in loop.carried) if n not in still]
        lines = [*before, f"for i in {index.range}:"]
        lines += ["    " + line for line in (*begin, *end)]
        lines += _delete(over)
        for name in handed:
            del self.names[name]
        return lines, there

    def _handed(self, loop: Loop, index: _Index) -> dict[str, str]:
        """Names of values of the body that a function returns by the layer's number."""
        texts: dict[str, list[str]] = {}
        for name, inner, _ in loop.instances():
            if name in self.tables:
                texts.setdefault(inner.name, []).append(self.tables[name])
        return {name: index.text(own) for name, own in texts.items()}


def _plain_reads(loop: Loop) -> set[str]:
    return {v.name for node in loop.body for v in node.operands}


def _last_uses(loop: Loop) -> dict[str, int]:
    found: dict[str, int] = {}
    for o, node in enumerate(loop.body):
        for v in node.operands:
            found[v.name] = o
    return found


def _only_if(condition: str, line: str) -> list[str]:
    return [f"if {condition}:", "    " + line] if condition else [line]


def _delete(names: Iterable[str]) -> list[str]:
    found = [name for name in dict.fromkeys(names) if name.isidentifier()]
    return [f"del {', '.join(found)}"] if found else []


class _Index:
    """The variable of a loop: what is a series in its iterations, as text."""

    def __init__(self, loop: Loop) -> None:
        self.count = loop.count
        self.first, self.step = loop.index

    @property
    def keys(self) -> list[int]:
        return [self.first + self.step * t for t in range(self.count)]

    @property
    def range(self) -> str:
        end = self.first + self.step * self.count
        if self.step == 1:
            return f"range({end})" if self.first == 0 else f"range({self.first}, {end})"
        if self.step == -1:
            low = end + 1
            inner = f"range({self.first + 1})" if low == 0 else f"range({low}, {self.first + 1})"
            return f"reversed({inner})"
        return f"range({self.first}, {end}, {self.step})"

    def of(self, first: int, step: int) -> str:
        """first + step * iteration."""
        if step % self.step:
            number = f"(i - {self.first}) // {self.step}" if self.first else f"i // {self.step}"
            return f"{first} + {step} * ({number})"
        times = step // self.step
        offset = first - times * self.first
        if times == 0:
            return str(offset)
        scaled = {1: "i", -1: "-i"}.get(times, f"{times} * i")
        if times == -1 and offset:
            return f"{offset} - i"
        return scaled if not offset else f"{scaled} {'+' if offset > 0 else '-'} {abs(offset)}"

    def choose(self, varying: Varying) -> str:
        if (found := series(varying.values)) is not None:
            return self.of(*found)
        pairs = zip(self.keys, map(constant, varying.values), strict=True)
        return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}[i]"

    def text(self, texts: Sequence[str]) -> str:
        """One of several expressions: by a number in it, if they differ in that."""
        parts = numbered(texts)
        if parts is None:
            pairs = zip(self.keys, texts, strict=True)
            return f"{{{', '.join(f'{key}: {text}' for key, text in pairs)}}}[i]"
        own = (p if isinstance(p, str) else f"{{{self.of(*p)}}}" for p in parts)
        return "".join(own).replace('["', '[f"')

    def module(self, where: str, node: Node) -> str:
        """A comment, with the layer's number as the variable."""
        match = LAYER.search(node.where.module)
        if match is None:
            return where
        apart = int(match[1]) - self.first - self.step  # of the second iteration
        number = "i" if not apart else f"(i{apart:+d})"
        sign = "+" if match[1].startswith("+") else ""
        module = node.where.module
        there = f"{module[: match.start()]}{sign}{number}{module[match.end() :]}"
        return where.replace(module, there)

    def among(self, rows: Rows) -> str:
        """The condition that an iteration is one of those that are read."""
        own = sorted(self.first + self.step * t for t in rows.iterations)
        if len(own) == self.count:
            return ""
        if len(own) == 1:
            return f"i == {own[0]}"
        if own == list(range(own[0], own[-1] + 1)):
            return f"i in range({own[0]}, {own[-1] + 1})"
        return f"i in {set(own)}"
