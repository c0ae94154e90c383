"""A stage's functions, called as the executor calls them, on a rank without others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.fake_comm import FakeComm
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.running_stage import Batch, RunningStage


@torch.no_grad()
def rehearse(executor: Executor) -> None:
    """Compile functions before the first step, where other ranks would wait for them.

    Each rank computes one microbatch by itself, on zeros; nothing of it stays, and
    gradients are what they were. Does nothing where functions run as they are written,
    or were rehearsed before.
    """
    program, comm, cache = executor.program, executor.comm, executor.compiled
    if cache is None:
        return
    alone = FakeComm(program.mesh, program.plan.microbatches, comm.device, comm.rank)
    alone.state.zigzag = executor.state.zigzag
    batch = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=comm.device)
        for name, (shape, dtype) in program.inputs.items()
    }
    flats = [bucket.flat for bucket in executor.gradients.buckets]
    before = [flat.clone() if bool(flat.any()) else None for flat in flats]
    for index, stage in executor.stages.items():
        text = program.modules[program.module_of(comm.rank, index)]
        with executor.multiplying():  # which compiled code is made for
            if not cache.preload(text, comm.device):
                play(alone, stage, batch)
                stage.batch = Batch()
                cache.remember(text, comm.device)
    for flat, held in zip(flats, before, strict=True):
        flat.zero_() if held is None else flat.copy_(held)


def play(
    comm: Comm,
    stage: RunningStage,
    batch: Mapping[str, Tensor],
    watch: Callable[[str], None] = lambda name: None,
) -> None:
    """Calls each function of a module once. watch: gets the name of each, before."""
    module = stage.module

    def call(name: str, *args: Any) -> Any:
        watch(name)
        return module[name](*args)

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=comm.device)

    def arrived(table: str) -> list[Tensor]:
        return [made(*row) for row in module[table] if row]

    for name, row in module["WHOLE_GRADIENTS"].items():
        stage.grads[name] = made(*row)
    own = stage.tensors
    held = stage.batch = Batch((name, batch[name]) for name in module["INPUTS"])
    held.begin(partial(call, "prologue"), comm, own, stage.constants)
    _, residuals = call(
        "forward", comm, own, stage.constants, held, *arrived("RECEIVES")
    )
    whole = (comm, own, stage.grads, stage.constants, held)
    halves = "backward" not in module
    if halves:
        _, residuals = call("backward_input", *whole, residuals, *arrived("D_SENDS"))
    stage.begin_epilogue(comm)
    comm.state.on_ready = stage.go_on
    if halves:
        call("backward_weight", *whole, residuals)
    else:
        call("backward", *whole, residuals, *arrived("D_SENDS"))
    held.end()
    stage.end_epilogue()
