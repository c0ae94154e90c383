"""How people sort rows by their experts, work on them and put them back: texts that
models are drawn from, of a layer m, its rows x [r, 16] and their ids [r].

Each table has what is put back where it was; one whose name begins with `OTHER` has
what may stay sorted, or be refused.
"""

from __future__ import annotations

# --- logits and scores [r, 4], and of them weight and chosen [r, k] -------------------

ROUTERS = (
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "weight, chosen = scores.topk({k}, dim=-1)",
)
OTHER_ROUTERS = (
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "weight, chosen = torch.topk(logits, {k}); weight = weight.softmax(-1)",
    "logits = m.router(x); scores = logits.sigmoid()\n"
    "chosen = (scores + m.correction).topk({k}, sorted=False)[1]\n"
    "weight = scores.gather(1, chosen); weight = weight / weight.sum(-1, keepdim=True)",
    "logits = m.router(x); scores = logits.sigmoid()\n"
    "each = (scores + m.correction).view(-1, 2, 2)\n"
    "best = each.topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1)[1]\n"
    "allowed = torch.zeros_like(each[..., 0]).scatter_(1, best, 1)\n"
    "allowed = allowed[..., None].expand(-1, -1, 2).reshape(-1, 4)\n"
    "chosen = each.flatten(1).masked_fill(~allowed.bool(), 0.0).topk({k})[1]\n"
    "weight = 2.5 * scores.gather(1, chosen)",
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "weight, chosen = scores.sort(-1, descending=True)\n"
    "weight, chosen = weight[:, :{k}], chosen[:, :{k}]",
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "chosen = torch.argsort(scores, -1, True)[:, :{k}]\n"
    "weight = scores.gather(1, chosen)",
    "logits = m.router(x) + m.router(m.norm(x)).tanh()\n"
    "scores = logits.float().softmax(-1).to(x.dtype)\n"
    "weight, chosen = scores.topk({k}); weight = weight / weight.sum(1)[:, None]",
)
# Numbers of which two of a row may be the same.
HASHES = (
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "chosen = (ids[:, None] * torch.arange(1, 1 + {k})) % 4\n"
    "weight = scores.gather(1, chosen)",
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "chosen = m.table[ids][:, :{k}]; weight = scores.gather(1, chosen)",
    "logits = m.router(x); scores = logits.softmax(-1)\n"
    "chosen = torch.stack([scores.roll(i, -1).argmax(-1) for i in range({k})], 1)\n"
    "weight = scores.gather(1, chosen)",
)

# --- flat [n] -> order and number -----------------------------------------------------

SORTS = (
    "order = flat.argsort(stable=True); number = flat[order]",
    "number, order = flat.sort(stable=True)",
    "number, order = torch.sort(flat, 0)",
    "order = torch.sort(flat.int())[1]; number = flat.index_select(0, order)",
)
FALLING = "order = flat.argsort(descending=True); number = flat.gather(0, order)"
OTHER_SORTS = (
    "order = flat.double().argsort(stable=True); number = flat[order]",
    "order = (-flat).argsort(stable=True).flip(0); number = flat[order]",
    "order = (flat * {n} + torch.arange({n})).argsort(); number = flat[order]",
    "order = share.argsort(descending=True, stable=True)\n"
    "order = order[flat[order].argsort(stable=True)]; number = flat[order]",
    "order = flat.to(torch.uint8).sort(stable=True)[1]; number = flat[order]",
    "order = torch.cat([(flat == e).nonzero()[:, 0] for e in range(4)])\n"
    "number = flat[order]",
    "order = flat.topk({n}, largest=False)[1]; number = flat[order]",
    "key, order = (4 * flat + flat).sort(); number = key // 5",
)
# After which rows of one number are not together.
APART = (
    "order = share.argsort(descending=True); number = flat[order]",
    "order = torch.sort(ids.repeat_interleave({k}), stable=True)[1]\n"
    "number = flat[order]",
    "order = (flat % 2).argsort(stable=True); number = flat[order]",
    "order = flat.bool().argsort(stable=True); number = flat[order]",
    "order = scores.sum(0).argsort()[flat].argsort(stable=True); number = flat[order]",
    "order = torch.arange({n}).flip(0); number = flat[order]",
)
TOKENS = (
    "order // {k}",
    "order.div({k}, rounding_mode='floor')",
    "torch.arange({r}).repeat_interleave({k})[order]",
    "(torch.arange({r} * {k}) // {k})[order]",
)
OTHER_TOKENS = (
    "torch.arange({r})[:, None].expand(-1, {k}).flatten().gather(0, order)",
    "torch.div(order, {k}, rounding_mode='trunc')",
    "torch.arange({r}).unsqueeze(1).repeat(1, {k}).view(-1)[order]",
    "(order / {k}).floor().long()",
    "(order - order % {k}) // {k}",
)
TAKES = (
    "x[token]",
    "x.index_select(0, token)",
    "x.gather(0, token[:, None].expand(-1, 16))",
    "F.embedding(token, x)",
    "{all}[order]",
)
OTHER_TAKES = (
    "torch.take_along_dim(x, token[:, None], 0)",
    "x[token, :]",
    "F.one_hot(token, {r}).to(x.dtype) @ x",
    "F.embedding(token, x, padding_idx=0)",
    "x.unsqueeze(1).expand(-1, {k}, -1).reshape(-1, 16)[order]",
)

