"""When ZeRO gathers parameters and scatters gradients, read from the emitted text."""

from __future__ import annotations

import itertools
import re

import pytest
from models import plain_gpt

from autopar.passes.program import Program

pytestmark = pytest.mark.usefixtures("unrolled")


def functions(program: Program) -> dict[str, str]:
    """The functions of the first rank's module, by name."""
    text = program.modules[program.module_of(0, 0)]
    return {part.partition("(")[0]: part for part in text.split("\ndef ")[1:]}


def messages(text: str, kind: str) -> dict[str, tuple[list[str], list[str]]]:
    """Messages that a function starts: name -> what it gives, and what it gets."""
    found = {}
    for name, given in re.findall(rf"(\w+) = c\.start_{kind}\(\[(.*?)\], '", text):
        got = re.search(rf"\[(.*)\] = c\.wait\({name}\)", text)
        assert got, f"{name} is never waited for"
        found[name] = (given.split(", "), got[1].split(", "))
    return found


def gathers(text: str) -> list[str]:
    """Names of what a function gathers of parameters."""
    return [name for _, wholes in messages(text, "gather").values() for name in wholes]


def deleted(text: str) -> list[str]:
    return re.findall(r"\w+", " ".join(re.findall(r"^    del (.*)$", text, re.M)))


def blocks_at_once(text: str, kind: str) -> int:
    """Counts the messages, at most, of which something is there at the same time:
    what a scatter sends, what is under way, or what a gather brought."""
    block_of = {}
    for name, (given, got) in messages(text, kind).items():
        parts = got if kind == "gather" else given
        block_of.update(dict.fromkeys([name, *parts], name))
    alive: set[str] = set()
    most = 0
    for line in text.splitlines():
        if line.strip().startswith("del "):
            alive -= set(re.findall(r"\w+", line))
        elif " = " in line:
            names = set(re.findall(r"\w+", line.partition(" = ")[0]))
            alive |= names & set(block_of)
        most = max(most, len({block_of[name] for name in alive}))
    return most


def test_a_weight_is_whole_only_while_it_is_used():
    parts = functions(plain_gpt(layers=1, tied=False).compile("dp=2", 2, zero=3))
    for name in ("forward", "backward"):
        made = gathers(parts[name])
        assert len(made) > 8 and len(set(made)) == len(made)
        assert set(made) <= set(deleted(parts[name]))
    saved = parts["forward"].rpartition("return")[2]
    assert not re.search(r"\ball_gather", saved)
    # Lookups need no table backwards, sums no bias.
    assert set(gathers(parts["backward"])) < set(gathers(parts["forward"]))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_blocks_at_most_are_whole_at_once(recompute):
    case = plain_gpt(layers=4, tied=False)
    parts = functions(case.compile("dp=2", 2, zero=3, recompute=recompute))
    blocks = 1 + 4 + 1  # the tables, the layers, norm and head
    assert len(messages(parts["forward"], "gather")) == blocks
    assert blocks_at_once(parts["forward"], "gather") == 2
    assert len(messages(parts["backward"], "gather")) == blocks - 1
    assert blocks_at_once(parts["backward"], "gather") == 2
    assert len(messages(parts["backward"], "scatter")) == blocks
    assert blocks_at_once(parts["backward"], "scatter") == 2
    assert "c.all_gather(p[" not in parts["forward"] + parts["backward"]
    assert "c.reduce_scatter(" not in parts["backward"]


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_block_is_gathered_while_the_one_before_computes(name):
    text = functions(plain_gpt(layers=3, tied=False).compile("dp=2", zero=3))[name]
    handles = list(messages(text, "gather"))
    for handle in handles[1:]:
        before, _, after = text.partition(f"    {handle} = c.start_gather")
        lines = before.splitlines()
        views = (" del ", ".reshape(")  # of what rests, for the message
        last = [x for x in lines if not any(word in x for word in views)][-1]
        assert "c.wait(" in last  # starts when the block before is there
        meanwhile = after.partition(f"c.wait({handle})")[0]
        assert re.search(r"F\.linear|torch\.matmul|aten\.embedding", meanwhile)


