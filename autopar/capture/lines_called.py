"""The calls of two forwards, and the first that differs, with the line of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.passes.capture.called import Call, Calls
from autopar.passes.capture.forward.user_frames import at_work


class Lines(Calls):
    """Calls, with the user's line of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.lines: list[str] = []

    @property
    def calls(self) -> list[Call]:
        """Calls as they are compared."""
        return self.parts[0]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = len(self.parts[0])
        result = super().__torch_function__(func, types, args, kwargs)
        self.lines += [at_work()] * (len(self.parts[0]) - before)
        return result


@dataclass(frozen=True)
class Other:
    """The first call that differs. one, other: names of both. line: of the user's
    source."""

    one: str
    other: str
    line: str


def first_other(one: Lines, other: Lines) -> Other | None:
    """The first call that is not the same."""
    lists = one.calls, other.calls
    pairs = [*zip(*lists, strict=False)]
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    at = [line for own in (one.lines, other.lines) for line in own[number : number + 1]]
    names = [_name(calls, number) for calls in lists]
    return Other(names[0], names[1], at[0]) if at else None


def _name(calls: list[Call], number: int) -> str:
    if number >= len(calls):
        return "nothing more"
    func = calls[number][0]
    return getattr(func, "__name__", None) or str(func)
