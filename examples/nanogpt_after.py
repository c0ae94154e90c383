"""The training loop of `nanogpt_before.py`, on many devices.

torchrun --nproc-per-node 4 -m examples.nanogpt_after
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

import autopar
from examples.gpt import GPT, Config

STEPS, WARMUP, LR, MIN_LR = 100, 10, 1e-3, 1e-4
BATCH, BLOCK = 16, 64


def text() -> Tensor:
    """Bytes of the standard library, int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def get_batch(data: Tensor, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,), generator=draw)
    rows = data[starts[:, None] + torch.arange(BLOCK + 1)]
    return {"ids": rows[:, :-1].clone(), "labels": rows[:, 1:].clone()}


def get_lr(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


def main() -> list[float]:
    torch.manual_seed(1337)
    data = text()
    model = GPT(Config(layers=4, width=64, heads=4, context=BLOCK, vocab=256))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    model = autopar.compile(model, "dp=2,tp=2")
    model.prepare(optimizer)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        loss = model(**get_batch(data, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 10 == 0 and model.comm.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    state = model.state_dict(rank0_only=True)
    if model.comm.rank == 0:
        torch.save(state, "ckpt.pt")
    return losses


if __name__ == "__main__":
    main()
