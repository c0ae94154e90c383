"""What a user must do by hand to the GPT of `examples/gpt.py` for torch's runtimes.

DTensor cannot split a fused QKV weight by heads, so q, k and v become three layers;
a pipeline needs the model cut into one module a stage.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from examples.gpt import GPT, Attention


class SplitAttention(nn.Module):
    """The same function as `Attention`, on as many heads as the weights hold."""

    def __init__(self, fused: Attention) -> None:
        super().__init__()
        width = fused.proj.in_features
        self.head_dim = width // fused.heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = fused.proj
        weights, biases = fused.qkv.weight.chunk(3), fused.qkv.bias.chunk(3)
        with torch.no_grad():
            for layer, weight, bias in zip(self.layers(), weights, biases, strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)

    def layers(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q, self.k, self.v

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            layer(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for layer in self.layers()
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, -1))


class Stage(nn.Module):
    """Stage `index` of `count`: its share of the blocks, with the ends at the ends."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        self.count, share = count, model.config.layers // count
        self.blocks = model.blocks[index * share : (index + 1) * share]
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [batch, seq] or activations in, activations or logits out."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def split_qkv(model: GPT) -> GPT:
    """Replace each fused attention by one that DTensor can split."""
    for block in model.blocks:
        block.attention = SplitAttention(block.attention)
    return model


def tensor_parallel(module: GPT | Stage, mesh: DeviceMesh, sequence: bool) -> None:
    """Split a model or a stage in place, as DTensor's tutorial does it.

    The logits stay split on the vocabulary: the loss needs `loss_parallel()`.
    """
    between = Shard(1) if sequence else Replicate()
    for block in module.blocks:
        parallelize_module(block, mesh, block_plan(sequence))
    names = dict(module.named_children())
    plan: dict[str, ParallelStyle] = {}
    if "tokens" in names:
        embed = {"input_layouts": Replicate(), "use_local_output": True}
        plan["tokens"] = RowwiseParallel(output_layouts=between, **embed)
        if sequence:  # [seq, width]: no batch dim
            plan["positions"] = RowwiseParallel(output_layouts=Shard(0), **embed)
    if "head" in names:
        if sequence:
            plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    if plan:
        parallelize_module(module, mesh, plan)
    if "tokens" in names and "head" in names:
        module.head.weight = module.tokens.weight  # splitting has untied them


def block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """Megatron's columns then rows; with `sequence`, the norms split along seq."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    for name in ("attention.proj", "mlp.down"):
        plan[name] = RowwiseParallel(output_layouts=Shard(1) if sequence else None)
    if sequence:
        for norm, inner in (("norm1", "attention"), ("norm2", "mlp")):
            plan[norm] = SequenceParallel()
            plan[inner] = PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            )
    return plan
