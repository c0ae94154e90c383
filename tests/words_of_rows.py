"""How people ask about rows, choose some, compute with them and write them back: texts
that models are drawn from, of x [..., width], with ids and labels [...] beside it."""

from __future__ import annotations

from draw_options import Choices

WIDTH, VOCAB, EXPERTS = 12, 17, 3
SHARING, MOST_RANKS = 2, 4
NEVER = VOCAB  # no token has it

# Which rows, of x [..., width], with ids and labels [...] beside it.
MASKS = {
    "some": "ids % 3 == 1",
    "none": f"ids == {NEVER}",
    "few": "ids == 5",
    "all": "ids >= 0",
    "labelled": "labels != -100",
    "large": "x.detach()[..., 0] > 0.3",
    "chosen": "(chosen == e).any(-1)",
    "chosen_sum": "(chosen == e).sum(-1).bool()",
    "first": "chosen[..., 0] == e",
    "one_hot": "F.one_hot(chosen, EXPERTS).sum(-2)[..., e] > 0",
    "both": "(ids % 3 == 1) & (chosen == e).any(-1)",
}
GUARDS = {
    "": "",
    "any": "if mask.any():",
    "torch_any": "if torch.any(mask):",
    "any_item": "if mask.any().item():",
    "bool_any": "if bool(mask.any()):",
    "not_any": "if not mask.any():\n{indent}    {skip}\n{indent}if True:",
    "sum": "if mask.sum() > 0:",
    "sum_item": "if mask.sum().item() > 0:",
    "int_sum": "if int(mask.sum()) > 0:",
    "sum_true": "if mask.sum():",
    "sum_zero": "if mask.sum() == 0:\n{indent}    {skip}\n{indent}if True:",
    "numel": "if idx.numel() > 0:",
    "numel_zero": "if idx.numel() == 0:\n{indent}    {skip}\n{indent}if True:",
    "len": "if len(idx) > 0:",
    "len_true": "if len(idx):",
    "shape": "if idx.shape[0] > 0:",
    "size": "if idx.size(0) != 0:",
    "nonzero": "if mask.nonzero().numel() > 0:",
    "count": "if torch.count_nonzero(mask) > 0:",
    "max": "if mask.max():",
    "picked": "if x[mask].shape[0] > 0:",
    "picked_numel": "if x[mask].numel():",
    "two": "if mask.sum() > 2:",
    "every": "if mask.all():",
    "mean": "if mask.float().mean() > 0:",
    "tolist": "if sum(mask.flatten().tolist()):",
}
INDICES = {
    "squeeze": "mask.nonzero().squeeze(-1)",
    "column": "mask.nonzero()[:, 0]",
    "flatten": "torch.nonzero(mask).flatten()",
    "tuple": "mask.nonzero(as_tuple=True)[0]",
    "where": "torch.where(mask)[0]",
    "view": "torch.nonzero(mask, as_tuple=False).view(-1)",
    "argwhere": "torch.argwhere(mask).squeeze(1)",
    "arange": "torch.arange(mask.shape[0], device=mask.device)[mask]",
}
# How rows are picked of `{0}`.
PICKS = {
    "mask": "{0}[mask]",
    "ellipsis": "{0}[mask, ...]",
    "colon": "{0}[mask, :]",
    "index": "{0}[idx]",
    "index_colon": "{0}[idx, :]",
    "select": "{0}.index_select(0, idx)",
    "select_back": "torch.index_select({0}, -2, idx)",
    "masked": "{0}.masked_select(mask[..., None]).view(-1, {0}.shape[-1])",
    "masked_wide": "torch.masked_select({0}, mask[..., None].expand_as({0}))"
    ".reshape(-1, {0}.shape[-1])",
    "gather": "{0}.gather(0, idx[:, None].expand(-1, {0}.shape[-1]))",
    "take_along": "torch.take_along_dim({0}, idx[:, None], 0)",
    "embedding": "F.embedding(idx, {0})",
    "tensor_index": "{0}[idx.tolist()]",
}
# What is done with rows y [rows, width].
WORK = {
    "expert": "m.experts[e](y)",
    "scaled": "m.experts[e](y) * {share}[:, None]",
    "scaled_view": "m.experts[e](y) * {share}.view(-1, 1)",
    "scaled_unsqueeze": "{share}.unsqueeze(-1) * m.experts[e](y)",
    "unit": "F.normalize(y, dim=-1)",
    "norm": "y / y.norm(dim=-1, keepdim=True)",
    "root": "(y * y).sum(-1, keepdim=True).sqrt() + y",
    "log": "y.softmax(-1).log()",
    "power": "y.abs() ** 1.5",
    "divide": "y / (y.detach() * y)",
    "exp": "torch.exp(y)",
    "standard": "(y - y.mean(-1, keepdim=True)) / y.std(-1, keepdim=True)",
    "cast": "m.experts[e](y.clone()).float().to(y.dtype)",
    "in_place": "m.experts[e](y).mul_(2).add_(1)",
    "sorted": "y.sort(-1).values",
    "cumsum": "y.cumsum(-1)",
    "halves": "torch.cat(y.chunk(2, -1)[::-1], -1)",
    "split": "torch.cat([2 * h for h in y.split(4, -1)], -1)",
    "heads": "y.view(-1, 3, 4).softmax(1).flatten(1)",
    "heads_rows": "y.view(y.shape[0], 3, 4).transpose(1, 2).reshape(y.shape[0], -1)",
    "twice": "torch.stack([y, 2 * y], 1).sum(1)",
    "where": "torch.where(y > 0, y, 0.1 * y)",
    "clamp": "y.clamp(-1, 1)",
    "einsum": "torch.einsum('nw,wv->nv', y, m.mix)",
    "matmul": "y @ m.mix",
    "bmm": "torch.bmm(y[:, None], m.mix.expand(y.shape[0], -1, -1))[:, 0]",
    "outer": "(y[:, :, None] * y[:, None]).sum(1)",
    "layer_norm": "m.norm(y)",
    "rows_softmax": "y.softmax(0)",
    "centred": "y - y.mean(0)",
    "checkpoint": "torch.utils.checkpoint.checkpoint(m.experts[e], y, "
    "use_reentrant=False)",
    "dropout": "F.dropout(m.experts[e](y), 0.0)",
    "cat_ones": "torch.cat([y[:, :-1], torch.ones_like(y[:, :1])], -1)",
    "zeros_like": "torch.zeros_like(y) + y",
    "new_zeros": "y.new_zeros(y.shape[0], y.shape[1]).add(y)",
}
# How rows v are written back to `out`, which is alike x.
WRITES = {
    "set": "out[mask] = v",
    "add": "out[mask] += v",
    "set_index": "out[idx] = v",
    "add_index": "out[idx] += v",
    "index_add_": "out.index_add_(0, idx, v)",
    "index_add": "out = out.index_add(0, idx, v)",
    "index_add_alpha": "out.index_add_(0, idx, v, alpha=0.5)",
    "index_copy_": "out.index_copy_(0, idx, v)",
    "index_put_": "out.index_put_((idx,), v, accumulate=True)",
    "index_put": "out = out.index_put((idx,), v)",
    "scatter_": "out.scatter_(0, idx[:, None].expand_as(v), v)",
    "scatter_add_": "out.scatter_add_(0, idx[:, None].expand(-1, v.shape[-1]), v)",
    "scatter_reduce": "out = out.scatter_reduce(0, idx[:, None].expand_as(v), v, "
    "'sum')",
    "masked_scatter": "out = out.masked_scatter(mask[..., None], v)",
    "masked_scatter_": "out.masked_scatter_(mask[..., None].expand_as(out), v)",
    "of_new": "new = torch.zeros_like(out)\nnew[mask] = v\nout = out + new",
    "of_new_add": "out = out + torch.zeros_like(out).index_add(0, idx, v)",
    "copy": "out = out.clone()\nout[mask] = v",
    "sum": "out = out + v.sum(0)",
    "sum_all": "out = out * (1 + v.sum() / 100)",
}
OUT = {
    "clone": "x.clone()",
    "zeros_like": "torch.zeros_like(x)",
    "zeros": "torch.zeros(x.shape, dtype=x.dtype, device=x.device)",
    "new_zeros": "x.new_zeros(x.shape)",
    "empty": "torch.zeros_like(x).contiguous()",
    "plus": "x + 0",
}
SHARES = {
    "": "weight.sum(-1)",
    "where": "(weight * (chosen == e)).sum(-1)",
    "first": "weight[..., 0]",
}
# Of logits [rows, vocab] and labels [rows], beside the loss of all.
LOSSES = {
    "": "0.0",
    "cross_entropy": "F.cross_entropy(logits[kept], labels[kept])",
    "sum": "F.cross_entropy(logits[kept], labels[kept], reduction='sum') / 9",
    "none": "F.cross_entropy(logits[kept], labels[kept], reduction='none').mean()",
    "nll": "F.nll_loss(logits[kept].log_softmax(-1), labels[kept])",
    "gather": "-logits[kept].log_softmax(-1).gather(-1, labels[kept][:, None]).mean()",
    "pick": "-logits.log_softmax(-1)[torch.arange(len(labels)), labels.clamp(min=0)]"
    "[kept].mean()",
    "mean": "logits[kept].square().mean()",
    "mean_rows": "logits[kept].mean(0).sum()",
    "masked": "logits.masked_select(kept[:, None]).abs().mean()",
    "divided": "logits[kept].square().sum() / kept.sum()",
    "counted": "logits[kept].square().sum() / len(logits[kept])",
    "shape": "logits[kept].square().sum() / logits[kept].shape[0]",
    "least": "logits[kept].square().sum() / max(1, kept.sum())",
    "least_item": "logits[kept].square().sum() / max(1, kept.sum().item())",
    "clamped": "logits[kept].square().sum() / kept.sum().clamp(min=1)",
    "numel": "logits[kept].square().sum() / logits[kept].numel()",
    "max": "logits[kept].max() + logits[kept].amin()",  # torch has none of no rows
    "var": "logits[kept].var()",
    "norm": "logits[kept].norm()",
    "if_any": "logits[kept].square().mean() if kept.any() else 0.0",
    "if_sum": "logits[kept].square().mean() if kept.sum() > 0 else logits.sum() * 0",
    "z": "logits[kept].logsumexp(-1).square().mean()",
    "smooth": "F.cross_entropy(logits[kept], labels[kept], label_smoothing=0.1)",
    "mse": "F.mse_loss(logits[kept][:, 0], labels[kept].to(logits.dtype))",
    "bce": "F.binary_cross_entropy_with_logits(logits[kept][:, 0], "
    "(labels[kept] > 3).to(logits.dtype))",
    "kl": "F.kl_div(logits[kept].log_softmax(-1), logits[kept].detach().softmax(-1), "
    "reduction='batchmean')",
}
NEEDS_INDEX = {n for n, t in {**GUARDS, **PICKS, **WRITES}.items() if "idx" in t}

DESIGN: Choices = {
    "flat": lambda v: [True, True, False],
    "turns": lambda v: [1, 2, 3],
    "mask": lambda v: list(MASKS),
    "guard": lambda v: [g for g in GUARDS if v["flat"] or g not in NEEDS_INDEX],
    "index": lambda v: list(INDICES),
    "pick": lambda v: [p for p in PICKS if v["flat"] or p not in NEEDS_INDEX],
    "work": lambda v: list(WORK),
    "share": lambda v: list(SHARES),
    "write": lambda v: [w for w in WRITES if v["flat"] or w not in NEEDS_INDEX],
    "out": lambda v: list(OUT),
    "loss": lambda v: [*LOSSES],
    "kept": lambda v: ["labels != -100", "labels > 4", f"labels == {NEVER - 1}"],
    "batch": lambda v: [2, 4, 4],
    "seq": lambda v: [6, 8],
}
# What most of a draw is: of two uncommon words one would be refused for the other.
USUAL = {
    "mask": "chosen",
    "guard": "any",
    "pick": "mask",
    "work": "scaled",
    "write": "add",
    "loss": "",
}
VARIED = 3
