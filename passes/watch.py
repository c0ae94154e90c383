"""Watches: observers of the result of each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Verified(Protocol):
    """The result of a pass."""

    def verify(self) -> object: ...


Made = Verified | str
Watch = Callable[[str, Made], None]


def check(name: str, made: Made) -> None:
    """A watch that verifies what each pass made. Raises: AssertionError."""
    if not isinstance(made, str):  # an emitted module is proved by what it computes
        made.verify()
