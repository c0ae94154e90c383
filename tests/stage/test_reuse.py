"""reuse: results take over the memory of operands that nobody reads any more."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from cases import Case
from graphs import calls, lines, nodes_of
from models import Stack, token_batch
from torch import Tensor, nn

from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.ops.memory import find_owners
from autopar.passes.stage.reuse import own_residuals, reuse

SOURCES = "input %x f32[4,8]\ninput %y f32[4,8]\n"


def reused(text: str, *keep: str) -> str:
    return calls(reuse(nodes_of(SOURCES + text), keep))


SUM = """
    f32[4,8] %a = gelu(%x)
    f32[4,8] %b = add.Tensor(%a, %y)
"""


def test_a_dead_operand_is_written_over() -> None:
    assert reused(SUM, "b") == lines("""
        %a = gelu(%x)
        %b = add_.Tensor(%a, %y)
    """)


def test_the_second_operand_of_a_sum_serves_as_well() -> None:
    turned = SUM.replace("(%a, %y)", "(%y, %a)")
    assert reused(turned, "b") == reused(SUM, "b")


def test_what_is_read_later_is_left_alone() -> None:
    text = SUM + "f32[4,8] %c = mul.Tensor(%a, %b)"
    assert reused(text, "c") == lines("""
        %a = gelu(%x)
        %b = add.Tensor(%a, %y)
        %c = mul_.Tensor(%b, %a)
    """)


SEEN = """
    f32[4,8] %a = gelu(%x)
    f32[32] %seen = reshape(%a, [32])
    f32[4,8] %b = add.Tensor(%a, %y)
"""
ROW = """
    f32[1,8] %row = gelu(%x)
    f32[4,8] %wide = expand(%row, [4, 8])
    f32[4,8] %b = add.Tensor(%wide, %y)
"""
LEFT_ALONE = {
    "a difference turned round": (
        "f32[4,8] %a = gelu(%x)\nf32[4,8] %b = sub.Tensor(%y, %a)", "b"),
    "what comes from outside": ("f32[4,8] %b = add.Tensor(%x, %y)", "b"),
    "what is kept": (SUM, "a", "b"),
    "what a view shows that is read later": (SEEN, "b", "seen"),
    "a broadcast view": (ROW, "b"),
    "an operand that broadcasts": (
        "f32[1,8] %row = gelu(%x)\nf32[4,8] %b = add.Tensor(%row, %y)", "b"),
    "a value added to itself": (
        "f32[4,8] %a = gelu(%x)\nf32[4,8] %b = add.Tensor(%a, %a)", "b"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_alone(case: str) -> None:
    text, *keep = LEFT_ALONE[case]
    assert reused(text, *keep) == calls(nodes_of(SOURCES + text))


def test_a_view_that_nobody_reads_protects_nothing() -> None:
    assert "add_.Tensor(%a, %y)" in reused(SEEN, "b")


def test_a_result_written_over_an_operand_is_protected_in_turn() -> None:
    seen_later = """
        f32[32] %seen = reshape(%b, [32])
        f32[4,8] %c = mul.Tensor(%b, %y)
    """
    assert reused(SUM + seen_later, "c", "seen") == lines("""
        %a = gelu(%x)
        %b = add_.Tensor(%a, %y)
        %seen = reshape(%b, [32])
        %c = mul.Tensor(%b, %y)
    """)


def test_an_all_reduce_of_a_dead_value_is_in_place() -> None:
    text = """
        f32[4,8] %a = gelu(%x)
        f32[4,8] %b = comm.all_reduce(%a, ['tp'], 'sum')
    """
    assert "(%a, ['tp'], 'sum', inplace=True)" in reused(text, "b")
    assert "(%a, ['tp'], 'sum')" in reused(text, "a", "b")


KEPT = """
    f32[4,8] %a = gelu(%x)
    f32[32] %seen = reshape(%a, [32])
    f32[8] %row = sum.dim_IntList(%x, [0])
    f32[4,8] %wide = expand(%row, [4, 8])
    f32[4,8] %b = gelu(%y)
    f32[32] %c = reshape(%b, [32])
