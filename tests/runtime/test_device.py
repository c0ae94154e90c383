"""A step on another device than the CPU, as on a GPU: nothing of it is made elsewhere,
and nothing in it waits for what the device computes.

The device is `meta`: it has no values, so whatever asks for one raises.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case
from models import gpt2, llama, mixture, plain_gpt, switch_gpt
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.proof.ranks import local_parameters
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import RankError, run_virtual
from autopar.runtime.execute.executor import Executor

META = torch.device("meta")


class AllOnMeta(TorchDispatchMode):
    """Raises for an op that makes a tensor on another device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in _pytree.tree_leaves(made):
            assert not isinstance(x, torch.Tensor) or x.is_meta, f"{func} on {x.device}"
        return made


def step_on_meta(case: Case, mesh: str, microbatches: int, **options: Any) -> None:
    program = case.compile(mesh, microbatches, **options)
    wholes = {n: p.to(META) for n, p in case.model.named_parameters()}
    buffers = {n: b.to(META) for n, b in case.model.named_buffers()}
    batch = {n: x.to(META) for n, x in case.batch.items()}

    def body(comm: Comm) -> None:
        held = local_parameters(program, comm, wholes)
        executor = Executor(program, comm, held, buffers)
        with AllOnMeta():
            loss = executor.step(batch)
        assert loss.is_meta
        assert all(p.grad is not None and p.grad.is_meta for p in held.values())

    run_virtual(program.mesh, microbatches, body, META)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("make", "mesh", "options"),
    [
        (lambda: plain_gpt(2), "pp=2,tp=2", {"recompute": "full"}),
        (lambda: plain_gpt(1, dropout=0.1), "cp=2", {"precision": "bf16"}),
        (lambda: gpt2(2, padded=True), "pp=2,tp=2", {}),
        (lambda: llama(1), "dp=2,tp=2", {"zero": 3}),
        (switch_gpt, "ep=2", {}),
    ],
    ids=["gpt", "cp", "padded", "zero", "switch"],
)
def test_a_step_stays_on_its_device(
    make: Callable[[], Case], mesh: str, options: dict[str, Any]
) -> None:
    step_on_meta(make(), mesh, 2, **options)


@pytest.mark.slow
def test_a_mixture_asks_how_many_rows_each_expert_gets() -> None:
    """The one thing that waits, once a layer: such messages are the host's to start."""
    with pytest.raises(RankError, match="Cannot copy out of meta tensor") as error:
        step_on_meta(mixture("mixtral"), "ep=2", 2)
    assert error.value.__cause__ is not None
    frames = traceback.extract_tb(error.value.__cause__.__traceback__)
    assert "route" in [frame.name for frame in frames]
