"""A GPT trained on Python's standard library, with all that `autopar run` does, and the
same model in plain PyTorch beside it.

    python -m examples.train_stdlib --folder trained --steps 300 --model small

Four ranks are planned for and started. One of them is killed on the way; the same line
takes the run up again. Then the weights are exported, text is sampled, and the losses
of all steps are compared with those of the untouched model on one device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.models.load import load_model
from autopar.training.feed import open_run_data
from autopar.training.optimizer import make_optimizer, set_learning_rate
from autopar.training.options import RunOptions
from examples.gpt import GPT, Config, build

RANKS, KILLED = 4, 3
BATCH, SEQ = 16, 128


def small() -> tuple[GPT, dict[str, torch.Tensor]]:
    """0.8 million parameters; bytes are tokens."""
    return build(Config(layers=4, width=128, heads=4, context=SEQ, vocab=256), BATCH)


def ten_million() -> tuple[GPT, dict[str, torch.Tensor]]:
    """10.8 million parameters."""
    return build(Config(layers=6, width=384, heads=6, context=SEQ, vocab=256), BATCH)


MODELS = {"small": small, "ten_million": ten_million}


def trained_with(steps: int) -> dict[str, Any]:
    """What both are trained with."""
    rates = {"lr": 1e-3, "min_lr": 1e-4, "lr_schedule": "cosine"}
    return {"steps": steps, "warmup": steps // 15, **rates}


def spec_of(model: str) -> str:
    return f"{__file__}:{model}"


def command(model: str, folder: Path, steps: int) -> list[str]:
    """The line that starts the run, and takes it up again."""
    given = {"devices": RANKS, "plans": folder / "plans", "data": "stdlib"}
    given |= {**trained_with(steps), "ema": 0.99}
    given |= {"eval-every": max(1, steps // 3), "save": folder / "checkpoints"}
    given |= {"save-every": max(1, steps // 10), "log-file": folder / "log.jsonl"}
    given |= {"log-every": 1, "tensorboard": folder / "board"}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in given.items()]
    line = [sys.executable, "-m", "autopar", "run", spec_of(model), *flags]
    return [*line, "--async-save", "--resume"]


def losses_of(log: Path) -> dict[int, float]:
    """By step, of a log; of a step that was made twice, the later."""
    text = log.read_text() if log.exists() else ""
    lines = [line for line in text.splitlines() if line.endswith("}")]
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def rank_of(process: int, rank: int) -> int | None:
    """The process of a rank that descends from a process; None if it is gone."""
    parents: dict[int, int] = {}
    ranks: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        parents[int(folder.name)] = int(stat[1])
        if f"RANK={rank}".encode() in variables:
            ranks.append(int(folder.name))
    for found in ranks:
        above = found
        while above in parents and above != process:
            above = parents[above]
        if above == process:
            return found
    return None


def run_and_kill(line: list[str], log: Path, at: int) -> None:
    """Start the run, and kill a rank of it once so many steps are made."""
    with subprocess.Popen(line) as process:
        while process.poll() is None and max(losses_of(log), default=0) < at:
            time.sleep(0.2)
        rank = rank_of(process.pid, KILLED)
        assert rank is not None, "the run ended before a rank could be killed"
        os.kill(rank, signal.SIGKILL)
        assert process.wait(120) != 0


def plain_losses(name: str, options: RunOptions) -> list[float]:
    """Of the untouched model, on one device, with the same batches."""
    loaded = load_model(spec_of(name), seed=options.seed, device="cpu")
    model = loaded.model
    optimizer = make_optimizer(((p, p.dim()) for p in model.parameters()), options)
    data, _ = open_run_data(options, tokenizer=None).split(options.held_out)
    losses = []
    for i in range(options.steps):
        ids, labels = data.batch(i, BATCH, SEQ)
        optimizer.zero_grad()
        loss = model(ids, labels)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        set_learning_rate(optimizer, i, options)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("trained"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", choices=MODELS, default="small")
    given = parser.parse_args()
    name, folder, steps = given.model, given.folder, given.steps
    folder.mkdir(parents=True)
    line, log = command(name, folder, steps), folder / "log.jsonl"
    began = time.perf_counter()
    run_and_kill(line, log, at=steps // 2)
    print(f"killed rank {KILLED} after step {max(losses_of(log))}", flush=True)
    subprocess.run(line, check=True)
    seconds = time.perf_counter() - began
    autopar = [sys.executable, "-m", "autopar"]
    weights, trained = folder / "model.pt", str(folder / "checkpoints")
    subprocess.run([*autopar, "export", trained, "-o", str(weights)], check=True)
    MODELS[name]()[0].load_state_dict(torch.load(weights))  # into the plain model
    said = [*autopar, "sample", trained, "--prompt", "def ", "--temperature", "0.7"]
    subprocess.run([*said, "--tokens", "120", "--ema"], check=True)
    options = RunOptions(data=("stdlib",), eval_every=1, **trained_with(steps))
    began = time.perf_counter()
    found, expected = losses_of(log), plain_losses(name, options)
    assert sorted(found) == list(range(1, steps + 1))
    apart = [abs(found[i + 1] - loss) for i, loss in enumerate(expected)]
    print(
        f"{steps} steps: loss {found[1]:.4f} to {found[steps]:.4f}, of one device "
        f"{expected[-1]:.4f}; at most {max(apart):.2g} apart, at step "
        f"{apart.index(max(apart)) + 1}\n"
        f"{RANKS} ranks, the kill included: {seconds:.0f} s; one device: "
        f"{time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
