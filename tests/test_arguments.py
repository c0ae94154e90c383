"""Every argument of every op that a pass treats specially: right, or refused.

Models call all of these ops (`calls`), each with values other than the defaults, on
ranks that hold parts of the samples and of the sequence, and are compared with
themselves on one device. Which arguments that covers is read off the captured models.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from calls import GROUPS, LOSSES, aten, caller

from passes.arguments import HEEDED, PLACEMENT, arguments, is_default, refuse_unread
from passes.capture.normalize import CLEAN, MEANING
from passes.capture.trace import Traced
from passes.dims.rules import FUNCTIONS, POINTWISE, RULES
from passes.errors import CaptureError
from passes.graph import Node, Where, resolve
from passes.stage.localize import CHANGES
from passes.stage.vjp import DERIVATIVES


def special() -> set[str]:
    """The ops of torch, without overload, that some pass has a line for."""
    tables = (RULES, FUNCTIONS, POINTWISE, CLEAN, MEANING, DERIVATIVES, CHANGES)
    names = {op.split(".")[1] for table in tables for op in table if op[:5] == "aten."}
    return {name for name in names if hasattr(aten, name)}


def schemas(name: str) -> Iterator[tuple[str, torch.FunctionSchema]]:
    """Of an op, by overload, those of functions of tensors."""
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


def test_what_is_treated_specially_says_what_it_heeds() -> None:
    assert special() <= HEEDED.keys()
    for name in special():
        known = {a.name for _, schema in schemas(name) for a in schema.arguments}
        assert {*HEEDED[name].split()} <= known, name


def test_an_argument_that_nobody_heeds_is_refused() -> None:
    refused = set()
    for name in sorted(special()):
        for op, schema in schemas(name):
            for argument in schema.arguments:
                if argument.name in {*HEEDED[name].split(), *PLACEMENT}:
                    continue
                node = Node(op, (), {argument.name: "odd"}, (), Where("", "gpt.py:7"))
                with pytest.raises(CaptureError, match=f"{argument.name}=odd") as info:
                    refuse_unread(node)
                assert info.value.source == "gpt.py:7"
                refused.add(f"{name}.{argument.name}")
    assert {"embedding.sparse", "gather.sparse_grad", "view.dtype"} <= refused


def test_losses_heed_what_they_are_given() -> None:
    caller({name: LOSSES[name] for name in LOSSES if "kl" in name}).verify("dp=2")


@pytest.mark.slow
def test_calls_are_right_with_every_argument_that_is_heeded() -> None:
    covered = set()
    for calls in GROUPS:
        case = caller(calls)
        covered |= given(case.trace())
        case.verify("dp=2,cp=2")
    heeded = {(op, name) for op in special() for name in HEEDED[op].split()}
    assert sorted(heeded - covered) == []
