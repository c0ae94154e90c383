"""keys: what setup and prologue make has a key in a table, by which others read it.

A key tells what it is: made of one parameter it is called as that, and what layers have
of a kind is numbered by the layer. So a loop reads `b[f"q_proj.{i}"]`, and a text does
not tell how many layers there are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from ..builder import unused
from ..emit.loop import Loop
from ..graph import LAYER, Node
from ..stage.local_stage import LocalStage

PIECE = re.compile(r"\[[^\]]*\]")  # where a piece of a weight lies, in its name


class Keys:
    """The keys of setup's results, in k, and of prologue's, in b."""

    def __init__(self, stage: LocalStage) -> None:
        nodes = (*stage.setup, *stage.prologue)
        self.made = {v.name for n in nodes for v in n.results}
        self.of: dict[str, str] = {}
        parameters = [p.name for p in stage.params]
        # Gradients of what has a key in b stand beside the parameters' own in g.
        self.taken: dict[str, set[str]] = {
            "k": set(),
            "b": {v.name for v in (*stage.inputs, *stage.params)},
        }
        self.stems = {name.rpartition(".")[0] for name in parameters}
        self.names, self.origins = _names(parameters), _origins(nodes, parameters)
        # What is of a layer -> (what it is there, number of the layer).
        self.places = _places(nodes, self.origins)
        self.kinds: dict[Hashable, str] = {}

    def name(self, table: str, value: str) -> str:
        """The key of a value; a new one if it has none."""
        if value not in self.of:
            self.of[value] = self.unused(value, self.taken[table])
            self.taken[table].add(self.of[value])
        return self.of[value]

    def name_family(self, stem: str, loop: Loop, names: Mapping[int, str]) -> None:
        """Gives keys with one stem and the layer's number to the values of iterations.
        Values that have a key already give stem and numbers. stem: for values outside
        of layers."""
        keys = self.by_layer(list(names.values()))
        known = [name for name in names.values() if name in self.of]
        if keys is None and len(names) == 1:
            return
        if keys is None:
            first, step = loop.index
            if known:
                t = next(t for t, name in names.items() if name == known[0])
                stem, _, number = self.of[known[0]].rpartition(".")
                first = int(number) - step * t
            else:
                stem = self.stem(stem)
            keys = {name: f"{stem}.{first + step * t}" for t, name in names.items()}
        if all(keys[name] == self.of[name] for name in known):
            new = {name: key for name, key in keys.items() if name not in self.of}
            if set(new.values()).isdisjoint(self.of.values()):
                self.of |= new

    def by_layer(self, names: Sequence[str]) -> dict[str, str] | None:
        """Keys of the same value in several layers; None if they are not the same."""
        places = [self.places[name] for name in names if name in self.places]
        kinds, numbers = {kind for kind, _ in places}, [n for _, n in places]
        if len(places) < len(names) or len(kinds) > 1:
            return None
        if len({*numbers}) < len(numbers):
            return None
        kind = kinds.pop()
        if kind not in self.kinds:
            self.kinds[kind] = self.stem(names[0])
        stem = self.kinds[kind]
        return {name: f"{stem}.{n}" for name, n in zip(names, numbers, strict=True)}

    def stem(self, value: str) -> str:
        """The common begin of keys that differ in the number of a layer."""
        stem = self.unused(value, self.stems)
        self.stems.add(stem)
        return stem

    def unused(self, value: str, taken: set[str]) -> str:
        """A free name for a value: q_proj, if made of `layers.+3.attn.q_proj.weight`
        alone; attn_q_proj, if that is taken."""
        origins = self.origins.get(value, frozenset())
        name = self.names[next(iter(origins))] if len(origins) == 1 else _kind(value)
        return unused(name, taken)


def _names(parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its name in its layer, with the module if others have the same."""
    paths = {name: _path(name) for name in parameters}
    own = {path: _short(path, 1) for path in set(paths.values())}
    count = Counter(own.values())
    return {
        name: own[path] if count[own[path]] == 1 else _short(path, 2)
        for name, path in paths.items()
    }


def _path(parameter: str) -> tuple[str, ...]:
    """A parameter's modules within a layer, and its name unless it is `weight`; outside
    of layers, or where nothing follows the number, the path before it."""
    name = PIECE.sub("", parameter)
    if match := LAYER.search(name):
        name = name[match.end() :] or name[: match.start()]
    parts = name.strip(".").split(".")
    return tuple(parts[:-1] if len(parts) > 1 and parts[-1] == "weight" else parts)


def _short(path: Sequence[str], count: int) -> str:
    """The last parts of a path, of which `count` name modules."""
    alone = path[-1].isidentifier() and path[-1] != "bias"
    return "_".join(path[-(count if alone else count + 1) :])


def _origins(
    nodes: Iterable[Node], parameters: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Value -> the parameters that it is made of."""
    made_of = {name: frozenset([name]) for name in parameters}
    under_way: dict[str, list[frozenset[str]]] = {}
    for node in nodes:
        own = [made_of.get(v.name, frozenset()) for v in node.operands]
        every = frozenset[str]().union(*own)
        each = [every] * len(node.outs)
        if node.op == "comm.wait":
            each = under_way.get(node.operands[0].name, each)
        for out, origin in zip(node.outs, each, strict=False):
            if out is not None:
                made_of[out.name] = origin
                under_way[out.name] = own
    return made_of


def _places(
    nodes: Iterable[Node], origins: Mapping[str, frozenset[str]]
) -> dict[str, tuple[Hashable, int]]:
    """Value of a layer -> (key, equal in layers alike; the layer's number)."""
    places: dict[str, tuple[Hashable, int]] = {}
    count: Counter[Hashable] = Counter()
    for node in nodes:
        for v in node.results:
            own = origins.get(v.name, frozenset())
            where = next(iter(own)) if len(own) == 1 else node.location.module
            if match := LAYER.search(where):
                count[where, _kind(v.name)] += 1
                nth = count[where, _kind(v.name)]
                kind = LAYER.sub("#", where, count=1), _kind(v.name), nth
                places[v.name] = kind, int(match[1])
    return places


def _kind(name: str) -> str:
    """A value's name without the number that makes it unique."""
    return re.sub(r"(_\d+)+$", "", name)