@pytest.mark.slow
def test_the_peak_is_that_of_two_blocks():
    """Above what activations take: in the forward weights, in the backward gradients
    too, and the other ranks' addends of a block that is being scattered."""
    case = plain_gpt(layers=4, heads=12, seq=4, batch=2, tied=False)
    sizes: dict[str, int] = {}  # of blocks
    for name, p in case.model.named_parameters():
        found = re.match(r"blocks\.\d+", name)
        end = "end" if name.startswith(("norm", "head")) else "begin"
        block = found[0] if found else end
        sizes[block] = sizes.get(block, 0) + p.numel() * 4
    order = [sizes[b] for b in ("begin", *(f"blocks.{i}" for i in range(4)), "end")]
    two = max(a + b for a, b in itertools.pairwise(order))
    plain, shared = (
        case.compile("dp=2", zero=zero).stages[0].footprint for zero in (0, 3)
    )
    assert sizes["blocks.0"] < shared.forward_peak - plain.forward_peak <= two
    above = shared.backward_peak - plain.backward_peak
    assert 2 * sizes["blocks.0"] < above <= 2 * two + max(sizes.values())


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_no_more_is_kept_for_the_backward_than_without(mesh):
    case = plain_gpt(layers=2)
    plain, *shared = (case.compile(mesh, zero=zero) for zero in (0, 1, 2, 3))
    for program in shared:
        assert (
            program.stages[0].footprint.residuals == plain.stages[0].footprint.residuals
        )


def test_once_a_step_or_in_each_microbatch():
    case = plain_gpt(layers=1, tied=False)
    parts = {z: functions(case.compile("dp=2", 2, zero=z)) for z in (1, 2)}
    for zero in (1, 2):
        assert len(gathers(parts[zero]["prologue"])) > 8
        assert not gathers(parts[zero]["forward"] + parts[zero]["backward"])
    assert "epilogue" not in parts[2]
    assert len(messages(parts[2]["backward"], "scatter")) == 3
    assert "scatter(" not in parts[1]["backward"]
    assert len(messages(parts[1]["epilogue"], "scatter")) == 3


def traffic(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """(part, kind) -> calls and bytes, of one rank."""
    return {(c.part, c.kind): (c.calls, c.bytes) for c in program.communication}


def test_what_is_sent_is_what_the_formulas_say():
    """Rajbhandari 2020, section 7: shares out of wholes, and wholes of shares."""
    case = plain_gpt(layers=2, tied=False)
    whole = sum(p.numel() * 4 for p in case.model.parameters())
    share, each = whole // 2, 4  # each: blocks of the model
    tokens = {("step", "all_reduce"): (1, 8)}  # how many count
    sent = {z: traffic(case.compile("dp=2", 2, zero=z)) for z in (1, 2, 3)}
    assert sent[1] == {
        ("step", "all_gather"): (each, share),
        ("step", "reduce_scatter"): (each, whole),
        **tokens,
    }
    assert sent[2] == {
        ("step", "all_gather"): (each, share),
        **tokens,
        ("backward", "reduce_scatter"): (each, whole),
    }
    assert sent[3]["forward", "all_gather"] == (each, share)
    assert sent[3]["backward", "reduce_scatter"] == (each, whole)
    calls, again = sent[3]["backward", "all_gather"]
    assert calls == each - 1 and 0.5 * share < again < share  # no tables, no biases


def test_what_is_whole_during_a_step_is_counted():
    case = plain_gpt(layers=2)
    whole = sum(p.numel() * 4 for p in case.model.parameters())
    steps = [case.compile("dp=2", zero=z).stages[0].footprint.step for z in range(4)]
    assert steps == [0, 2 * whole, whole, 0]  # parameters and gradients; parameters


def test_backwards_in_halves_scatter_by_block_too():
    case = plain_gpt(layers=4, tied=False)
    parts = functions(case.compile("pp=2,dp=2", 2, zero=3, schedule="zb-h1"))
    assert len(messages(parts["backward_input"], "gather")) == 2  # the layers
    assert len(messages(parts["backward_weight"], "scatter")) == 3  # and the tables
    assert "reduce_scatter(" not in parts["backward_input"] + parts["backward_weight"]
