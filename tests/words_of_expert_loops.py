"""How people write loops over experts that are modules: texts that models are drawn
from, of a layer m and its tokens x [rows, width], or x [batch, seq, width].

Each table has first what becomes one step for all experts, and in `OTHERS` what stays a
loop, or is refused.
"""

from __future__ import annotations

# x -> weight and chosen [..., k]; for one choice [...].
SEVERAL = {
    "topk": "weight, chosen = m.router(x).softmax(-1).topk({k}, dim=-1)",
    "softmax": """
logits, chosen = torch.topk(m.router(x), {k}, dim=-1)
weight = F.softmax(logits, dim=-1, dtype=torch.float32).to(x.dtype)""",
    "shares": """
weight, chosen = torch.topk(F.softmax(m.router(x), dim=-1), {k}, dim=-1)
weight /= weight.sum(dim=-1, keepdim=True)""",
    "sorted": """
order = m.router(x).softmax(-1).sort(-1, descending=True)
weight, chosen = order.values[..., :{k}], order.indices[..., :{k}]""",
    "argsort": """
scores = m.router(x).sigmoid()
chosen = scores.argsort(-1, descending=True)[..., :{k}]
weight = scores.gather(-1, chosen)""",
    "bias": """
scores = m.router(x).sigmoid()
chosen = (scores + m.bias).topk({k}, dim=-1)[1]
weight = scores.gather(-1, chosen)
weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * 2.5""",
    "groups": """
scores = m.router(x).sigmoid()
grouped = (scores + m.bias).unflatten(-1, (2, -1))
best = grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0].sum(-1)
allowed = torch.zeros_like(best).scatter_(-1, best.topk(1, dim=-1)[1], 1)
allowed = allowed.unsqueeze(-1).expand_as(grouped).flatten(-2)
masked = (scores + m.bias).masked_fill(~allowed.bool(), 0.0)
chosen = masked.topk({k}, dim=-1, sorted=False)[1]
weight = scores.gather(-1, chosen)""",
    "wide": """
logits = F.linear(x.float(), m.router.weight.float())
weight, chosen = logits.softmax(-1).topk({k}, dim=-1)
weight = weight.to(x.dtype)""",
}
ONE = {
    "max": "weight, chosen = m.router(x).softmax(-1).max(dim=-1)",
    "argmax": """
scores = m.router(x).softmax(-1)
chosen = torch.argmax(scores, dim=-1)
weight = scores.gather(-1, chosen[..., None]).squeeze(-1)""",
    "squeezed": """
weight, chosen = m.router(x).softmax(-1).topk(1, dim=-1)
weight, chosen = weight.squeeze(-1), chosen.squeeze(-1)""",
}
# Before the loop, and in it: a mask of the shape of the choices.
MASKS = {
    "eq": ("", "mask = chosen == e"),
    "method": ("", "mask = chosen.eq(e)"),
    "narrow": ("", "mask = (chosen.to(torch.int32) == e)"),
    "arange": (
        "masks = (chosen.unsqueeze(-1) == torch.arange(E)).movedim(-1, 0)",
        "mask = masks[e]",
    ),
    "one_hot": ("hot = F.one_hot(chosen, E)", "mask = hot[..., e].bool()"),
    "one_hot_eq": ("hot = F.one_hot(chosen, E)", "mask = hot[..., e] == 1"),
    "one_hot_gt": ("hot = F.one_hot(chosen, E)", "mask = hot.select(-1, e) > 0"),
    "unbound": ("masks = F.one_hot(chosen, E).bool().unbind(-1)", "mask = masks[e]"),
}
# Rows of x, as x[at], and what each expert's are multiplied by.
PICKS = {
    "where": ("row, place = torch.where(mask)", "row", "weight[row, place, None]"),
    "tuple": (
        "row, place = mask.nonzero(as_tuple=True)",
        "row",
        "weight[row, place].unsqueeze(-1)",
    ),
    "columns": (
        "at = torch.nonzero(mask)\nrow, place = at[:, 0], at[:, 1]",
        "row",
        "weight[row, place][:, None]",
    ),
    "unbind": (
        "row, place = mask.nonzero().unbind(-1)",
        "row",
        "weight[row, place].view(-1, 1)",
    ),
    "turned": (
        "place, row = torch.where(mask.t())",
        "row",
        "weight[row, place, None]",
    ),
    "sum": (
        "row = mask.any(dim=-1).nonzero().squeeze(-1)\nshare = (weight * mask).sum(-1)",
        "row",
        "share[row].unsqueeze(-1)",
    ),
    "keepdim": (
        "row = mask.any(-1)\nshare = (weight * mask.to(weight.dtype))"
        ".sum(-1, keepdim=True)",
        "row",
        "share[row]",
    ),
    "chosen": (
        "row = mask.any(-1)\nshare = torch.where(mask, weight, 0.0).sum(-1)",
        "row",
        "share[row][:, None]",
    ),
    "slot": (
        "row = mask.any(-1).nonzero().flatten()\n"
        "slot = mask[row].int().argmax(-1, keepdim=True)",
        "row",
        "weight[row].gather(-1, slot)",
    ),
}
PICKS_OF_ONE = {
    "where": ("row = torch.where(mask)[0]", "row", "weight[row, None]"),
    "tuple": ("(row,) = torch.where(mask)", "row", "weight[row].unsqueeze(-1)"),
    "mask": ("row = mask", "row", "weight[mask].unsqueeze(-1)"),
    "column": ("row = mask.nonzero().squeeze(-1)", "row", "weight[row][:, None]"),
    "view": (
        "row = mask.nonzero().view(-1)",
        "row",
        "weight.index_select(0, row)[:, None]",
    ),
}
PICKS_OF_SAMPLES = {  # x [batch, seq, width], chosen [batch, seq, k]
    "where": (
        "b, t, place = torch.where(mask)",
        "b, t",
        "weight[b, t, place, None]",
    ),
    "mask": (
        "row = mask.any(-1)\nshare = (weight * mask).sum(-1)",
        "row",
        "share[row][:, None]",
    ),
    "any": (
        "b, t = torch.where(mask.any(-1))\nshare = (weight * mask).sum(-1)",
        "b, t",
        "share[b, t, None]",
    ),
    "tuple": (
        "b, t, place = mask.nonzero(as_tuple=True)",
        "b, t",
        "weight[b, t, place].unsqueeze(1)",
    ),
}
# How v [rows, width] is added to y: at places or a mask, or at places of one dim.
WRITES = {
    "add": "y[{at}] += v",
    "sum": "y[{at}] = y[{at}] + v",
    "put": "y.index_put_(({at},), v, accumulate=True)",
    "new": "new = torch.zeros_like(y)\nnew[{at}] = v\ny = y + new",
}
WRITES_OF_ROWS = {
    "index_add": "y.index_add_(0, {at}, v)",
    "index_added": "y = y.index_add(0, {at}, v)",
    "scatter": "y.scatter_add_(0, {at}.unsqueeze(-1).expand(-1, y.shape[-1]), v)",
    "zeros": "y = y + torch.zeros_like(y).index_add(0, {at}, v)",
}
STARTS = {
    "zeros_like": "y = torch.zeros_like(x)",
    "zeros": "y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)",
    "new_zeros": "y = x.new_zeros(x.shape)",
    "clone": "y = x.clone()",
    "shared": "y = m.shared(x)",
    "nothing": "y = 0 * x.detach()",
}
GUARDS = {
    "": "",
    "any": "if not mask.any():\n    continue",
    "sum": "if mask.sum() == 0:\n    continue",
    "count": "if torch.count_nonzero(mask) == 0:\n    continue",
    "numel": "if mask.nonzero().numel() == 0:\n    continue",
}
WORK = {
    "plain": "v = expert({x}) * {share}",
    "front": "v = {share} * expert({x})",
    "cast": "v = (expert({x}) * {share}).to(y.dtype)",
    "input": "v = expert({x} * {share})",
    "reshape": "v = expert({x}.reshape(-1, x.shape[-1])) * {share}",
    "residual": "h = {x}\nv = (h + expert(h)) * {share}",
    "dropout": "v = F.dropout(expert({x}), 0.2, m.training) * {share}",
    "named": "h = {x}\nv = expert(h).mul({share})",
}
LOOPS = {
    "enumerate": "for e, expert in enumerate(m.experts):",
    "range": "for e in range(E):\n    expert = m.experts[e]",
    "reversed": "for e in reversed(range(E)):\n    expert = m.experts[e]",
    "unique": "for e in chosen.unique().tolist():\n    expert = m.experts[e]",
    "present": "for e in torch.unique(chosen):\n    expert = m.experts[int(e)]",
    "hit": """
counts = F.one_hot(chosen, E).flatten(0, -2).sum(0)
for e in torch.greater(counts, 0).nonzero().squeeze(-1):
    expert = m.experts[e]""",
    "counted": """
counts = torch.bincount(chosen.flatten(), minlength=E)
for e in torch.where(counts > 0)[0].tolist():
    expert = m.experts[e]""",
}

OTHERS = {
    "pick": {
        "filled": (
            "row = mask.any(-1)\nshare = weight.masked_fill(~mask, 0).sum(-1)",
            "row",
            "share[row, None]",
        ),
        "masked": ("row = mask.any(-1)", "row", "weight[mask].unsqueeze(-1)"),
        "scores": (
            "spread = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, chosen, weight)"
            "\nrow = mask.any(-1).nonzero().squeeze(1)",
            "row",
            "spread[row, e, None]",
        ),
    },
}
