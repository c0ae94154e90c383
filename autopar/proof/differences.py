"""Differences between what two computations of one step found, by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.proof.errors import NOISE, norm_of, relative_error, root_mean_square, worse
from autopar.proof.ranks import NONE, StepResult
from autopar.proof.update import RATE, Update

# The name of the margin by which routers preferred others than they were told.
CHOICES = "choice of experts"
# And of the norm of all gradients, and of the loss without dropout.
NORM, EVALUATED = "norm of all gradients", "loss without dropout"
CLIPPING = "norm that gradients are clipped by"

# A loss, and gradients by the model's own names.
Gradients = tuple[Tensor, Mapping[str, Tensor]]


def differences(
    ours: StepResult, want: StepResult, exact: StepResult | None = None
) -> dict[str, float]:
    """Relative errors of all that both have: losses, every gradient, the norm of them,
    and the margin of choices, which is a share already.

    exact: whose sizes errors are relative to, where better known than by `want`: of
    what cancels, a rounded computation may have lost all.
    """
    size = exact or want
    errors = find_errors(
        (ours.loss, ours.gradients),
        (want.loss, want.gradients),
        (size.loss, size.gradients),
    )
    errors[NORM] = abs(ours.norm - want.norm) / (size.norm or 1.0)
    if ours.evaluated is not None and want.evaluated is not None:
        errors[EVALUATED] = relative_error(
            ours.evaluated, want.evaluated, size=size.evaluated
        )
    for name, x in ours.outputs.items():
        if x.is_floating_point() and name in want.outputs:
            output, scale = want.outputs[name], size.outputs.get(name)
            errors[f"output '{name}'"] = relative_error(x, output, size=scale)
    if ours.margin is not None:
        errors[CHOICES] = abs(ours.margin - (want.margin or 0.0))
    return errors


def find_errors(
    ours: Gradients, want: Gradients, size: Gradients | None = None
) -> dict[str, float]:
    """The relative errors of the loss and every gradient, by name; 1 for one that is
    missing. size: what errors are relative to; None: `want`."""
    loss, grads = ours
    size = size or want
    noise = NOISE * root_mean_square(size[1].values())
    errors = {"loss": relative_error(loss, want[0], size=size[0])}
    for name, grad in want[1].items():
        if name in grads:
            least = noise * grad.numel() ** 0.5
            known = size[1].get(name, grad)
            errors[name] = relative_error(grads[name], grad, least, known)
        elif bool(grad.any()):
            errors[name] = 1.0
    return errors


def result_of_model(
    loss: Tensor,
    gradients: Mapping[str, Tensor],
    evaluated: Tensor | None = None,
    margin: float | None = None,
    outputs: Mapping[str, Tensor] = NONE,
) -> StepResult:
    """Returns the untouched model's step as a StepResult, for comparison."""
    norm = norm_of(gradients)
    return StepResult(loss, gradients, norm, evaluated, (), margin, outputs)


def update_errors(ours: StepResult, want: Update | None) -> dict[str, float]:
    """The errors of the norm for clipping, of each rank's weights, and of a
    checkpoint's contents."""
    if want is None:
        return {}
    norm = ours.updated[0].norm
    errors = {CLIPPING: abs(norm - want.norm) / (want.norm or 1.0)}
    for rank in ours.updated:
        for name, error in rank.errors.items():
            after = f"{name} after an update"
            errors[after] = worse(errors.get(after, 0.0), error)
        errors |= {f"{n} in a checkpoint": error for n, error in rank.saved.items()}
    return errors


def update_allowance(
    moved: Mapping[str, float], exact: StepResult, update: Update | None
) -> dict[str, float]:
    """The errors that an update may have, where gradients may be moved: AdamW's first
    step is of RATE g / (|g| + eps), so at most RATE / eps times as far."""
    if update is None:
        return {}
    allowed = {CLIPPING: moved[NORM]}
    for name, gradient in exact.gradients.items():
        share = moved[name] + moved[NORM]
        scale = update.eps * update.weights[name].norm().item()
        after = RATE * share * gradient.norm().item() / scale if scale else 0.0
        allowed[f"{name} after an update"] = after
        allowed[f"{name} in a checkpoint"] = max(after, share)
    return allowed