# --- counts of flat [4] ---------------------------------------------------------------

COUNTS = (
    "torch.bincount(flat, minlength=4)",
    "flat.bincount(minlength=4)",
    "F.one_hot(flat, 4).sum(0)",
    "F.one_hot(chosen, 4).sum(dim=(0, 1))",
    "torch.histc(flat.double(), 4, 0, 3).long()",
    "(flat[:, None] == torch.arange(4)).sum(0)",
)
OTHER_COUNTS = (
    "F.one_hot(chosen, 4).sum(1).sum(0)",
    "F.one_hot(chosen, 4).sum(0, keepdim=True).sum(1).flatten()",
    "torch.zeros(4, dtype=torch.long).scatter_add_(0, flat, torch.ones_like(flat))",
    "torch.zeros(4).double().index_add_(0, flat, torch.ones({n}).double()).long()",
    "torch.stack([(flat == e).sum() for e in range(4)])",
    "torch.searchsorted(number, torch.arange(4), right=True).diff("
    "prepend=torch.zeros(1, dtype=torch.long))",
    "torch.bincount(number, minlength=4)",
    "torch.histc(number.float(), 5, 0, 4)[:4].long()",
    "F.one_hot(flat, 6)[:, :4].sum(0)",
    "F.one_hot(flat, 4).cumsum(0)[-1]",
)

# --- y [n, 16] of sorted rows, by their experts ---------------------------------------

PRODUCTS = (
    "y = m.product(y, number)",
    "p = y.split(counts.tolist())\n"
    "y = torch.cat([m.experts[e](p[e]) for e in range(4)])",
    "n = counts.tolist()\np, s = y.split(n), share[order].split(n)\n"
    "y = torch.cat([f(p[e]) * s[e][:, None] for e, f in enumerate(m.experts)])",
    "e = torch.searchsorted(counts.cumsum(0), torch.arange(len(y)), right=True)\n"
    "y = m.product(y, e)",
)
OTHER_PRODUCTS = (
    "e = torch.bucketize(torch.arange(len(y)), counts.cumsum(0), right=True)\n"
    "y = m.product(y, e)",
    "y = m.product(y, torch.arange(4).repeat_interleave(counts, output_size={n}))",
    "e = (torch.arange(len(y))[:, None] >= counts.cumsum(0)).sum(1)\n"
    "y = m.product(y, e)",
    "e = torch.searchsorted(counts.cumsum(0), order.argsort()[order], right=True)\n"
    "y = m.product(y, e)",
    "y = torch.stack([m.experts[e](y) for e in range(4)])[number, torch.arange({n})]",
    "hot = F.one_hot(number, 4).to(y.dtype)\n"
    "y = sum(hot[:, e : e + 1] * m.experts[e](y) for e in range(4))",
    "h = torch.einsum('nd,efd,ne->nf', y, m.up, F.one_hot(number, 4).to(y.dtype))\n"
    "y = torch.einsum('nf,ndf->nd', F.silu(h), m.down[number])",
    "p = y.split(counts.tolist())\ny = torch.cat([f(q) for f, q in "
    "zip(m.experts, p) if len(q)])",
    "y = y.masked_fill((number == 3)[:, None], 0); y = m.product(y, number)",
)

