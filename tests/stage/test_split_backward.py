"""split_backward: which half of a backward each node belongs to."""

from __future__ import annotations

import pytest
from graphs import calls, lines, nodes_of

from autopar.passes.stage.split_backward import find_dependent, split_backward

SOURCES = "".join(f"input %{name} f32[4,8]\n" for name in ("dy", "x", "w", "grad.w"))
WEIGHT = "weight half:"

# What a backward is, with its weight half behind a line of its own.
HALVES = {
    "a linear layer has one product in each half": (
        """
        autopar.linear_weight_grad_(%grad.w, %dy, %x)
        f32[4,8] %dx = matmul(%dy, %w)
        """,
        """
        %dx = matmul(%dy, %w)
        weight half:
        autopar.linear_weight_grad_(%grad.w, %dy, %x)
        """,
    ),
    "what both halves read is made in the input half": (
        """
        f32[4,8] %a = gelu(%dy)
        autopar.add_(%grad.w, %a)
        f32[4,8] %dx = matmul(%a, %w)
        """,
        """
        %a = gelu(%dy)
        %dx = matmul(%a, %w)
        weight half:
        autopar.add_(%grad.w, %a)
        """,
    ),
    "what leads to a weight alone is made in the weight half": (
        """
        f32[4,8] %dx = matmul(%dy, %w)
        f32[4,8] %a = gelu(%x)
        autopar.add_(%grad.w, %a)
        """,
        """
        %dx = matmul(%dy, %w)
        weight half:
        %a = gelu(%x)
        autopar.add_(%grad.w, %a)
        """,
    ),
    "what adds to a cotangent stays with it": (
        """
        f32[4,8] %dx = matmul(%dy, %w)
        autopar.add_(%dx, %dy)
        autopar.add_(%grad.w, %dx)
        """,
        """
        %dx = matmul(%dy, %w)
        autopar.add_(%dx, %dy)
        weight half:
        autopar.add_(%grad.w, %dx)
        """,
    ),
    # The weight half would read dz after the sum was added to it.
    "what is written over later is read before": (
        """
        f32[4,8] %dz = gelu(%dy)
        autopar.add_(%grad.w, %dz)
        autopar.add_(%dz, %dy)
        f32[4,8] %dx = matmul(%dz, %w)
        autopar.add_(%grad.w, %dz)
        """,
        """
        %dz = gelu(%dy)
        autopar.add_(%grad.w, %dz)
        autopar.add_(%dz, %dy)
        %dx = matmul(%dz, %w)
        weight half:
        autopar.add_(%grad.w, %dz)
        """,
    ),
    "what is written over through a view is read before": (
        """
        f32[4,8] %dz = gelu(%dy)
        f32[8,4] %a = reshape(%dz, [8, 4])
        autopar.add_(%grad.w, %dz)
        autopar.add_(%a, %dy)
        f32[4,8] %dx = matmul(%a, %w)
        """,
        """
        %dz = gelu(%dy)
        %a = reshape(%dz, [8, 4])
        autopar.add_(%grad.w, %dz)
        autopar.add_(%a, %dy)
        %dx = matmul(%a, %w)
        weight half:
        """,
    ),
    "what the weight half writes over is its own": (
        """
        f32[4,8] %dx = matmul(%dy, %w)
        f32[4,8] %a = gelu(%dx)
        autopar.add_(%a, %dy)
        autopar.add_(%grad.w, %a)
        """,
        """
        %dx = matmul(%dy, %w)
        weight half:
        %a = gelu(%dx)
        autopar.add_(%a, %dy)
        autopar.add_(%grad.w, %a)
        """,
    ),
}


@pytest.mark.parametrize("case", HALVES)
def test_halves(case: str) -> None:
    before, after = HALVES[case]
    own, later = split_backward(nodes_of(SOURCES + before), {"dx"})
    assert f"{calls(own)}\n{WEIGHT}\n{calls(later)}".strip() == lines(after)


def test_what_depends_on_the_batch() -> None:
    graph = """
        f32[4,8] %a = gelu(%x)
        f32[4,8] %b = matmul(%w, %w)
        f32[4,8] %dx = matmul(%a, %b)
    """
    nodes = nodes_of(SOURCES + graph)
    assert find_dependent([nodes[0].args[0]], nodes) == {"x", "a", "dx"}
