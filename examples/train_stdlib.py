"""A GPT trained on Python's standard library, with all that `autopar run` does, and the
same model in plain PyTorch beside it.

    python -m examples.train_stdlib --folder trained --steps 300 --model small

Four ranks are planned for and started. One of them is killed on the way, and later the
torchrun that started them; the same line takes the run up each time. Then the weights
are exported, text is sampled, and the losses of all steps are compared with those of
the untouched model on one device.

How far apart rounding alone takes two runs is measured beside: the same model on one
device once more, with the samples of each batch in reverse order. `--double` has all of
it in float64, where what is left is no rounding of float32.
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
from autopar.training.data.feed import open_run_data
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


def small_double() -> tuple[GPT, dict[str, torch.Tensor]]:
    model, batch = small()
    return model.double(), batch


def ten_million_double() -> tuple[GPT, dict[str, torch.Tensor]]:
    model, batch = ten_million()
    return model.double(), batch


MODELS = {"small": small, "ten_million": ten_million}
DOUBLE = {"small_double": small_double, "ten_million_double": ten_million_double}


def trained_with(steps: int) -> dict[str, Any]:
    """What both are trained with."""
    rates = {"lr": 1e-3, "min_lr": 1e-4, "lr_schedule": "cosine"}
    return {"steps": steps, "warmup": steps // 15, **rates}


def spec_of(model: str) -> str:
    return f"{__file__}:{model}"


def command(model: str, folder: Path, steps: int) -> list[str]:
    """The line that starts the run, and takes it up again."""
    options = {"devices": RANKS, "plans": folder / "plans", "data": "stdlib"}
    options |= {**trained_with(steps), "ema": 0.99}
    options |= {"eval-every": max(1, steps // 3), "save": folder / "checkpoints"}
    options |= {"save-every": max(1, steps // 10), "log-file": folder / "log.jsonl"}
    options |= {"log-every": 1, "tensorboard": folder / "board"}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
    line = [sys.executable, "-m", "autopar", "run", spec_of(model), *flags]
    return [*line, "--async-save", "--resume"]


def losses_of(log: Path) -> dict[int, float]:
    """The losses of a log by step; of a step that was made twice, the later one."""
    text = log.read_text() if log.exists() else ""
    lines = [line for line in text.splitlines() if line.endswith("}")]
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def children(process: int) -> dict[int, int]:
    """Descendants of a process: process id -> its parent's."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(folder.name)] = int(stat[1])
    below = {process}
    for _ in range(4):  # autopar, torchrun, a rank, and what it starts
        below |= {child for child, parent in parents.items() if parent in below}
    return {child: parents[child] for child in below - {process}}


def rank_of(process: int, rank: int) -> tuple[int, int] | None:
    """The process of a rank that descends from a process, and that of its torchrun;
    None if it is gone."""
    for process_id, parent in children(process).items():
        try:
            variables = (Path("/proc") / str(process_id) / "environ").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables.split(b"\0"):
            return process_id, parent
    return None


def run_and_kill(line: list[str], log: Path, at: int, torchrun: bool) -> None:
    """Start the run, and kill a rank, or its torchrun, once so many steps are made."""
    with subprocess.Popen(line) as process:
        while process.poll() is None and max(losses_of(log), default=0) < at:
            time.sleep(0.2)
        killed = rank_of(process.pid, KILLED)
        assert killed is not None, "the run ended before it could be killed"
        ranks = [*children(killed[1])]
        os.kill(killed[1] if torchrun else killed[0], signal.SIGKILL)
        assert process.wait(120) != 0
    until = time.monotonic() + 60
    while any((Path("/proc") / str(rank)).exists() for rank in ranks):
        assert time.monotonic() < until, "ranks outlive their torchrun"
        time.sleep(0.2)
    victim = "torchrun" if torchrun else f"rank {KILLED}"
    print(f"killed {victim} after step {max(losses_of(log))}", flush=True)


def plain_losses(name: str, options: RunOptions, reverse: bool) -> list[float]:
    """Trains the untouched model on one device, with the same batches; reverse: their
    samples in reverse order, which is the same but for rounding."""
    loaded = load_model(spec_of(name), seed=options.seed, device="cpu")
    model = loaded.model
    optimizer = make_optimizer(((p, p.dim()) for p in model.parameters()), options)
    data, _ = open_run_data(options, tokenizer=None).split(options.held_out)
    losses = []
    for i in range(options.steps):
        ids, labels = data.batch(i, BATCH, SEQ)
        if reverse:
            ids, labels = ids.flip(0), labels.flip(0)
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
    parser.add_argument("--double", action="store_true")
    args = parser.parse_args()
    name = f"{args.model}_double" if args.double else args.model
    folder, steps = args.folder, args.steps
    folder.mkdir(parents=True)
    line, log = command(name, folder, steps), folder / "log.jsonl"
    began = time.perf_counter()
    run_and_kill(line, log, at=steps // 3, torchrun=False)
    run_and_kill(line, log, at=2 * steps // 3, torchrun=True)
    subprocess.run(line, check=True)
    seconds = time.perf_counter() - began
    autopar = [sys.executable, "-m", "autopar"]
    weights, trained = folder / "model.pt", str(folder / "checkpoints")
    subprocess.run([*autopar, "export", trained, "-o", str(weights)], check=True)
    plain = {**MODELS, **DOUBLE}[name]()[0]
    plain.load_state_dict(torch.load(weights))  # into the plain model
    sampling = [*autopar, "sample", trained, "--prompt", "def ", "--temperature", "0.7"]
    subprocess.run([*sampling, "--tokens", "120", "--ema"], check=True)
    options = RunOptions(data=("stdlib",), eval_every=1, **trained_with(steps))
    began, losses = time.perf_counter(), losses_of(log)
    expected = plain_losses(name, options, reverse=False)
    alone = time.perf_counter() - began
    assert sorted(losses) == list(range(1, steps + 1))
    ours = [losses[i + 1] for i in range(steps)]
    print(
        f"{steps} steps: loss {ours[0]:.4f} to {ours[-1]:.4f}, of one device "
        f"{expected[-1]:.4f}; {apart(ours, expected)}\n"
        f"{RANKS} ranks, two kills included: {seconds:.0f} s; one device: {alone:.0f} s"
    )
    again = plain_losses(name, options, reverse=True)
    print(f"samples in reverse order on one device: {apart(again, expected)}")


def apart(losses: list[float], others: list[float]) -> str:
    """How far two curves are apart: at most, and in each tenth of the steps."""
    gaps = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    tenth = max(1, len(gaps) // 10)
    parts = [max(gaps[i : i + tenth]) for i in range(0, len(gaps), tenth)]
    return (
        f"at most {max(gaps):.2g} apart, at step {gaps.index(max(gaps)) + 1} "
        f"(by tenths of the steps: {' '.join(f'{part:.0e}' for part in parts)})"
    )


if __name__ == "__main__":
    main()