# --- numbers e [n] from 0 to 3, which are none of these counts ------------------------

NUMBERS = (
    "ends = (flat == 1).sum(0, keepdim=True).cumsum(0)\n"
    "e = torch.searchsorted(ends, torch.arange({n}), right=True)",
    "ends = torch.bincount(ids % 4, minlength=4).cumsum(0) * {k}\n"
    "e = torch.searchsorted(ends, torch.arange({n}), right=True)",
    "ends = F.one_hot(ids % 4, 4).sum(0).cumsum(0)\n"
    "e = torch.searchsorted(ends, torch.arange({n}) // {k}, right=True)",
    "e = torch.arange(4).repeat_interleave(\n"
    "    {k} * torch.bincount(ids % 4, minlength=4), output_size={n})",
    "e = torch.bucketize(share, torch.tensor([0.25, 0.4, 0.6]).double())",
    "e = torch.bucketize(share[order], weight.topk(1)[0].sort(0)[0][:3, 0])",
    "e = torch.searchsorted(scores.mean(0).cumsum(0), share[order]).clamp(max=3)",
    "ends = F.one_hot(chosen, 4).sum(1).sum(1).cumsum(0)\n"
    "e = torch.searchsorted(ends, torch.arange({n}), right=True) % 4",
    "ends = F.one_hot(chosen, 4).sum(0)[0].cumsum(0)\n"
    "e = torch.searchsorted(ends, torch.arange({n}) // {k}, right=True).clamp(max=3)",
    "ends = torch.histc(share.double(), 4, 0, 1.01).long().cumsum(0)\n"
    "e = torch.searchsorted(ends, torch.arange({n}), right=True)",
    "ends = counts.view(1, 4).cumsum(0).view(4)\n"
    "e = torch.searchsorted(ends.sort()[0], torch.arange({n}), right=True) % 4",
    "e = torch.searchsorted(counts.cumsum(0), torch.arange({n})).clamp(max=3)",
    "e = torch.searchsorted(counts.cumsum(0), torch.arange({n}) + 1, right=True) % 4",
    "ends = counts.flip(0).cumsum(0)\n"
    "e = torch.searchsorted(ends, torch.arange({n}), right=True)",
    "e = torch.arange(3, -1, -1).repeat_interleave(counts, output_size={n})",
    "e = torch.arange(4).repeat_interleave(counts.flip(0), output_size={n})",
    "e = torch.arange(4).repeat_interleave(counts.sort()[0], output_size={n})",
    "e = F.one_hot(flat, 4).cumsum(0).gather(1, flat[:, None])[order, 0] % 4",
    "e = F.one_hot(number, 4).cumsum(0).gather(1, number[:, None])[:, 0] % 4",
    "e = order % 4",
    "e = flat.sort(descending=True)[0]",
    "e = ids.repeat_interleave({k}).sort()[0] % 4",
    "e = flat.argsort(stable=True).argsort(stable=True) % 4",
    "e = chosen.sort(-1)[0].flatten()[order]",
    "e = chosen.sort(0)[0].flatten()",
    "e = chosen.T.flatten()[order]",
    "e = chosen.min(-1)[0].repeat_interleave({k})[order]",
)
USES = (
    "y = y + m.bias[e]",
    "y = m.product(y, e)",
    "y = y * m.bias[e, :1]",
    "y = y * (e[:, None] + 1) / 4",
    "y = torch.where((e > 1)[:, None], y, 2 * y)",
    "y = y * (1 + torch.bincount(e, minlength=4)[number, None]) / {n}",
)
ROW_BY_ROW = (
    "y = F.silu(y)",
    "y = y * share[order, None]",
    "y = y * (1 + share[order]).unsqueeze(-1)",
    "y = m.norm(y)",
    "y = m.linear(y)",
    "y = y + m.bias[number]",
    "y = y.view(-1, 2, 8).softmax(-1).flatten(1)",
    "y = y * (number[:, None] + 1) / 4",
    "y = torch.cat([y[:, 8:], y[:, :8]], 1)",
    "y = torch.where((number > 1)[:, None], y, 2 * y)",
    "y = y + 0.1 * y.sum(0)",
    "y = y / (1 + y.abs().mean())",
    "y = y.masked_fill((share[order] < 0.3)[:, None], 0)",
    "y = y + x[token]",
)
OTHER_ROW_BY_ROW = (
    "y = F.dropout(y, 0.25, m.training)",
    "y = y * F.dropout(torch.ones_like(share), 0.2)[order, None]",
    "y = y / (1 + y.amax(0).abs())",
    "y = y * (y @ y.T).softmax(-1).sum(0)[:, None]",
    "y = y * counts.to(y.dtype)[number, None] / {n}",
    "y = y * scores.gather(1, chosen).flatten()[order][:, None]",
    "y = y * scores[token, number][:, None]",
    "y = y * (counts / counts.sum())[number].unsqueeze(1)",
    "place = F.one_hot(flat, 4).cumsum(0).gather(1, flat[:, None])[:, 0] - 1\n"
    "y = y * (place < {n} // 6)[order, None]",
    "place = torch.arange({n}) - (counts.cumsum(0) - counts)[number]\n"
    "y = torch.where((place < {n} // 6)[:, None], y, 0)",
    "place = (F.one_hot(flat, 4).cumsum(0) * F.one_hot(flat, 4)).sum(-1)\n"
    "y = y.masked_fill((place > {n} // 6)[order, None], 0.0)",
    "y = y + m.embed(ids)[token]",
    "y = y * (ids[token] % 3)[:, None]",
    "y = torch.cat([y, x[token]], 1)[:, 4:20]",
    "y = torch.stack([y, x[token]]).mean(0)",
    "y = F.normalize(y, dim=-1) + F.normalize(y, dim=0)",
    "y[:, :4] = x[token, :4]",
    "y[number == 2] *= 0.5",
)
SEEN = (
    "y = y + y.cumsum(0) / 50",
    "y = y + y.flip(0)",
    "y = y * torch.arange(len(y))[:, None] / 50",
    "y = y + x[:1].expand(len(y), -1)",
    "y = y[order]",
    "y = y + share[:, None]",
    "y = y * share.sort(0)[0][:, None]",
    "y = torch.cat([y[1:], y[:1]])",
)

