"""The named dims that are found in models nobody annotated."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hf import padded_batch, tiny
from torch import Tensor, nn

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.dims.name_dims import Named, name_dims
from autopar.passes.dims.probe import take
from autopar.passes.graph import Node
from examples.gpt import Config, build


def named(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Tensor] | None = None,
) -> Named:
    return name_dims(normalize(trace(model, batch, loss_fn)))


def layer(found: Named, prefix: str) -> dict[str, str]:
    """Parameter -> its dims, of one layer."""
    params = [v.name for v in found.graph.params if v.name.startswith(prefix)]
    return {name.removeprefix(prefix): found.pattern(name) for name in params}


def attention(found: Named) -> str:
    """The dims of the first attention: `q, k, v -> out`."""
    node = next(n for n in found.graph.nodes if n.op == "autopar.attention")
    operands = ", ".join(found.pattern(v) for v in node.operands[:3])
    return f"{operands} -> {found.pattern(node.out)}"


def test_a_plain_gpt() -> None:
    sizes = Config(layers=2, width=32, heads=4, context=12, vocab=61)
    found = named(*build(sizes, batch=6))
    assert found.pattern("ids") == found.pattern("labels") == "batch seq"
    assert found.pattern("tokens.weight") == "vocab embed"
    assert found.pattern("positions.weight") == "positions embed"
    assert layer(found, "blocks.1.") == {
        "norm1.weight": "embed",
        "norm1.bias": "embed",
        "attention.qkv.weight": "(3 heads head_dim) embed",
        "attention.qkv.bias": "(3 heads head_dim)",
        "attention.proj.weight": "embed (heads head_dim)",
        "attention.proj.bias": "embed",
        "norm2.weight": "embed",
        "norm2.bias": "embed",
        "mlp.up.weight": "ffn embed",
        "mlp.up.bias": "ffn",
        "mlp.down.weight": "embed ffn",
        "mlp.down.bias": "embed",
    }
    one = "batch heads seq head_dim"
    assert attention(found) == f"{one}, {one}, {one} -> {one}"


@pytest.mark.slow
def test_gpt2_has_one_fused_weight() -> None:
    found = named(tiny("gpt2"), padded_batch())
    assert found.pattern("transformer.wte.weight") == "vocab embed"
    assert found.pattern("transformer.wpe.weight") == "positions embed"
    assert layer(found, "transformer.h.1.") == {
        "ln_1.weight": "embed",
        "ln_1.bias": "embed",
        "attn.c_attn.weight": "embed (3 heads head_dim)",
        "attn.c_attn.bias": "(3 heads head_dim)",
        "attn.c_proj.weight": "(heads head_dim) embed",
        "attn.c_proj.bias": "embed",
        "ln_2.weight": "embed",
        "ln_2.bias": "embed",
        "mlp.c_fc.weight": "embed ffn",
        "mlp.c_fc.bias": "ffn",
        "mlp.c_proj.weight": "ffn embed",
        "mlp.c_proj.bias": "embed",
    }
    assert not found.unruled


@pytest.mark.slow
def test_llama_has_grouped_queries() -> None:
    found = named(tiny("llama"), padded_batch())
    assert found.pattern("model.embed_tokens.weight") == "vocab embed"
    assert found.pattern("lm_head.weight") == "vocab embed"
    assert layer(found, "model.layers.1.") == {
        "self_attn.q_proj.weight": "(kv_heads q_per_kv head_dim) embed",
        "self_attn.k_proj.weight": "(kv_heads head_dim) embed",
        "self_attn.v_proj.weight": "(kv_heads head_dim) embed",
        "self_attn.o_proj.weight": "embed (kv_heads q_per_kv head_dim)",
        "mlp.gate_proj.weight": "ffn embed",
        "mlp.up_proj.weight": "ffn embed",
        "mlp.down_proj.weight": "embed ffn",
        "input_layernorm.weight": "embed",
        "post_attention_layernorm.weight": "embed",
    }
    assert not found.unruled


class Grouped(nn.Module):
    """Attention whose keys are not repeated: 6 query heads share 2 of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(12, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(3, 5, 6, 4).transpose(1, 2)
        kv = self.kv(x).view(3, 5, 2, 4).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(
            q, kv, kv, is_causal=True, enable_gqa=True
        )
        return y.sum()


def test_query_and_key_groups_are_the_same_dim() -> None:
    found = named(Grouped(), {"x": torch.randn(3, 5, 12)})
    assert found.pattern("q.weight").startswith("(kv_heads q_per_kv head_dim) ")
    assert found.pattern("kv.weight").startswith("(kv_heads head_dim) ")
    assert found.dims["q.weight"][0][0] == found.dims["kv.weight"][0][0]
    (index,) = [
        i for i, n in enumerate(found.graph.nodes) if n.op == "autopar.attention"
    ]
    (groups,) = [f for f in found.factors[index] if f.dim.name == "kv_heads"]
    assert groups.role == "map"
    assert [which for which, _, _ in groups.operands] == [0, 1, 2]


class View(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.view(self.shape).exp().sum()


def first(found: Named, op: str) -> tuple[Node, dict[str, str]]:
    """A node, and the role of each dim that flows through it."""
    i, node = next(
        (i, n) for i, n in enumerate(found.graph.nodes) if n.op.startswith(op)
    )
    return node, {f.dim.name: f.role for f in found.factors[i]}


# A view of [6, 4] -> its dims, those of its result, and what flows through it.
VIEWS: list[tuple[tuple[int, ...], str, str, list[str]]] = [
    ((24,), "batch d1", "(batch d1)", ["batch", "d1"]),
    ((6, 2, 2), "batch (d3 d4)", "batch d3 d4", ["batch", "d3", "d4"]),
    ((2, 12), "(batch batch1) d1", "batch (batch1 d1)", ["batch", "batch1", "d1"]),
    ((4, 6), "batch d1", "d2 d3", []),
    ((8, 3), "batch d1", "d2 d3", []),
]


@pytest.mark.parametrize(("shape", "operand", "out", "flows"), VIEWS)
def test_views(
    shape: tuple[int, ...], operand: str, out: str, flows: list[str]
) -> None:
    found = named(View(*shape), {"x": torch.randn(6, 4)})
    node, roles = first(found, "aten.reshape")
    assert found.pattern(node.operands[0]) == operand
    assert found.pattern(node.out) == out
    assert roles == dict.fromkeys(flows, "map")
    for name in flows:
        prove(found, node, name)


def prove(found: Named, node: Node, name: str) -> None:
    """Viewing the shards of a dim gives the shards of the view."""
    whole = torch.arange(24).view(6, 4)
    sizes = {d.name: d.size for dims in found.dims[node.out.name] for d in dims}
    names = [
        tuple(tuple(d.name for d in dims) for dims in found.dims[v.name])
        for v in (node.operands[0], node.out)
    ]
    for part in ((0, 1), (1, sizes[name] - 1)):
        x, y = (
            take(whole.view(v.shape), dims, sizes, {name: part})
            for v, dims in zip((node.operands[0], node.out), names, strict=True)
        )
        assert torch.equal(x.view(y.shape), y)


def test_a_view_that_keeps_some_dims_keeps_those() -> None:
    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(5, 4, 6, 7).exp().sum()

    found = named(Middle(), {"x": torch.randn(5, 6, 4, 7)})
    node, roles = first(found, "aten.reshape")
    assert roles["batch"] == "map"
    inner = {d.name for dims in found.dims[node.out.name][1:3] for d in dims}
    assert not inner & roles.keys()


def test_equal_extents_are_not_the_same_dim() -> None:
    found = named(nn.Linear(4, 4), {"input": torch.randn(4, 4)}, lambda y, _: y.sum())
    out, summed = found.dims["weight"]
    batch, _ = found.dims["input"]
    assert len({out[0].key, summed[0].key, batch[0].key}) == 3
    _, roles = first(found, "aten.linear")
    assert sorted(roles.values()) == ["map", "map", "sum"]
