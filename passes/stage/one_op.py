"""one_op: a pipeline stage that consists of a single op, for measuring it by itself.

Its backward is then written as that of any stage.
"""

from __future__ import annotations

from collections.abc import Collection

from ..cost import weights_of
from ..dims.name_dims import Dim, Dims
from ..dims.origins import is_real_or_complex
from ..graph import Node
from ..shard.sharding import Sharding
from ..stage.split_stages import Stage


def one_op(node: Node, flows: Collection[str] | None = None) -> Stage:
    """Makes a stage of a node in the shapes of a rank.

    Weights are its parameters; other numbers it receives, and hands on what the op
    makes. flows: names of the values that a gradient flows through; None: of all that
    it can flow through.
    """
    late = weights_of(node)
    operands = {v.name: v for v in node.operands}
    floats = {n: v for n, v in operands.items() if is_real_or_complex(v.dtype)}
    results = tuple(v for v in node.results if is_real_or_complex(v.dtype))
    if flows is None:
        flows = {*floats, *(v.name for v in results)} if floats else ()
    dims: dict[str, Dims] = {
        v.name: tuple((Dim(i, f"d{i}", size),) for i, size in enumerate(v.shape))
        for v in (*operands.values(), *node.results)
    }
    return Stage(
        index=0,
        setup=(),
        prologue=(),
        forward=(node,),
        inputs=tuple(v for n, v in operands.items() if n not in floats),
        params=tuple(v for n, v in floats.items() if n in late),
        buffers=(),
        constants=(),
        receives=tuple(v for n, v in floats.items() if n not in late),
        sends=results,
        outputs=(),
        output_names=(),
        loss=None,
        names={name: name for name in operands},
        dims=dims,
        shardings={name: Sharding.whole(d) for name, d in dims.items()},
        differentiable=frozenset(flows) & {*floats, *(v.name for v in results)},
        modules=(),
        layers={},
    )
