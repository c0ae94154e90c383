"""verify in mixed precision, where routers round: the same experts for all, and a
router that is wrong is still found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, run_all_ranks
from models import mixture, switch_gpt

from autopar.options import make_plan
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.proof.differences import CHOICES, find_errors
from autopar.proof.ranks import VerificationFailed
from autopar.proof.reference import reference_step
from autopar.reports.proof import verification_table
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.routing_replay import Choosing, RoutingReplay
from autopar.runtime.comm.virtual import run_virtual
from autopar.verify import verify

CHOOSE = "c.choose("
# Scores that a router compares, but nothing else reads, 1 % up or down; not in float64.
ROUNDED = (
    "(lambda x, *at: c.choose("
    "x * (1 + 0.01 * (x.itemsize < 8) * torch.sin(1e5 * x)), *at))("
)
WRONG = "(lambda x, *at: c.choose(-x, *at))("


def compiled(case: Case, mesh: str, chooses: str = CHOOSE, **options) -> Program:
    """In bf16, with something else instead of each router's choice."""
    plan = make_plan(mesh, precision="bf16", **options)
    program = compile_program(case.trace(plan.lowering), plan, PLAIN)
    changed = {k: t.replace(CHOOSE, chooses) for k, t in program.modules.items()}
    assert chooses == CHOOSE or changed != program.modules
    return replace(program, modules=changed)


MESHES = [
    ("dp=2,ep=2", {"microbatches": 2}),
    ("ep=2,tp=2", {"recompute": "full"}),
    ("pp=2,ep=2", {"microbatches": 2}),
    ("cp=2,ep=2", {}),
]


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize(("mesh", "options"), MESHES)
@pytest.mark.parametrize("build", [lambda: mixture("mixtral"), switch_gpt])
def test_a_router_that_rounds_otherwise_is_told_what_to_choose(
    build, mesh, options
) -> None:
    """Each rank its own rows, of each microbatch."""
    case = build()
    program = compiled(case, mesh, ROUNDED, **options)
    proof = verify(program, *case, drawn=False).check()
    assert 0 < proof.errors[CHOICES] < 0.03 and 0 < proof.rerouted < 0.2
    assert "preferred others" in verification_table(proof).notes[-1]
    # Else other experts would have got the gradients of these rows.
    own = run_all_ranks(program, case.model, case.batch)
    want = reference_step(*case, precision=torch.bfloat16)
    errors = find_errors(own, want)
    assert sum(errors.values()) > 2 * sum(proof.errors[name] for name in errors)


@pytest.mark.slow
def test_a_router_that_is_wrong_is_found() -> None:
    case = mixture("mixtral")
    proof = verify(compiled(case, "ep=2", WRONG), *case, drawn=False)
    assert proof.worst[0] == CHOICES and not proof.passed
    with pytest.raises(VerificationFailed, match=CHOICES):
        proof.check()


def test_every_row_takes_the_choice_of_its_place() -> None:
    told = torch.arange(8 * 6).view(8 * 6, 1)

    def body(comm: Comm) -> torch.Tensor:
        comm.state.replay = RoutingReplay([told])
        position = (((8, ("dp",)), (6, ("cp",))),)
        comm.state.zigzag = frozenset({"cp"})
        return comm.choose(torch.rand(12, 48), 1, 0, position).flatten()

    found = run_virtual(Mesh.parse("dp=2,cp=2"), 1, body)
    columns = [[0, 1, 5], [2, 3, 4]]  # of a rank of cp, in zigzag
    for rank, got in enumerate(found):
        samples = torch.arange(8).chunk(2)[rank // 2]
        want = samples[:, None] * 6 + torch.tensor(columns[rank % 2])
        assert torch.equal(got.view(4, 3), want)


def test_what_is_ruled_out_is_chosen_by_nobody_or_missed_by_all() -> None:
    """A router of groups gives -inf to experts of others; there may be fewer than k."""
    scores = torch.tensor([[0.5, 0.25, 0.125, -torch.inf, -torch.inf]])
    replay = RoutingReplay([])
    for own, told, margin in (
        ([0, 1], [1, 0], 0.0),
        ([0, 1], [0, 2], 0.25),
        ([0, 1], [0, 3], torch.inf),
        ([0, 1, 2, 3], [2, 1, 0, 4], 0.0),
    ):
        replay.take(scores, torch.tensor([own]), torch.tensor([told]), (0,))
        assert replay.margin == margin


def test_models_that_choose_otherwise_than_they_did_are_told_apart() -> None:
    case = switch_gpt()
    routers = Choosing()
    reference_step(*case, choosing=routers)
    assert len(routers.made) == 2
    fewer = Choosing(RoutingReplay(routers.made[:1]))
    with pytest.raises(AutoparError, match="chooses more often than the 1 times"):
        reference_step(*case, choosing=fewer)
    shorter = Choosing(RoutingReplay([x[:3] for x in routers.made]))
    with pytest.raises(AutoparError, match="choice 0 is of shape"):
        reference_step(*case, choosing=shorter)
