"""What graphs print is read again, and what passes make is verified."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case
from hf import CONFIGS, MORE, padded_batch, tiny
from models import cut_gpt, gpt2, llama, mixture, opt, plain_gpt, switch_gpt

from autopar.options import make_plan
from autopar.passes.graph import Graph, InvalidGraph, Value
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.schedule.schedule import Schedule
from autopar.passes.schedule_stages import Scheduled
from autopar.passes.shard.insert_collectives import Lowered
from autopar.passes.shard.propagate import Sharded
from autopar.passes.shard.sharding import Sharding
from autopar.passes.stage.check_stage import check_writes
from autopar.passes.stage.differentiate import Joint
from autopar.passes.stage.local_stage import LocalStage
from autopar.passes.stage.split_stages import Staged

# --- What prints is read again ------------------------------------------------------

MODELS = {
    **{f.__name__: f for f in (plain_gpt, gpt2, llama, opt, switch_gpt, cut_gpt)},
    "mixtral": lambda: mixture("mixtral"),
    **{
        name: lambda name=name: Case(tiny(name), padded_batch())
        for name in (*CONFIGS, *MORE)
    },
}


LAST = "schedule_stages"


def read_again(name: str, made: object) -> None:
    """Reads what a pass made; of shardings, too."""
    if isinstance(made, Staged):
        for stage in made.stages:
            assert Graph.parse(str(stage)) == stage.graph
    elif isinstance(made, LocalStage):
        for (title, graph), text in zip(
            made.graphs, str(made).split("\n\n"), strict=True
        ):
            assert text.startswith(f"# {title}\n") and Graph.parse(text) == graph
    elif isinstance(made, Scheduled):
        text, _ = str(made).split("\n\n")
        assert Schedule.parse(text) == made.schedule
    elif not isinstance(made, str):
        graph, notes = Graph.parse_noted(str(made))
        assert graph == made.graph, name
        if isinstance(made, Lowered | Sharded):
            states = made.states if isinstance(made, Sharded) else made.shardings
            assert {n: Sharding.parse(text) for n, text in notes.items()} == {
                n: states[n] for n in notes
            }
            assert len(notes) >= len(graph.nodes)


@pytest.mark.matrix(quick=0, daily=5)
@pytest.mark.parametrize("model", MODELS)
def test_what_passes_make_is_read_as_it_prints(model) -> None:
    names = []

    def watch(name: str, made: object) -> None:
        names.append(name)
        read_again(name, made)

    case = MODELS[model]()
    microbatches = 3 if len(next(iter(case.batch.values()))) == 6 else 2
    plan = make_plan("dp=2,tp=2", microbatches=microbatches, zero=1)
    compile_program(case.trace(), plan, PLAIN, watch)
    assert {"trace", "insert_collectives", "split_stages", "join", "finish", LAST} <= {
        *names
    }


ODD = """
    input  %x  f32[2,3]  [batch/dp, (heads/tp head_dim)] +cp ~ep
    input  %'two words'  bool[]
    param  %qkv[0:64].weight  torch.complex64[3]
    const  %c  i64[]
    # forward
    f32[2,3]                 %a-b.+0 = add.Tensor(%x, -inf, alpha=-1.5e-07)
    f32[2,3], i64[2]         %max, _, %at = max.dim(%x, [], [[None, %c], 'a, %x # )'])
    f32[2,3]                 %cast = _to_copy(%x, dtype=torch.bfloat16, device=device(type='cuda', index=1))
    comm.pause([%max, %at])  #   blocks.+0.mlp
    f32[]                    %y = autopar.linear(%'two words', True)  # a b.py:3  h.0
    return %y, %max
