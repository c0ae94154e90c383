"""Every argument of every op that a pass treats specially: right, or refused.

Models call all of these ops (`calls`), each with values other than the defaults, on
ranks that hold parts of the samples and of the sequence, and are compared with
themselves on one device. Which arguments that covers is read off the captured models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from calls import GROUPS, LOSSES, aten, caller

from autopar.passes.capture.normalize.normalize import CLEAN, MEANING
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Location, Node, resolve
from autopar.passes.ops.arguments import PLACEMENT, arguments, is_default, refuse_unread
from autopar.passes.ops.op import OPS, op_of
from autopar.passes.ops.random import DRAWN
from autopar.passes.traced import Traced

HEEDED = {name[5:]: op.heeds for name, op in OPS.items() if name[:5] == "aten."}


def special() -> set[str]:
    """The ops of torch, without overload, that some pass treats specially."""
    treated = ("rule", "derivative", "sizes", "on_rank")
    names = [n for n, op in OPS.items() if any(getattr(op, way) for way in treated)]
    names = {n[5:] for n in (*names, *CLEAN, *MEANING) if n.startswith("aten.")}
    # What groups rows by experts needs them in their order: tests of experts call it.
    others = {"_grouped_mm"}
    return {n for n in names - others if hasattr(aten, n)}


def schemas(name: str) -> Iterator[tuple[str, torch.FunctionSchema]]:
    """An op's schemas by overload, of those that are functions of tensors."""
    packet = getattr(aten, name)
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        types = [str(a.type) for a in (*schema.arguments, *schema.returns)]
        if any("Tensor" in one for one in types) and not schema.is_mutable:
            yield f"aten.{name}.{overload}", schema


def given(traced: Traced) -> set[tuple[str, str]]:
    """(op, argument) of what is called with another value than the default."""
    return {
        (node.op.split(".")[1], argument.name)
        for node in traced.graph.nodes
        for argument in resolve(node.op)._schema.arguments
        if not is_default(argument, arguments(node)[argument.name])
    }


def test_what_is_declared_is_an_op_of_torch() -> None:
    assert [name for name in HEEDED if not hasattr(aten, name)] == []


def test_what_is_treated_specially_says_what_it_heeds() -> None:
    for name in special():
        assert HEEDED[name], f"{name} says nothing"
        known = {a.name for _, schema in schemas(name) for a in schema.arguments}
        assert {*HEEDED[name].split()} <= known, name


def test_an_argument_that_nobody_heeds_is_refused() -> None:
    refused = set()
    for name in sorted(special()):
        for op, schema in schemas(name):
            for argument in schema.arguments:
                if argument.name in {*HEEDED[name].split(), *PLACEMENT}:
                    continue
                node = Node(
                    op, (), {argument.name: "odd"}, (), Location("", "gpt.py:7")
                )
                shown = f"{argument.name}='odd'"
                with pytest.raises(CaptureError, match=shown) as info:
                    refuse_unread(node)
                assert info.value.source == "gpt.py:7"
                refused.add(f"{name}.{argument.name}")
    assert {"embedding.sparse", "gather.sparse_grad", "view.dtype"} <= refused


def test_names_of_arguments_are_those_of_some_op() -> None:
    """`node.arg` gives None where an overload has no argument of a name."""
    known = {name for op in OPS.values() for name in op.heeds.split()}
    asked = {
        name
        for path in (Path(__file__).parents[2] / "passes").rglob("*.py")
        for name in re.findall(r"\.arg\(\"(\w+)\"\)", path.read_text())
    }
    assert len(asked) > 20
    assert asked - known == set()


def test_losses_heed_what_they_are_given() -> None:
    caller({name: LOSSES[name] for name in LOSSES if "kl" in name}).verify("dp=2")


@pytest.mark.slow
def test_calls_are_right_with_every_argument_that_is_heeded() -> None:
    covered = set()
    for calls in GROUPS:
        case = caller(calls)
        covered |= given(case.trace())
        case.verify("dp=2,cp=2")
    # What draws numbers is called where these are told (`test_random_numbers`).
    own = special() - {name.removeprefix("aten.") for name in DRAWN}
    heeded = {(op, name) for op in own for name in HEEDED[op].split()}
    assert sorted(heeded - covered) == []


def test_an_op_of_our_own_is_declared() -> None:
    """Else passes would take it for one of which torch knows enough."""
    assert op_of(Node("mine.op.default", (), {}, ())).heeds == ""
    with pytest.raises(AssertionError, match=r"comm\.nothing is declared nowhere"):
        op_of(Node("comm.nothing", (), {}, ()))