# --- y [n, 16] back to y [r, 16] ------------------------------------------------------

BACK = (
    "y = y[order.argsort()].view{shape}.sum({dim})",
    "z = torch.empty_like(y); z[order] = y; y = z.view{shape}.sum({dim})",
    "i = torch.empty_like(order); i[order] = torch.arange(len(order))\n"
    "y = y[i].view{shape}.sum({dim})",
    "y = torch.zeros_like(x).index_add(0, token, y)",
    "y = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, 16), y)",
)
INVERSES = (
    "torch.argsort(order, stable=True)",
    "torch.sort(order)[1]",
    "torch.sort(order, descending=False).indices",
    "torch.zeros_like(order).scatter_(0, order, torch.arange({n}))",
    "torch.empty_like(order).scatter(0, order, torch.arange({n}))",
    "torch.arange({n}).index_put((order,), torch.arange({n}))",
    "torch.empty_like(order).index_copy_(0, order, torch.arange({n}))",
    "torch.zeros({n}, dtype=torch.long).index_add(0, order, torch.arange({n}))",
    "(order[:, None] == torch.arange({n})).int().argmax(0)",
    "(-order).argsort().flip(0)",
    "order.double().argsort()",
    "order.argsort(descending=True).flip(0)",
    "order.topk({n}, largest=False)[1]",
    "torch.searchsorted(torch.arange({n}), torch.argsort(order))",
)
OTHER_BACK = (
    "z = torch.empty_like(y).index_copy_(0, order, y).view{shape}; y = z.sum({dim})",
    "y = torch.zeros_like(y).index_put((order,), y).view{shape}.sum({dim})",
    "y = y.new_zeros({n}, 16).index_add(0, order, y).view{shape}.sum({dim})",
    "y = torch.empty_like(y).scatter(0, order[:, None].expand_as(y), y)"
    ".view{shape}.sum({dim})",
    "y = torch.zeros_like(y).index_put((order,), y, accumulate=True)\n"
    "y = (y.view{shape} * {weight}[..., None]).sum({dim})",
    "y = torch.zeros_like(x).index_put((token,), y, accumulate=True)",
    "y = F.one_hot(token, {r}).T.to(y.dtype) @ y",
    "y = torch.zeros_like(x).index_add(0, token, y, alpha=0.5)",
    "z = torch.zeros_like(x); z.index_add_(0, token, y); y = z",
    "z = torch.zeros_like(x); z[token] = y; y = z",
    "z = m.bias[:1] + 0 * x; z = z.index_add(0, token, y); y = z",
    "y = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, 8), y[:, 8:])",
    "y = torch.zeros_like(y).scatter(0, order[:, None].expand(-1, 8), y[:, 8:])"
    ".view{shape}.sum({dim})",
    "y = torch.einsum('nd,nr->rd', y, F.one_hot(token, {r}).to(y.dtype))",
    "y = torch.zeros_like(x).scatter_reduce("
    "0, token[:, None].expand(-1, 16), y, 'sum')",
    "y = y.gather(0, order.argsort()[:, None].expand(-1, 16)).view{shape}.sum({dim})",
    "y = torch.einsum('abd,ab->{out}d', y[order.argsort()].view{shape}, {weight})",
    "y = y[order.argsort()].view{shape}.amax({dim})",
    "y = y[order.argsort().view{square}].sum({dim})",
)

