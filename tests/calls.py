"""Calls of every op that a pass treats specially, with values other than the defaults.

They are in groups; a `caller` makes all calls of a group, and its loss is their sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

aten = torch.ops.aten
BATCH, SEQ, WIDTH, VOCAB = 4, 6, 4, 11
f64, f32 = torch.float64, torch.float32


class Given:
    """What each call may use. x [4,6,4] depends on the batch and on a parameter of the
    call's own; w [4] is that parameter; y [4,6,4] depends on the batch alone; ids and
    mask [4,6] are of the batch, sign is 1 or -1. All is float64, but z, x in float32.
    """

    def __init__(self, x: Tensor, w: Tensor, y: Tensor, ids: Tensor) -> None:
        self.x, self.w, self.y, self.ids = x, w, y, ids
        self.mask, self.z = ids % 2 == 0, x.to(f32)
        self.sign = self.mask * 2.0 - 1.0
        self.p, self.q = x.sigmoid(), y.sigmoid()  # chances
        self.log_p, self.log_q = x.log_softmax(-1), y.log_softmax(-1)

    def heads(self, count: int = 2) -> Tensor:
        """[4, count, 6, 4]."""
        many = [self.x * (i + 1) for i in range(count)]
        return torch.stack(many, 1)


# Of a recurrent op: biases, one layer, no dropout, in training, both ways, batch first.
RECURRENT = True, 1, 0.0, True, True, True


def start(g: Given) -> Tensor:
    """A state for each direction and sample, [2, 4, 4]."""
    return g.x[:, :2].transpose(0, 1).contiguous()


def weights(g: Given, gates: int) -> list[Tensor]:
    """Weights of both directions: those of inputs, of states, and two biases."""
    whole, bias = g.w.outer(g.w).repeat(gates, 1), g.w.repeat(gates)
    return [whole, 0.5 * whole, bias, -bias] * 2


Call = Callable[[Given], Tensor]
NONE, MEAN, SUM = 0, 1, 2
LOSSES: dict[str, Call] = {
    "mse": lambda g: F.mse_loss(g.x, g.y, reduction="sum"),
    "mse none": lambda g: F.mse_loss(g.x, g.y, reduction="none"),
    "l1": lambda g: F.l1_loss(g.x, g.y, reduction="sum"),
    "smooth": lambda g: F.smooth_l1_loss(g.x, g.y, beta=0.3, reduction="sum"),
    "smooth none": lambda g: F.smooth_l1_loss(g.x, g.y, beta=0.3, reduction="none"),
    "huber": lambda g: F.huber_loss(g.x, g.y, delta=0.3, reduction="sum"),
    "huber mean": lambda g: F.huber_loss(g.x, g.y, delta=0.3),
    "bce": lambda g: F.binary_cross_entropy(g.p, g.q, g.q, reduction="sum"),
    "bce logits": lambda g: F.binary_cross_entropy_with_logits(
        g.x, g.q, g.q, pos_weight=g.w.detach().exp(), reduction="none"
    ),
    "kl": lambda g: F.kl_div(g.log_p, g.log_q, log_target=True, reduction="sum"),
    "kl batch": lambda g: F.kl_div(
        g.log_p, g.log_q, log_target=True, reduction="batchmean"
    ),
    "kl none": lambda g: F.kl_div(g.log_p, g.log_q, log_target=True, reduction="none"),
    "kl plain": lambda g: F.kl_div(g.log_p, g.q, reduction="sum"),
    "ce": lambda g: F.cross_entropy(
        g.x.flatten(0, 1), (g.ids % WIDTH).flatten(), ignore_index=1, reduction="sum"
    ),
    "ce weights": lambda g: F.cross_entropy(
        g.x.flatten(0, 1), (g.ids % WIDTH).flatten(), g.w.detach()
    ),
    "ce smooth": lambda g: F.cross_entropy(
        g.x.mT, g.ids % WIDTH, label_smoothing=0.2, reduction="none"
    ),
    "cosine": lambda g: F.cosine_embedding_loss(
        *(v.flatten(0, 1) for v in (g.x, g.y)), g.sign.flatten(), 0.2, reduction="sum"
    ),
    "hinge": lambda g: F.hinge_embedding_loss(
        g.x, g.sign[..., None], 0.2, reduction="sum"
    ),
    "ranking": lambda g: F.margin_ranking_loss(
        g.x, g.y, g.sign[..., None], 0.2, reduction="sum"
    ),
    "margins": lambda g: F.multi_margin_loss(
        g.x.flatten(0, 1), (g.ids % WIDTH).flatten(), 2, 0.3,
        g.w.detach(), reduction="sum",
    ),
    "margin labels": lambda g: F.multilabel_margin_loss(
        g.x[:, 0], g.ids[:, :4] % WIDTH, reduction="sum"
    ),
    "poisson": lambda g: F.poisson_nll_loss(
        g.p, g.q, log_input=False, full=True, eps=0.1, reduction="sum"
    ),
    "poisson log": lambda g: F.poisson_nll_loss(g.x, g.q, reduction="none"),
    "soft margin": lambda g: F.soft_margin_loss(
        g.x, g.sign[..., None], reduction="sum"
    ),
    "triplet": lambda g: aten.triplet_margin_loss(
        *(v.flatten(0, 1) for v in (g.x, g.y, -g.x)), 0.3, 3.0, 0.1, True, SUM
    ),
    "nll": lambda g: F.nll_loss(
        g.log_p.mT, g.ids % WIDTH, g.w.detach(), ignore_index=2, reduction="sum"
    ),
    "nll flat": lambda g: aten.nll_loss(
        g.log_p.flatten(0, 1), (g.ids % WIDTH).flatten(), g.w.detach(), SUM, 2
    ),
}  # fmt: skip
REDUCED: dict[str, Call] = {
    "sum": lambda g: g.z.sum((1,), keepdim=True, dtype=f64),
    "sum all": lambda g: g.z.sum(dtype=f64),
    "sum to size": lambda g: g.x.sum_to_size(6, 1) * g.w[0],
    "nansum": lambda g: g.z.nansum((0, 1), keepdim=True, dtype=f64),
    "nansum all": lambda g: g.z.nansum(dtype=f64),
    "mean": lambda g: g.z.mean((-1,), keepdim=True, dtype=f64),
    "mean all": lambda g: g.z.mean(dtype=f64),
    "amax": lambda g: g.x.amax((1,), keepdim=True),
    "max": lambda g: g.x.max(1, keepdim=True).values,
    "max all": lambda g: g.x.max(),
    "max other": lambda g: torch.max(g.x, g.y),
    "min": lambda g: g.x.min(-1, keepdim=True).values,
    "min all": lambda g: g.x.min(),
    "min other": lambda g: torch.min(g.x, g.y),
    "var": lambda g: g.x.var(1, correction=2, keepdim=True),
    "var dim": lambda g: aten.var.dim(g.x, [1], False, True),
    "var all": lambda g: aten.var.default(g.x, False),
    "norm": lambda g: torch.linalg.vector_norm(g.z, 3, 1, keepdim=True, dtype=f64),
    "logsumexp": lambda g: g.x.logsumexp(-1, keepdim=True),
    "logsumexp seq": lambda g: g.x.logsumexp((1,)),
    "cumsum": lambda g: g.z.cumsum(1, dtype=f64),
    "softmax": lambda g: g.z.softmax(1, dtype=f64),
    "softmax raw": lambda g: aten._softmax(g.x, 1, False) * g.y,
    "log_softmax": lambda g: g.z.log_softmax(-1, dtype=f64),
    "log_softmax seq": lambda g: g.z.log_softmax(1, dtype=f64),
    "sort": lambda g: g.x.sort(1, descending=True).values * g.y,
    "sort stable": lambda g: g.x.sort(dim=1, descending=True, stable=True)[0] * g.y,
    "argsort": lambda g: g.x.argsort(1, descending=True) * g.x,
    "argsort stable": lambda g: g.x.argsort(stable=True, dim=1) * g.x,
    "histc": lambda g: torch.histc(g.x.detach(), bins=4, min=-1.5, max=1.0) * g.x,
    "argmax": lambda g: g.x.argmax(1, keepdim=True) * g.x,
    "argmin": lambda g: g.x.argmin(-1, True) * g.x,
    "topk": lambda g: g.x.topk(2, 1, largest=False, sorted=True).values,
    "topk last": lambda g: g.x.topk(2, sorted=False).values.sum(-1),
}
PRODUCTS: dict[str, Call] = {
    "linear": lambda g: F.linear(g.x, g.w.outer(g.w), g.w),
    "matmul": lambda g: g.x @ g.y.mT,
    "linear by a row": lambda g: F.linear(g.x, g.w) * g.y[..., 0],
    "linear of a row": lambda g: F.linear(g.w, g.w.outer(g.w), g.w) * g.y,
    "dot": lambda g: torch.dot(g.x.flatten(), g.y.flatten()) * 1.0,
    "mv": lambda g: torch.mv(g.x.flatten(0, 1), g.w) * 1.0,
    "matmul of a vector": lambda g: (g.x @ g.w) * (g.w @ g.y.mT),
    "mm": lambda g: torch.mm(g.x.flatten(0, 1), g.w.outer(g.w)),
    "bmm": lambda g: torch.bmm(g.x, g.y.mT),
    "addmm": lambda g: torch.addmm(
        g.w, g.x.flatten(0, 1), g.w.outer(g.w), beta=0.5, alpha=3
    ),
    "baddbmm": lambda g: torch.baddbmm(
        g.x @ g.x.mT, g.x, g.y.mT, beta=0.5, alpha=3
    ),
    "einsum": lambda g: aten.einsum(
        "bsd,btd,de->bste", [g.x, g.y, g.w.outer(g.w)], path=[1, 2, 0, 1]
    ),
    "lstm": lambda g: aten.lstm(g.x, [start(g)] * 2, weights(g, 4), *RECURRENT)[0],
    "gru": lambda g: aten.gru(g.x, start(g), weights(g, 3), *RECURRENT)[0],
    "rnn tanh": lambda g: aten.rnn_tanh(g.x, start(g), weights(g, 1), *RECURRENT)[0],
    "rnn relu": lambda g: aten.rnn_relu(g.x, start(g), weights(g, 1), *RECURRENT)[0],
    "conv1d": lambda g: F.conv1d(
        g.x.mT, g.w.outer(g.w)[:, :2, None].expand(-1, -1, 2), g.w,
        stride=2, padding=3, dilation=2, groups=2,
    ),
    "conv1d same": lambda g: F.conv1d(
        g.x.mT, g.w.outer(g.w)[..., None].expand(-1, -1, 2), g.w, padding="same"
    ),
    "embedding": lambda g: F.embedding(
        g.ids, g.w.expand(VOCAB, -1) * 1.0, padding_idx=3
    ),
    "attention": lambda g: F.scaled_dot_product_attention(
        g.heads(4), g.heads(2), g.heads(2), is_causal=True, scale=0.3, enable_gqa=True
    ),
    "masked attention": lambda g: F.scaled_dot_product_attention(
        *[g.heads()] * 3, g.mask[:, None, None] | g.mask[:, None, :, None]
    ),
    "dropped attention": lambda g: F.scaled_dot_product_attention(
        *[g.heads()] * 3, dropout_p=0.3, is_causal=True
    ),
    "flat attention": lambda g: F.scaled_dot_product_attention(
        g.heads(), g.heads(), g.heads() * g.y[:, None], scale=0.0
    ),
    "weight_norm": lambda g: torch._weight_norm(g.w.outer(g.w) + 1, g.w[None], 1),
    "weight_norm all": lambda g: torch._weight_norm(g.w.outer(g.w) + 1, g.w[0], -1),
}  # fmt: skip
NORMS: dict[str, Call] = {
    "layer_norm": lambda g: F.layer_norm(g.x, (6, 4), g.y[0] * g.w, g.y[1] * g.w, 0.3),
    "layer_norm plain": lambda g: aten.layer_norm(g.x, [4], None, g.w, 0.1, False),
    "rms_norm": lambda g: F.rms_norm(g.x, (4,), g.w, 0.3),
    "group_norm": lambda g: aten.group_norm(g.x.mT, 2, g.w, g.w + 1, 0.3, False),
    "leaky_relu": lambda g: F.leaky_relu(g.x, 0.3),
    "log_sigmoid": lambda g: F.logsigmoid(g.x),
    "silu": lambda g: F.silu(g.x) + F.mish(g.x) + g.x.square(),
    "glu": lambda g: F.glu(g.x, 1),
    "dropout": lambda g: F.dropout(g.x, 1.0) + F.dropout(g.x, 0.5, False),
}
PIECES: dict[str, Call] = {
    "add": lambda g: torch.add(g.x, g.w, alpha=3) * g.y,
    "sub": lambda g: torch.sub(g.x, g.w, alpha=3) * torch.rsub(g.y, g.w, alpha=3),
    "sub numbers": lambda g: aten.sub.Scalar(g.x.sum(), 2, 3) + aten.rsub.Scalar(
        g.y.sum(), 2, 3
    ),
    "sub sums": lambda g: torch.sub(g.x.sum(), g.w.sum(), alpha=3) * 1.0,
    "add number": lambda g: aten.add.Scalar(g.x, 2, 3) * g.y,
    "sum and number": lambda g: aten.add.Scalar(g.x.sum(), 2, 3) * 1.0,
    "mul": lambda g: g.x * 3.0,
    "floor_divide": lambda g: torch.floor_divide(g.ids, 3)[..., None] * g.x,
    "where": lambda g: torch.where(g.mask[..., None], g.x, 2.0) * g.y,
    "logic": lambda g: g.x * ((g.mask & True) | g.mask ^ (g.ids > 3))[..., None],
    "not a number": lambda g: (
        torch.where(g.mask[..., None], g.x, float("nan")).nan_to_num(0.5) * g.y
    ),
    "nothing": lambda g: g.x.split([0, 6], 1)[1] + g.x.narrow(1, 2, 0).sum(1)[:, None],
    "zero gradient": lambda g: torch.copysign(g.x, g.y - g.w),
    "inverse": lambda g: torch.linalg.inv(g.w.diag() + g.w[0]) * g.y[:, :4],
    "triangle": lambda g: torch.linalg.solve_triangular(
        g.w.diag() + g.w[0], g.x, upper=True, left=False, unitriangular=True
    ),
    "no dims": lambda g: g.w.sum().sum(-1).cumsum(0).topk(1)[0].permute([]) * g.y,
    "fill": lambda g: g.x * aten.fill(g.y, 3.0) + aten.zero(g.x) + g.x.detach(),
    "copy": lambda g: g.y.clone().copy_(g.x, True) * g.y,
    "to": lambda g: g.x.to(f32, copy=True, non_blocking=True).to(f64, copy=True) * g.y,
    "to other": lambda g: aten.to.other(g.z, g.y, True, True) * g.y,
    "to copy": lambda g: aten._to_copy(g.x, dtype=f32) * g.y,
    "type_as": lambda g: g.x.to(f32).type_as(g.y) * g.y,
    "clone": lambda g: g.x.clone(memory_format=torch.contiguous_format) * g.y,
    "contiguous": lambda g: aten.contiguous(g.x) * g.y,
    "alias": lambda g: aten.alias(g.x) * aten.lift_fresh_copy(g.y),
    "view": lambda g: aten._unsafe_view(g.x.view(4, -1), [4, 6, 4]).view_as(g.y) * g.y,
    "reshape_as": lambda g: g.x.flatten(1).reshape_as(g.y) * g.y,
    "reshape": lambda g: g.x.reshape(24, 4).unflatten(0, (4, 6)).flatten(1, 2),
    "as another": lambda g: g.x.flatten(1).reshape_as(g.y) * g.y.ravel().view(4, 6, 4),
    "squeeze": lambda g: aten.squeeze.dim(g.x.unsqueeze(1), 1).unsqueeze(-1) * g.w,
    "squeeze dims": lambda g: aten.squeeze.dims(g.x[:, None, None], [1, 2]) * g.y,
    "expand": lambda g: (g.w.expand(6, 4).expand_as(g.y).broadcast_to(4, 6, 4)) * g.x,
    "repeat": lambda g: g.x.repeat(2, 1, 3) * g.x.repeat(2, 3, 1).reshape(8, 6, 12),
    "tile": lambda g: g.x.tile(2, 1, 3) * g.x.tile(3).repeat(2, 1, 1),
    "interleave": lambda g: g.x.repeat_interleave(3, 1, output_size=18),
    "interleave unevenly": lambda g: g.x.repeat_interleave(
        torch.tensor([1, 2, 0, 1, 2, 1]), 1, output_size=7
    ),
    "interleave all": lambda g: g.w.repeat_interleave(6) * g.y.flatten(1),
    "transpose": lambda g: g.x.transpose(1, 2).permute(1, 0, 2) * g.y.permute(2, 0, 1),
    "t": lambda g: g.x[0].t() * g.y[0].adjoint() + g.x[0].T * g.y[1].mT,
    "movedim": lambda g: g.x.movedim(1, 0).moveaxis(2, 0) * g.y.permute(2, 1, 0),
    "movedims": lambda g: g.x.movedim((0, 1), (1, 2)) * g.y.moveaxis((0, 1), (1, 2)),
    "swap": lambda g: g.x.swapaxes(0, 1).swapdims(1, 2) * g.y.permute(1, 2, 0),
    "slice": lambda g: g.x[:, 1:5:3] * g.y[:, :2],
    "slice back": lambda g: aten.slice.Tensor(g.x, 1, -4, -1) * g.y[:, :3],
    "select": lambda g: g.x.select(1, -2) * g.y[:, 2],
    "narrow": lambda g: g.x.narrow(1, -4, 3) * g.y[:, 1:4],
    "index_put": lambda g: g.x.index_put((g.mask,), g.w),
    "masked_scatter": lambda g: g.x.masked_scatter(g.mask[..., None], g.y) * g.y,
    "index_put added": lambda g: g.w.expand(3, -1).index_put(
        (g.ids % 3,), g.x, accumulate=True
    )[g.ids % 3] * g.y,
    "index": lambda g: g.x[:, [3, 1, 1]] + g.x[:, [2, 3, 4]] * g.y[:, :3],
    "unbind": lambda g: g.x.unbind(1)[2] * g.y.unbind(2)[1][:, :4],
    "split": lambda g: g.x.split(2, 1)[2] * g.y.split([3, 2, 1], 1)[1],
    "splits": lambda g: aten.split_with_sizes(g.x, [2, 4], 1)[0] * g.y[:, :2],
    "one piece": lambda g: g.x.split(SEQ, 1)[0] * 2.0,
    "overlapping": lambda g: g.x.unfold(1, 3, 2) * 2.0,
    "overlapping added": lambda g: aten.unfold_backward(
        g.x.unfold(1, 3, 2), [*g.x.shape], 1, 3, 2
    ),
    "chunk": lambda g: g.x.chunk(3, 1)[1] * g.y.tensor_split(3, 1)[2],
    "tensor_split": lambda g: g.x.tensor_split((1, 4), 1)[1] * g.y[:, :3],
    "cat": lambda g: torch.cat([g.x, g.y], 1) * torch.cat([g.y, g.y], 1),
    "stack": lambda g: torch.stack([g.x, g.y], 1) * g.y[:, None],
    "pad": lambda g: F.pad(g.x, (1, -1, 2, 0), value=2.0) * 1.5,
    "pad other": lambda g: F.pad(g.x, (1, 2), mode="circular") * 1.5,
    "constant_pad": lambda g: aten.constant_pad_nd(g.x, [0, 0, 1, 1], 2.0) * 1.5,
    "slice_scatter": lambda g: torch.slice_scatter(g.y, g.x[:, :2], 1, 1, 5, 3) * g.y,
    "select_scatter": lambda g: torch.select_scatter(g.y, g.x[:, 1], 1, 3) * g.y,
    "roll": lambda g: g.x.roll((2, 1), (1, 2)) * g.y,
    "roll all": lambda g: g.x.roll(3) * g.y,
    "tril": lambda g: (g.x.tril(-1) + g.x.triu(1)) * g.y,
    "gather": lambda g: g.x.gather(1, g.ids[..., None] % 6) * g.y[..., :1],
    "index_select": lambda g: g.x.index_select(1, g.ids[0] % 6) * g.y,
    "index_copy": lambda g: g.y.index_copy(1, torch.tensor([4, 0]), g.x[:, :2]) * g.y,
    "index_add": lambda g: g.y.index_add(1, g.ids[0] % 6, g.x, alpha=0.5) * g.y,
    "take along": lambda g: (
        torch.take_along_dim(g.x, g.ids[..., None] % 6, 1) * g.y[..., :1]
    ),
    "gather one": lambda g: g.x.gather(-1, g.ids[..., None] % 4) * g.y[..., :1],
    "scatter": lambda g: g.y.scatter(2, g.ids[..., None] % 4, g.x[..., :1]) * g.y,
    "scatter value": lambda g: g.x.scatter(2, g.ids[..., None] % 4, 3.0) * g.y,
    "scatter reduce": lambda g: g.x * g.y.scatter(
        1, g.ids[..., None] % 6, 3.0, reduce="multiply"
    ),
    "scatter_add": lambda g: g.y * g.y.scatter_add(
        1, g.ids[..., None] % 6, g.x[..., :1]
    ),
    "one_hot": lambda g: F.one_hot(g.ids, VOCAB) * g.x.sum(-1, keepdim=True),
    "complex": lambda g: torch.view_as_real(
        torch.view_as_complex(g.x.unflatten(-1, (2, 2))) ** 2
    ),
    "conjugates": lambda g: torch.view_as_real(
        torch.view_as_complex(g.x.unflatten(-1, (2, 2))).mH.conj().mT
        * aten._conj(torch.view_as_complex(g.y.unflatten(-1, (2, 2))))
    ),
}  # fmt: skip
MADE: dict[str, Call] = {
    "arange": lambda g: g.x * torch.arange(1, 12, 2, dtype=f64)[:, None],
    "constants": lambda g: g.x * (
        torch.ones(4, dtype=f64) + torch.zeros(4, dtype=f64)
        + torch.full((4,), 3.0, dtype=f64) + torch.scalar_tensor(2.0, dtype=f64)
    ),
    "new": lambda g: g.x * (
        g.ids.new_ones(4, dtype=f64) + g.ids.new_zeros(4, dtype=f64)
        + g.ids.new_full((4,), 3.0, dtype=f64)
    ),
    "like": lambda g: g.x * (
        torch.ones_like(g.ids, dtype=f64) + torch.zeros_like(g.ids, dtype=f64)
        + torch.full_like(g.ids, 3.0, dtype=f64)
    )[..., None],
    "empty": lambda g: g.x * (
        torch.empty(4, dtype=f64).fill_(2.0)
        + torch.empty_like(g.w, dtype=f32).fill_(2.0)
        + g.ids.new_empty(4, dtype=f64).fill_(2.0)
    ),
    "tril_indices": lambda g: g.x * torch.tril_indices(
        4, 4, -1, dtype=torch.int32
    ).sum(),
}  # fmt: skip
GROUPS = (LOSSES, REDUCED, PRODUCTS, NORMS, PIECES, MADE)


class Caller(nn.Module):
    """Makes calls, each with a weight of its own; the loss is the sum of what they
    return, in which no element counts as much as another."""

    def __init__(self, calls: dict[str, Call]) -> None:
        super().__init__()
        self.calls = calls
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=f64))
        made = {name: torch.rand(WIDTH, dtype=f64) + 0.5 for name in calls}
        self.weights = nn.ParameterDict({key_of(n): w for n, w in made.items()})

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        total = x.sum() * 0.01
        for name, one in self.calls.items():
            w = self.weights[key_of(name)]
            result = one(Given(x * w, w, y, ids)).to(f64)
            total = total + (result * (result + 0.3)).sum()
        return total


def key_of(name: str) -> str:
    return name.replace(" ", "_").strip("_") + "_weight"


def caller(calls: dict[str, Call]) -> Case:
    torch.manual_seed(0)
    fields = {
        "ids": torch.randint(VOCAB, (BATCH, SEQ)),
        "y": torch.randn(BATCH, SEQ, WIDTH, dtype=f64),
    }
    return Case(Caller(calls), fields)