"""


def test_what_is_kept_for_the_backward_alone_may_be_written_over_there() -> None:
    nodes = nodes_of(SOURCES + KEPT)
    made = {v.name: v for n in nodes for v in (*n.operands, *n.results)}

    def alone(kept: str, handed: str = "") -> dict[str, str]:
        values = ([made[name] for name in names.split()] for names in (kept, handed))
        return own_residuals(nodes, *values)

    assert alone("a seen x") == {"a": "a", "seen": "a"}
    assert alone("a b", handed="seen") == {"b": "b"}
    assert alone("row wide b") == {"b": "b"}


def test_a_backward_writes_over_what_was_kept_for_it() -> None:
    text = """
        f32[4,8] %a = add.Tensor(%x, %y)
        f32[4,8] %b = mul.Tensor(%x, %y)
        f32[32] %c = reshape(%b, [32])
    """
    nodes = nodes_of(SOURCES + text)
    own = {"x": "memory", "seen": "memory"}
    assert calls(reuse(nodes, {"c"}, own)) == lines("""
        %a = add.Tensor(%x, %y)
        %b = mul_.Tensor(%x, %y)
        %c = reshape(%b, [32])
    """)
    later = calls(reuse(nodes, {"c", "seen"}, own))
    assert "mul.Tensor(%x, %y)" in later  # not over what `seen` shows


def test_of_two_free_operands_the_later_one_is_written_over() -> None:
    text = """
        f32[4,8] %a = gelu(%x)
        f32[4,8] %b = gelu(%a)
        f32[4,8] %c = add.Tensor(%a, %b)
    """
    assert "add_.Tensor(%b, %a)" in reused(text, "c")


class LogitsToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(layers=1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner.head(self.inner.embed(input_ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("outputs", [(), ("logits",)])
def test_logits_are_written_over_by_their_gradient_unless_others_have_them(
    outputs: tuple[str, ...],
) -> None:
    of = Case(LogitsToo(), token_batch())
    program = compile_offline(of.model, of.batch, make_plan("dp=2"), outputs=outputs)
    (text,) = set(program.modules.values())
    assert ("kernels.sum_exp_backward_(" in text) == (not outputs)


def test_views_belong_to_what_they_show() -> None:
    nodes = nodes_of(
        SOURCES
        + """
        f32[4,8] %a = gelu(%x)
        f32[32] %seen = reshape(%a, [32])
        f32[8] %piece = slice.Tensor(%seen, 0, 0, 8)
    """
    )
    assert find_owners(nodes) == {"a": "a", "seen": "a", "piece": "a"}
    assert find_owners(nodes[1:], {"a": "a"}) == {"a": "a", "seen": "a", "piece": "a"}
    assert find_owners(nodes[1:]) == {}


def test_keys_repeated_for_the_heads_of_a_group_have_memory_of_their_own() -> None:
    owners = find_owners(
        nodes_of("""
        input %x f32[2,3,1,8]
        f32[2,3,1,8] %k = gelu(%x)
        f32[2,3,4,8] %repeated = expand(%k, [2, 3, 4, 8])
        f32[2,12,8] %merged = reshape(%repeated, [2, 12, 8])
    """)
    )
    assert owners == {"k": "k", "repeated": "k", "merged": "merged"}


def test_what_is_expanded_as_a_whole_is_reshaped_without_a_copy() -> None:
    owners = find_owners(
        nodes_of("""
        input %x f32[1]
        f32[1] %total = gelu(%x)
        f32[6] %flat = expand(%total, [6])
        f32[2,3] %rows = reshape(%flat, [2, 3])
    """)
    )
    assert owners["rows"] == "total"