"""  # noqa: E501


def test_odd_names_and_constants_are_read_as_they_print() -> None:
    graph, notes = Graph.parse_noted(ODD)
    assert Graph.parse(str(graph)) == graph
    assert graph.nodes[0].args == (graph.inputs[0], -float("inf"))
    assert graph.nodes[1].args[2][1] == "a, %x # )" and graph.nodes[1].outs[1] is None
    assert graph.nodes[2].kwargs["device"] == torch.device("cuda", 1)
    assert graph.nodes[3].location.module == "blocks.+0.mlp"
    assert [n.op for n in graph.nodes[:2]] == ["aten.add.Tensor", "aten.max.dim"]
    assert list(notes) == ["x"] and Sharding.parse(notes["x"]) == Sharding(
        ((("dp",),), (("tp",), ())), (("cp", "sum"),), frozenset({"ep"})
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("f32[2] %y = neg(%z)", "cannot be read"),
        ("f32[2] %y = neg(%x", "cannot be read"),
        ("what is this", "cannot be read"),
        ("f32[2] %x = neg(%x)", "a second time"),
    ],
)
def test_what_is_no_graph_is_refused(line: str, why: str) -> None:
    with pytest.raises(InvalidGraph, match=why):
        Graph.parse(f"input  %x  f32[2]\n{line}\nreturn %x")


# --- What is wrong is found ---------------------------------------------------------


def made_by_passes(kind: type) -> list:
    found: list = []
    plan = Plan(Mesh.parse("dp=2,tp=2"), microbatches=2)
    compile_program(
        plain_gpt(layers=1).trace(), plan, PLAIN, lambda _, m: found.append(m)
    )
    return [m for m in found if isinstance(m, kind)]


def test_a_sharding_that_does_not_fit_its_dims_is_found() -> None:
    (sharded,) = made_by_passes(Sharded)
    x = sharded.graph.params[0]
    for text, why in {"[vocab/tp]": "other dims", "[vocab/tp, embed/tp]": "on axes",
                      "[vocab/pp, embed]": "on axes"}.items():  # fmt: skip
        states = {**sharded.states, x.name: Sharding.parse(text)}
        with pytest.raises(InvalidGraph, match=why):
            replace(sharded, states=states).verify()


def test_a_backward_that_reads_what_is_not_kept_is_found() -> None:
    local = made_by_passes(LocalStage)[0]
    for v in local.residuals:
        left = tuple(other for other in local.residuals if other != v)
        with pytest.raises(InvalidGraph, match=f"the backward reads %{v.name} "):
            replace(local, residuals=left).verify()


def test_a_value_of_another_shape_than_its_dims_is_found() -> None:
    (joint, *_) = made_by_passes(Joint)
    node = next(n for n in joint.forward if n.name == "aten.layer_norm" or n.results)
    out = Value(node.results[0].name, (1, *node.results[0].shape), torch.float32)
    outs = (out, *node.outs[1:])
    forward = tuple(replace(n, outs=outs) if n is node else n for n in joint.forward)
    with pytest.raises((InvalidGraph, ValueError)):
        replace(joint, forward=forward).verify()


WRITES = {
    "f32[2] %y = neg_(%x)": "not its own",
    "autopar.add_(%x, %x)": "not its own",
    "autopar.add_(%sum, %x)": None,
    "f32[2] %a = neg(%x)\nf32[2] %b = neg_(%a)\nf32[2] %c = neg(%b)": None,
    "f32[2] %a = neg(%x)\nf32[2] %b = neg_(%a)\nf32[2] %c = neg(%a)": "written over",
    "f32[2] %a = neg(%x)\nf32[1,2] %v = view(%a, [1, 2])\nf32[2] %b = neg_(%a)\n"
    "f32[1,2] %c = neg(%v)": "written over",
}


@pytest.mark.parametrize("lines", WRITES)
def test_what_is_written_over_must_be_free(lines: str) -> None:
    graph = Graph.parse(f"input  %x  f32[2]\nbuffer %sum  f32[2]\n{lines}\nreturn %x")
    if (why := WRITES[lines]) is None:
        check_writes(graph.nodes, {"sum"})
    else:
        with pytest.raises(InvalidGraph, match=why):
            check_writes(graph.nodes, {"sum"})
