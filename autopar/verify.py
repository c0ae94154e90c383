"""verify: run all ranks of a program in this process, and compare with the model.

Loss and every gradient, on the same batch, against the untouched model on one device:
with drawn weights and a drawn batch, as initial ones hide faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import nn

from autopar.own_modes import on_cpu, own_modes
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import AXES
from autopar.passes.program import Program
from autopar.proof.expected import expect
from autopar.proof.run_beside import prove
from autopar.proof.verification import Verification
from autopar.runtime.agreement.validate import check_model
from autopar.runtime.execute.code_cache import CodeCache


@own_modes()
@on_cpu()
def verify(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    drawn: bool = True,
    compiled: CodeCache | None = None,
) -> Verification:
    """Compare all ranks with the model. The model needs real weights.

    drawn: two steps with weights and batches drawn from the seed (see
    `autopar.proof.draw_values`), in place of the model's own, which stay as they are.
    Where the untouched model cannot run on a drawn batch, or gives no finite numbers,
    the batch is taken as given, and then the weights too. Else one step as given.

    compiled: where functions that Inductor compiled are kept; None: they run as they
    are written.

    A plan in mixed precision is compared with the model under autocast, and both with
    the model as it is. All three take the choices of the model under autocast: a router
    that rounds otherwise may prefer other experts, and is right to. By how much they
    preferred others must be explained by rounding too.

    Raises: AutoparError, for a model on the meta device.
    """
    check_model(program, model)
    if any(p.is_meta for p in model.parameters()):
        raise AutoparError(
            "the model has no weights to run with: it is on the meta device",
            fix="verify one made on the CPU; compile_offline(..., prove=True) proves "
            "one on meta by a small copy of it",
        )
    expected = expect(program, model, batch, loss_fn, seed, tolerance, drawn)
    return prove(program, dict(model.named_buffers()), expected, seed, compiled)


def room_needed(program: Program) -> int:
    """Bytes that the model's own forward, of the whole batch on one device, keeps for
    its backward, at least."""
    plan = program.plan
    ranks = [n for axis, n in plan.mesh.axes if "batch" in AXES[axis].splits]
    microbatches = plan.microbatches * prod(ranks)
    # At least: a rank's microbatch is split by other axes too, and recomputed.
    return microbatches * sum(stage.footprint.residuals for stage in program.stages)
