"""An export that makes less gives the same graph, with the same lines of source."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.graph_module import GraphModule

from autopar.passes.capture.forward.lean_export import UserFrames
from autopar.passes.capture.forward.user_frames import TORCH
from autopar.passes.capture.trace import trace


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = shifted(x)
        return x.cos()


class Model(nn.Module):
    """What it computes is written in it, in a module of its own or torch's, and in a
    function; a piece without gradients is a graph within the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.inner = nn.Linear(6, 6), nn.LayerNorm(6), Inner()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for _ in range(2):
            x = self.norm(F.gelu(self.up(x)))
            x = self.inner(x)
        with torch.no_grad():
            wanted = shifted(y)
        return F.mse_loss(x, wanted)


def shifted(x: Tensor) -> Tensor:
    return x * 2 + 1


def captured() -> list[tuple[str, str, str]]:
    """Each node, its module and its line."""
    torch.manual_seed(0)
    fields = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    nodes = trace(Model(), fields).graph.nodes
    return [(str(n), n.location.module, n.location.source) for n in nodes]


def test_a_graph_and_its_lines_are_those_of_a_whole_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for functions that forward calls: torch knows the line of the call alone."""
    lean = captured()
    assert len({line for *_, line in lean}) >= 5
    monkeypatch.setattr("autopar.passes.capture.trace.lean_export", nullcontext)
    whole = captured()
    assert [made for *made, _ in whole] == [made for *made, _ in lean]
    finer = {
        ours for (*_, line), (*_, ours) in zip(whole, lean, strict=True) if line != ours
    }
    assert finer == {f"test_lean_export.py:{shifted.__code__.co_firstlineno + 1}"}


def test_it_makes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is of no use: a later torch might look for frames elsewhere."""
    frames: list[str] = []
    written: list[str] = []
    summary, recompile = UserFrames.summary, GraphModule.recompile

    def noted(of: UserFrames) -> Any:
        found = summary(of)
        frames.extend(frame.filename for frame in found)
        return found

    def write(module: GraphModule) -> Any:
        written.append(type(module).__name__)
        return recompile(module)

    monkeypatch.setattr(UserFrames, "summary", noted)
    monkeypatch.setattr(GraphModule, "recompile", write)
    captured()
    assert frames and not any(file.startswith(TORCH) for file in frames)
    lean = len(written)
    monkeypatch.setattr("autopar.passes.capture.trace.lean_export", nullcontext)
    captured()
    assert lean < len(written) - lean
