"""Errors that a user can act on: what is wrong, where in their source, and a fix."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors about the user's model, mesh, hints, batch or plan.

    The text has one fact a line: what, `at` the user's source line, `fix`.
    """

    def __init__(self, message: str, *, source: str = "", fix: str = "") -> None:
        lines = [message]
        if source:
            lines.append(f"  at   {source}")
        if fix:
            lines.append(f"  fix  {fix}")
        super().__init__("\n".join(lines))
        self.message, self.source, self.fix = message, source, fix


class CaptureError(AutoparError):
    """The model cannot be read as one graph."""


class ShardingConflict(AutoparError):
    """A decision or a hint asks for a split that an op's rule forbids."""


LOSS = "loss"  # the name of what is trained among outputs


class LossNotSeparable(AutoparError):
    """The loss over the batch, or another output, is not a sum over microbatches.

    outputs: names of those that are not, none where they are not known.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str = "",
        fix: str = "",
        outputs: frozenset[str] = frozenset({LOSS}),
    ) -> None:
        if outputs and LOSS not in outputs:
            message += f", for {', '.join(map(repr, sorted(outputs)))}"
        super().__init__(message, source=source, fix=fix)
        self.outputs = outputs


class HintError(AutoparError):
    """A hint names nothing, or something that cannot be split so."""


class BatchError(AutoparError):
    """The batch does not fit the mesh, the microbatches or the compiled shapes."""


class IndexOutOfRange(BatchError, IndexError):
    """An id or a label of the batch is outside of the model's range."""


class StageError(AutoparError):
    """The graph cannot be cut into the stages that are asked for."""
