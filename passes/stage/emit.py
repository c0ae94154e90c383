"""emit: a rank's stage -> readable Python, one statement a node.

A comment at each statement shows the named dims and their split, and the line of the
user's source. A value is deleted right after its last use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from passes.graph import Node, Value, resolve
from passes.stage.local_stage import LocalStage

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


def emit(stage: LocalStage, stages: int) -> str:
    """The text of a module with `setup`, `prologue`, `forward`, `backward` (or its
    halves, `backward_input` and `backward_weight`), and an `epilogue` where something
    is left to do once a step."""
    body = _Emitter(stage).text()
    index = stage.stage.index
    first, last = index == 0, index == stages - 1
    kind = "The only" if stages == 1 else "First" if first else "Last" if last else "A"
    title = f"{kind} pipeline stage: forward and backward of one microbatch."
    return HEADER.format(title=title) + body


class _Emitter:
    def __init__(self, stage: LocalStage) -> None:
        self.stage = stage
        self.names: dict[str, str] = {}
        self.taken = set(RESERVED)  # names that no other local may have
        for v in (*stage.params, *stage.buffers):
            self.names[v.name] = f'p["{v.name}"]'
        for v in stage.grads.values():
            self.names[v.name] = f'g["{v.name.removeprefix("grad.")}"]'
        for v in stage.inputs:
            self.names[v.name] = f'b["{v.name}"]'
        for v in stage.constants:
            self.names[v.name] = f'p["{v.name}"]'
        self.kept: dict[str, set[str]] = {}

    def text(self) -> str:
        s = self.stage
        forward_reads = _reads([*s.forward, *s.whole_backward, *s.epilogue])
        prologue_reads = _reads(s.prologue)
        setup = [v for n in s.setup for v in n.results]
        prologue = [v for n in s.prologue for v in n.results]
        k = [v for v in setup if v.name in forward_reads | prologue_reads]
        b = [v for v in prologue if v.name in forward_reads]
        parts = [self.tables()]
        parts.append(self.once("setup(c, p)", s.setup, k))
        self.names.update((v.name, f'k["{v.name}"]') for v in k)
        parts.append(self.once("prologue(c, p, k, b)", s.prologue, b))
        self.names.update((v.name, f'b["{v.name}"]') for v in b)
        parts += [self.forward(), *self.backward()]
        if s.epilogue:
            lines = self.statements(s.epilogue, [], set())
            parts.append(_function("epilogue(c, p, g, k, b)", lines))
        return "\n\n".join(parts)

    def tables(self) -> str:
        """What the executor must know: local shapes of what comes in and goes out."""
        s = self.stage

        def table(values: Iterable[Value | None]) -> str:
            rows = [f"({v.shape}, {v.dtype})" if v else "None" for v in values]
            return f"[{', '.join(rows)}]"

        def entries(values: Iterable[Value]) -> str:
            rows = [f'    "{v.name}": ({v.shape}, {v.dtype}),' for v in values]
            return "\n".join(["{", *rows, "}"]) if rows else "{}"

        trained = [p for p in s.params if p.name in s.grads]
        whole = entries(replace(v, name=v.name.removeprefix("grad.")) for v in s.wholes)
        lines = [
            f"\nPARAMETERS = {entries(s.params)}",
            f"BUFFERS = {entries([*s.buffers])}",
            f"LITERALS = {[v.name for v in s.constants]}",
            f"TRAINED = {[p.name for p in trained]}",
            f"INPUTS = {[v.name for v in s.inputs]}",
            f"RECEIVES = {table(s.receives)}",
            f"SENDS = {table(s.sends)}",
            f"D_SENDS = {table(s.d_sends)}",
            f"D_RECEIVES = {table(s.d_receives)}",
            f"WHOLE_GRADIENTS = {whole}",
            f"FLOPS = {s.flops}",
        ]
        return "\n".join(lines)

    # --- functions -----------------------------------------------------------------

    def once(self, head: str, nodes: Sequence[Node], results: list[Value]) -> str:
        """setup and prologue: a dict of what they make."""
        lines = self.statements(nodes, [], {v.name for v in results})
        found = ", ".join(f'"{v.name}": {self.name(v)}' for v in results)
        for v in (x for n in nodes for x in n.results):
            self.taken.discard(self.names.pop(v.name, ""))
        return _function(head, [*lines, f"return {{{found}}}"])

    def forward(self) -> str:
        s = self.stage
        inputs = [self.name(v) for v in s.receives]
        results = [*s.sends, *([s.loss] if s.loss else [])]
        keep = {v.name for v in (*results, *s.saved)}
        lines = self.statements(s.forward, list(s.receives), keep)
        found = _tuple(self.name(v) for v in results)
        saved = ", ".join(self.name(v) for v in s.saved)
        head = f"forward({', '.join(['c', 'p', 'k', 'b', *inputs])})"
        lines.append(f"return {found}, [{saved}]")
        return _function(head, lines)

    def backward(self) -> list[str]:
        """One function; or one for each half, where the backward is split."""
        s = self.stage
        saved, kept = list(s.saved), list(s.kept)
        d_sends = [v for v in s.d_sends if v is not None]
        d_receives = [v for v in s.d_receives if v is not None]
        if s.weight_half is None:
            return [self.half("backward", s.backward, saved, d_sends, d_receives)]
        return [
            self.half("backward_input", s.backward, saved, d_sends, d_receives, kept),
            self.half("backward_weight", s.weight_half, kept, [], []),
        ]

    def half(
        self,
        name: str,
        nodes: Sequence[Node],
        saved: list[Value],
        inputs: list[Value],
        results: list[Value],
        kept: list[Value] | None = None,
    ) -> str:
        """A part of the backward, from what was saved for it.

        kept: what it hands, beside its results, to the part that comes after it.
        """
        arguments = ["c", "p", "g", "k", "b", "saved", *map(self.name, inputs)]
        lines = []
        if saved:
            names = ", ".join(self.name(v) for v in saved)
            lines += [f"[{names}] = saved", "saved.clear()"]
        keep = {v.name for v in (*results, *(kept or ()))}
        lines += self.statements(nodes, [*saved, *inputs], keep)
        found = _tuple(self.name(v) for v in results)
        if kept is not None:
            found += f", [{', '.join(self.name(v) for v in kept)}]"
        return _function(f"{name}({', '.join(arguments)})", [*lines, f"return {found}"])

    def statements(
        self, nodes: Sequence[Node], entering: list[Value], keep: set[str]
    ) -> list[str]:
        """The nodes as text, with each local deleted after its last use."""
        last: dict[str, int] = {v.name: -1 for v in entering}
        for i, node in enumerate(nodes):
            for v in (*node.operands, *node.results):
                last[v.name] = i
        lines = []
        local = {v.name for v in entering} | {v.name for n in nodes for v in n.results}
        unused = [v for v in entering if last[v.name] < 0 and v.name not in keep]
        if unused:
            lines.append(f"del {', '.join(self.name(v) for v in unused)}")
        for i, node in enumerate(nodes):
            lines.append(self.statement(node))
            dead = [
                v
                for v in dict.fromkeys((*node.operands, *node.results))
                if v.name in local and v.name not in keep and last[v.name] == i
            ]
            if dead:
                lines.append(f"del {', '.join(self.name(v) for v in dead)}")
        return lines

    def statement(self, node: Node) -> str:
        call = self.call(node)
        outs = ["_" if v is None else self.name(v) for v in node.outs]
        while outs and outs[-1] == "_" and len(outs) > 1 and not _returns_many(node):
            outs.pop()
        left = ", ".join(outs)
        if node.op == "comm.wait" or _returns_list(node):  # of one tensor too
            left = f"[{left}]"
        text = f"{left} = {call}" if outs else call
        dims = [self.stage.texts.get(v.name, "") for v in node.results]
        notes = [d for d in dict.fromkeys(dims) if d]
        where = str(node.where)
        comment = "  ".join([*notes, *([where] if where else [])])
        return f"{text}  # {comment}" if comment else text

    def call(self, node: Node) -> str:
        args = [self.arg(a) for a in node.args]
        kwargs = [f"{k}={self.arg(v)}" for k, v in node.kwargs.items()]
        kind, _, name = node.op.partition(".")
        if kind == "comm":
            args = args[: COMM_ARGS.get(name, len(args))]
            return f"c.{name}({', '.join([*args, *kwargs])})"
        if kind == "autopar":
            return f"kernels.{name}({', '.join([*args, *kwargs])})"
        if not node.operands:
            kwargs = [k for k in kwargs if not k.startswith("device=")]
            kwargs.append("device=c.device")
        if node.op in SPELLINGS:
            return SPELLINGS[node.op](args, kwargs)
        library = "" if kind == "aten" else "torch.ops."
        return f"{library}{node.op}({', '.join([*args, *kwargs])})"

    def arg(self, arg: Any) -> str:
        if isinstance(arg, Value):
            return self.name(arg)
        if isinstance(arg, tuple | list):
            return (
                f"[{', '.join(map(self.arg, arg))}]" if _flat(arg) else self.nest(arg)
            )
        if isinstance(arg, float) and arg != arg:
            return 'float("nan")'
        if isinstance(arg, torch.dtype | torch.memory_format):
            return str(arg)
        return repr(arg)

    def nest(self, arg: Any) -> str:
        """Axis names and positions are tuples, and print as such."""
        return _tuple(
            self.nest(a) if isinstance(a, tuple | list) else self.arg(a) for a in arg
        )

    def name(self, v: Value) -> str:
        """A Python name for a value, the same at every mention."""
        if v.name not in self.names:
            stem = re.sub(r"\W+", "_", v.name)
            name, count = stem, 0
            while name in self.taken:
                count += 1
                name = f"{stem}_{count}"
            self.taken.add(name)
            self.names[v.name] = name
        return self.names[v.name]


RESERVED = frozenset(
    {"c", "p", "g", "k", "b", "saved", "torch", "F", "kernels", "aten"}
)
RESERVED |= {"inf", "del", "return", "lambda", "and", "or", "not", "is", "in", "_"}

# How many of a collective's arguments its call takes; the others are for the compiler.
COMM_ARGS = {
    "shard": 3,
    "all_gather": 4,
    "lookup": 4,
    "attention": 9,
    "attention_backward": 12,
}


def _returns_many(node: Node) -> bool:
    return len(node.outs) > 1


def _returns_list(node: Node) -> bool:
    """Whether a call gives a list: that of one tensor is unpacked too."""
    if not node.op.startswith("aten."):
        return False
    returns = resolve(node.op)._schema.returns
    return [str(one.type) for one in returns] == ["List[Tensor]"]


def _flat(arg: Sequence[Any]) -> bool:
    """Plain lists of numbers and values; axis names print as tuples."""
    return not any(isinstance(a, str | tuple | list) for a in arg)


def _tuple(items: Iterable[str]) -> str:
    found = list(items)
    return f"({found[0]},)" if len(found) == 1 else f"({', '.join(found)})"


def _reads(nodes: Iterable[Node]) -> set[str]:
    return {v.name for n in nodes for v in n.operands}


def _function(head: str, lines: list[str]) -> str:
    return "\n    ".join([f"def {head}:", *lines]) + "\n"


def _method(name: str) -> Callable[[list[str], list[str]], str]:
    def spell(args: list[str], kwargs: list[str]) -> str:
        return f"{args[0]}.{name}({', '.join([*args[1:], *kwargs])})"

    return spell


def _plain(name: str) -> Callable[[list[str], list[str]], str]:
    def spell(args: list[str], kwargs: list[str]) -> str:
        return f"{name}({', '.join([*args, *kwargs])})"

    return spell


# Ops whose usual spelling reads better, and is called faster, than the operator's name.
SPELLINGS: dict[str, Callable[[list[str], list[str]], str]] = {
    "aten.reshape.default": _method("reshape"),
    "aten.transpose.int": _method("transpose"),
    "aten.permute.default": _method("permute"),
    "aten.expand.default": _method("expand"),
    "aten.detach.default": _method("detach"),
    "aten.to.dtype": _method("to"),
    "aten.add_.Tensor": _method("add_"),
    "aten.sub_.Tensor": _method("sub_"),
    "aten.mul_.Tensor": _method("mul_"),
    "aten.div_.Tensor": _method("div_"),
    "aten.neg_.default": _method("neg_"),
    "aten.neg.default": _plain("torch.neg"),
    "aten.add.Tensor": _plain("torch.add"),
    "aten.sub.Tensor": _plain("torch.sub"),
    "aten.mul.Tensor": _plain("torch.mul"),
    "aten.div.Tensor": _plain("torch.div"),
    "aten.matmul.default": _plain("torch.matmul"),
    "aten.linear.default": _plain("F.linear"),
    "aten.split.Tensor": _plain("torch.split"),
    "aten.cat.default": _plain("torch.cat"),
    "aten.amax.default": _plain("torch.amax"),
    "aten.native_layer_norm.default": _plain("torch.native_layer_norm"),
    "aten.log.default": _plain("torch.log"),
    "aten.rsqrt.default": _plain("torch.rsqrt"),
    # Pairs must lie next to each other, which gradients of views do not.
    "aten.view_as_complex.default": lambda args, _: (
        f"torch.view_as_complex({args[0]}.contiguous())"
    ),
}