# --- beside experts, and what is added to the loss ------------------------------------

SHARED = (
    "y = y + m.linear(x)",
    "y = y + m.router(x)[:, :1].sigmoid() * F.silu(m.linear(x))",
    "y = F.dropout(y, 0.1)",
    "y = y + x * chosen.to(x.dtype).mean(-1, keepdim=True)",
    "y = y / weight.sum(-1, keepdim=True)",
)
AUX = (
    "4 * (scores.mean(0) * (counts / counts.sum())).sum()",
    "4 * (scores.mean(0) * F.one_hot(chosen, 4).to(x.dtype).mean((0, 1))).sum()",
    "torch.logsumexp(logits, -1).square().mean()",
    "(scores.sum(0).std() / scores.sum(0).mean()) ** 2",
    "(scores * counts).mean() / {n}",
    "-(scores * (scores + 1e-9).log()).sum(-1).mean()",
    "(scores.view({b}, {s}, 4).mean(1) * F.one_hot(chosen, 4).sum(1).view({b}, {s}, 4)"
    ".to(x.dtype).mean(1)).sum(-1).mean()",
    "y.square().mean() + share[order].mean()",
    "(scores.mean(0) * torch.bincount(number, minlength=4)).sum() / {n}",
    "(counts.max() / {n}) * weight.mean()",
)

# --- mixtures of other kinds, of scores [r, 4]: whole layers -------------------------

