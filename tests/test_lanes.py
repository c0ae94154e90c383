"""Process groups for messages; on gloo, which needs none, but has them too."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from plans import BATCH, CONFIG, small_program
from processes import run_ranks

from autopar.runtime.comm import Comm, CommError
from autopar.runtime.executor import Executor
from autopar.runtime.lanes import open_lanes
from autopar.runtime.process_groups import ProcessComm
from autopar.runtime.virtual import run_virtual
from autopar.verify import local_parameters
from examples.gpt import build
from passes.mesh import Mesh
from passes.program import Program

Pair = tuple[int, int]


def pairs_of_a_step(program: Program) -> list[Pair]:
    """(sender, receiver) of what ranks send in a step."""
    model, batch = build(CONFIG, BATCH)
    wholes = dict(model.named_parameters())

    def body(comm: Comm) -> set[Pair]:
        sent: set[Pair] = set()
        send = comm.send

        def noted(x: torch.Tensor, to_rank: int, tag: int):
            sent.add((comm.rank, to_rank))
            return send(x, to_rank, tag)

        comm.send = noted
        held = local_parameters(program, comm, wholes)
        Executor(program, comm, held, dict(model.named_buffers())).step(batch)
        return sent

    found = run_virtual(program.mesh, program.plan.microbatches, body)
    return sorted(set().union(*found))


@pytest.mark.parametrize(
    ("mesh", "schedule", "stages_per_rank"),
    [("pp=2,tp=2", "1f1b", 1), ("pp=2", "interleaved", 2), ("dp=2", "1f1b", 1)],
)
def test_a_program_tells_who_sends_to_whom(
    mesh: str, schedule: str, stages_per_rank: int
) -> None:
    program = small_program(mesh, 2, schedule, stages_per_rank)
    assert program.messages() == pairs_of_a_step(program)


RING = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]


def everyone_sends_first() -> list[float]:
    comm = ProcessComm(Mesh.parse("pp=3"), timeout=timedelta(seconds=200))
    comm._lanes = open_lanes(comm.rank, RING, comm.device, timedelta(seconds=200))
    assert set(comm._lanes) == {pair for pair in RING if comm.rank in pair}
    others = [rank for rank in range(3) if rank != comm.rank]
    for other in others:
        comm.send(torch.full((2,), comm.rank * 3.0 + other), other, 0)
    came = [comm.recv((2,), torch.float32, other, 0) for other in others]
    found = [receipt.wait()[1].item() for receipt in came]
    comm.flush()
    comm._lanes = {}
    with pytest.raises(CommError, match=f"rank {comm.rank} to rank {others[0]}\n  fix"):
        comm.send(torch.zeros(2), others[0], 0)
    return found


def test_each_direction_of_a_pair_has_a_lane() -> None:
    assert run_ranks(everyone_sends_first, 3) == [[3.0, 6.0], [1.0, 7.0], [2.0, 5.0]]
