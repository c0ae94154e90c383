"""emit: a rank's stage -> readable Python.

What runs between two collectives is a function, equal layers are a loop, and else there
is one statement a node. A comment at each shows the named dims and their split, and the
line of the user's source. A value is deleted after its last use, before what comes next
would need more memory at once than the most that is needed anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..emit.hand_over import HandOver, Part, split_readers
from ..emit.keys import Keys
from ..emit.loop import Item, Loop
from ..emit.loops import find_loops_of_parts
from ..emit.outline import Outline, Outlined, outline
from ..emit.spell import as_tuple
from ..emit.write_function import Function
from ..emit.write_tables import tables
from ..graph import Node, Value
from ..stage.local_stage import LocalStage
from ..stage.split_backward import GRADIENT
from ..stage.storages import Alive, Storages, storages

HEADER = '''"""{title}

Emitted by autopar. c: this rank's place on the mesh and its collectives; p: parameters
and buffers; g: gradients, added to in place; k: what setup made; b: the batch and what
prologue made of it.
"""

import torch
import torch.nn.functional as F

from autopar.runtime import kernels

aten = torch.ops.aten
inf = float("inf")
'''


def emit(stage: LocalStage, stages: int, outlined: bool = True) -> str:
    """The text of a module with `setup`, `prologue`, `forward`, `backward` (or its
    halves, `backward_input` and `backward_weight`), and an `epilogue` where something
    is left to do once a step.

    outlined: whether what repeats is written once; else there is a statement a node.
    """
    body = _Emitter(stage, outlined).text()
    index = stage.stage.index
    first, last = index == 0, index == stages - 1
    kind = "The only" if stages == 1 else "First" if first else "Last" if last else "A"
    title = f"{kind} pipeline stage: forward and backward of one microbatch."
    return HEADER.format(title=title) + body


class _Emitter:
    def __init__(self, stage: LocalStage, outlined: bool) -> None:
        self.stage, self.outlined = stage, outlined
        self.keys = Keys(stage)
        # How what is there anyway is read.
        self.tables: dict[str, str] = {}
        for v in (*stage.params, *stage.buffers, *stage.constants):
            self.tables[v.name] = f'p["{v.name}"]'
        for p in stage.params:
            if p.name in stage.grads:
                self.tables[stage.grads[p.name].name] = f'g["{p.name}"]'
        for v in stage.inputs:
            self.tables[v.name] = f'b["{v.name}"]'

    def text(self) -> str:
        s = self.stage
        outlined = self.outline()
        items = split_readers(self.find_loops(*outlined.parts))
        (after,) = self.find_loops(s.epilogue)
        self.name_families([*items, after])
        handed = {v.name for v in s.ends}
        later = handed | _reads(
            [*s.prologue, *s.forward, *s.whole_backward, *s.epilogue]
        )
        setup = self.once("setup(c, p)", "k", s.setup, later)
        later = handed | _reads([*s.forward, *s.whole_backward, *s.epilogue])
        prologue = self.once("prologue(c, p, k, b)", "b", s.prologue, later)
        wholes = {}
        for v in s.wholes:  # named as what is gathered for a step, if that is read
            name = v.name.removeprefix(GRADIENT)
            read = self.tables.get(name)
            key = read[3:-2] if read else self.keys.name("b", name)
            self.tables[v.name] = f'g["{key}"]'
            wholes[key] = v
        parts = [tables(s, wholes), setup, prologue]
        parts += [self.function(one, outlined.same) for one in outlined.functions]
        parts += self.each_microbatch(items, outlined)
        if s.epilogue:
            between = HandOver([Part(after)], self.tables)
            alive = self.alive(Storages(s.epilogue, ()))
            function = Function(
                s.texts, self.tables, between, 0, alive, chains=self.outlined
            )
            lines = function.body(after, ())
            parts.append(_function("epilogue(c, p, g, k, b)", lines))
        return "\n\n".join(parts)

    def outline(self) -> Outline:
        """The nodes of each microbatch, function by function, see `outline`."""
        s = self.stage
        results = ([*s.ends, *s.residuals], s.weight_residuals, ())
        nodes: list[Sequence[Node]] = [s.forward, s.backward]
        nodes += [s.weight_half] if s.weight_half is not None else []
        if not self.outlined:
            return Outline(nodes)
        d_receives = {v.name for v in s.d_receives if v is not None}
        read = [d_receives | {v.name for v in own} for own in results]
        return outline(list(zip(nodes, read, strict=False)))

    def alive(
        self, own: Storages, calls: Mapping[int, Sequence[Node]] = MappingProxyType({})
    ) -> Alive:
        return Alive(own, calls, at_once=not self.outlined)

    def find_loops(self, *parts: Sequence[Node]) -> Sequence[Sequence[Item]]:
        if not self.outlined:
            return parts
        own = {v.name for nodes in parts for n in nodes for v in n.results}
        return find_loops_of_parts(parts, self.keys.made - own)

    def name_families(self, parts: Sequence[Sequence[Item]]) -> None:
        """Gives numbered keys to values that loops make in setup and prologue, and that
        loops read of these, layer by layer."""
        s = self.stage
        each = {v.name for v in s.ends}
        each |= _reads([*s.forward, *s.whole_backward, *s.epilogue])
        later = (s.setup, each | _reads(s.prologue)), (s.prologue, each)
        for nodes, read in later:
            for loop in _loops(*self.find_loops(nodes)):
                made: dict[str, dict[int, str]] = {}
                for name, inner, t in loop.instances():
                    made.setdefault(inner.name, {})[t] = name
                for family, names in sorted(made.items()):
                    if not read.isdisjoint(names.values()):
                        self.keys.name_family(family[:-1], loop, names)
        wholes = {v.name: v.name.removeprefix(GRADIENT) for v in s.wholes}
        for items in parts:
            for loop in _loops(items):
                for scanned in loop.scanned:  # or gradients of these
                    own = [wholes.get(v.name, v.name) for v in scanned.values]
                    if self.keys.made.issuperset(own) and len({*own}) == len(own):
                        names = dict(zip(scanned.times, own, strict=True))
                        self.keys.name_family(own[0], loop, names)

    def once(
        self, head: str, table: str, nodes: Sequence[Node], later: set[str]
    ) -> str:
        """setup makes a dict, and prologue fills that of the batch: see
        `name_families`."""
        (items,) = self.find_loops(nodes)
        own = Part(items)
        # What a prologue makes may be read before all of it is there.
        into = "made" if table == "k" else table
        made = {
            name: f'{into}["{self.keys.of[name]}"]'
            for loop in _loops(own.items)
            for name, _, _ in loop.instances()
            if name in self.keys.of
        }
        ends = [v for n in nodes for v in n.results if v.name in later]
        for v in ends if table == "b" else ():
            made[v.name] = f'b["{self.keys.name(table, v.name)}"]'
        between = HandOver([own], self.tables | made)
        names = self.tables | made
        alive = self.alive(Storages(nodes, later))
        function = Function(
            self.stage.texts, names, between, 0, alive, chains=self.outlined
        )
        lines = function.body(own.items, ends)
        if table == "b":
            self.tables |= made
            return _function(head, lines or ["pass"])
        ends = [v for v in ends if v.name not in made]
        entries = [
            f'"{self.keys.name(table, v.name)}": {function.name(v)}' for v in ends
        ]
        if made:
            lines, entries = ["made = {}", *lines], ["**made", *entries]
        handed = [*made, *(v.name for v in ends)]
        self.tables |= {name: f'{table}["{self.keys.of[name]}"]' for name in handed}
        return _function(head, [*lines, f"return {{{', '.join(entries)}}}"])

    def each_microbatch(
        self, items: Sequence[Sequence[Item]], outlined: Outline
    ) -> list[str]:
        """forward, and backward or its two halves."""
        s = self.stage
        called = [one.name for one in outlined.functions]
        d_receives = [v for v in s.d_receives if v is not None]
        results = [[*s.ends], d_receives, []]
        parts = [Part(own, r) for own, r in zip(items, results, strict=False)]
        between = HandOver(parts, self.tables, outlined.same)
        alive = [self.alive(own, outlined.calls) for own in storages(s)]
        halves = ["backward_input", "backward_weight"]
        names = ["forward", *(["backward"] if len(parts) == 2 else halves)]
        entering = [s.receives, [v for v in s.d_sends if v is not None], ()]
        handed: list[Sequence[Value]] = [(), s.residuals, s.weight_residuals, ()]
        texts = []
        for i, (name, part) in enumerate(zip(names, parts, strict=True)):
            function = Function(
                *(s.texts, self.tables, between, i, alive[i]),
                taken=called,
                chains=self.outlined,
            )
            residuals = [v for v in handed[i] if v.name in part.read]
            rows = between.rows_between(i - 1, i) if i else []
            lines = function.arrive(entering[i], residuals, rows)
            takes = ("c p g k b residuals" if i else "c p k b").split()
            takes += map(function.name, entering[i])
            last = i == len(parts) - 1
            handed_on = [] if last else handed[i + 1]
            handed_on = [v for v in handed_on if v.name in parts[i + 1].read]
            lines += function.body(part.items, [*part.results, *handed_on])
            returned = as_tuple(function.name(v) for v in part.results)
            if not last:
                rows = between.rows_between(i, i + 1)
                own = [*map(function.name, handed_on), *map(function.rows_name, rows)]
                returned += f", [{', '.join(own)}]"
            lines.append(f"return {returned}")
            texts.append(_function(f"{name}({', '.join(takes)})", lines))
        return texts

    def function(self, one: Outlined, same: Mapping[str, str]) -> str:
        """The text of a function for several places or layers."""
        part = Part(one.nodes, one.results)
        between = HandOver([part], {}, same)
        alive = Alive(Storages(one.nodes, [v.name for v in one.results]))
        writer = Function(self.stage.texts, {}, between, 0, alive)
        writer.arrive(one.args, (), ())
        writer.device = f"{writer.name(one.args[0])}.device"
        arguments = [*map(writer.name, one.args), *(n.name for n in one.numbers)]
        lines = writer.body(one.nodes, (*one.results, *one.args))
        returned = ", ".join(map(writer.name, one.results))
        lines += [f"return {returned}"] if returned else []
        return _function(f"{one.name}({', '.join(arguments)})", lines)


def _loops(items: Iterable[Item]) -> list[Loop]:
    return [item for item in items if isinstance(item, Loop)]


def _reads(nodes: Iterable) -> set[str]:
    return {v.name for n in nodes for v in n.operands}


def _function(head: str, lines: list[str]) -> str:
    return "\n    ".join([f"def {head}:", *lines]) + "\n"