WHOLE = (
    # Experts choose rows.
    "weight, token = scores.T.topk({n} // 4, dim=1)\n"
    "h = F.silu(torch.einsum('ecd,efd->ecf', x[token], m.up))\n"
    "y = torch.einsum('ecf,edf->ecd', h, m.down) * weight[..., None]\n"
    "y = torch.zeros_like(x).index_add(0, token.flatten(), y.flatten(0, 1))",
    "weight, token = scores.topk({r} // 4, dim=0)\n"
    "y = torch.zeros_like(x)\n"
    "for e in range(4):\n"
    "    y = y.index_add(0, token[:, e], m.experts[e](x[token[:, e]])\n"
    "                    * weight[:, e : e + 1])",
    "weight, token = scores.T.topk({r} // 4, dim=1)\n"
    "order = token.flatten().argsort(stable=True)\n"
    "number = torch.arange(4).repeat_interleave({r} // 4)\n"
    "y = m.product(x[token.flatten()], number) * weight.flatten()[:, None]\n"
    "y = torch.zeros_like(x).index_add(0, token.flatten()[order], y[order])",
    # Per sample.
    "weight, token = scores.view({b}, {s}, 4).transpose(1, 2).topk({s} // 2, dim=-1)\n"
    "hot = F.one_hot(token, {s}).to(x.dtype)\n"
    "y = torch.einsum('becs,bsd->becd', hot, x.view({b}, {s}, 16))\n"
    "y = torch.einsum('becf,edf->becd', torch.einsum('becd,efd->becf', y, m.up)\n"
    "                 .relu(), m.down)\n"
    "y = torch.einsum('becs,becd,bec->bsd', hot, y, weight).flatten(0, 1)",
    # Capacity: a place of each choice in its expert's buffer.
    "weight, chosen = scores.topk({k}, dim=-1)\n"
    "hot = F.one_hot(chosen.T.flatten(), 4)\n"
    "place = (hot.cumsum(0) * hot).sum(-1) - 1\n"
    "fits = place < {r} // 4\n"
    "slot = F.one_hot(place.clamp(max={r} // 4 - 1), {r} // 4).to(x.dtype)\n"
    "put = torch.einsum('ne,nc,n->nec', hot.to(x.dtype), slot, fits.to(x.dtype))\n"
    "put = put.view({k}, {r}, 4, -1)\n"
    "h = torch.einsum('kred,efd->kref', torch.einsum('krec,rd->kred', put, x), m.up)\n"
    "y = torch.einsum('kref,edf->krd', F.silu(h), m.down)\n"
    "y = torch.einsum('krd,kr->rd', y, weight.T)",
    "weight, chosen = scores.max(-1)\n"
    "place = F.one_hot(chosen, 4).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1\n"
    "fits = place < {r} // 4\n"
    "slot = torch.where(fits, chosen * ({r} // 4) + place, {r})\n"
    "full = x.new_zeros({r} + 1, 16).index_copy(0, slot, x)[:-1].view(4, -1, 16)\n"
    "h = F.silu(torch.bmm(full, m.up.mT))\n"
    "y = F.pad(torch.bmm(h, m.down.mT).flatten(0, 1), (0, 0, 0, 1))[slot]\n"
    "y = y * (weight * fits)[:, None]",
    # Dense: all experts, weighed.
    "weight, chosen = scores.topk({k}, dim=-1)\n"
    "gate = torch.zeros_like(scores).scatter(1, chosen, weight)\n"
    "y = sum(gate[:, e : e + 1] * f(x) for e, f in enumerate(m.experts))",
    "low = scores.topk({k}, dim=-1)[0][:, -1:]\n"
    "gate = scores.masked_fill(scores < low, 0)\n"
    "gate = gate / gate.sum(-1, keepdim=True)\n"
    "y = torch.stack([f(x) for f in m.experts], 1)\n"
    "y = (y * gate[..., None]).sum(1)",
    "weight, chosen = scores.topk({k}, dim=-1)\n"
    "y = torch.zeros_like(x)\n"
    "for e, f in enumerate(m.experts):\n"
    "    mask = (chosen == e).any(-1, keepdim=True)\n"
    "    y = y + f(x.masked_fill(~mask, 0)) * (weight * (chosen == e)).sum(1)[:, None]",
    "weight, chosen = scores.topk({k}, dim=-1)\n"
    "y = torch.zeros_like(x)\n"
    "for e, f in enumerate(m.experts):\n"
    "    row, place = torch.where(chosen == e)\n"
    "    row, place = row[: {r} // 4], place[: {r} // 4]\n"
    "    y.index_add_(0, row, f(x[row]) * weight[row, place, None])",
)
