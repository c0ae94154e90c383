"""Parts that commands share: the flags of options, types of values.

A flag of a number is named as its range in `passes.ranges`, which the Python API checks
too. argparse puts the flag's name before what is said of a value here.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.commands.parser import shown_default
from autopar.options import OPTIONS, read_bytes, usual
from autopar.passes.errors import AutoparError, HintError
from autopar.passes.plan import AUTO
from autopar.passes.ranges import RANGES, Range, shown

SEARCH = "searched for"
LONGEST = 4096  # characters of a value, bytes of a path
SEQ = 128  # tokens of a sample, unless told otherwise
NAME = 255  # bytes of a name in a path
MODEL = "file.py:factory, module:factory, hf:TYPE[?key=value,...], hf:config.json, or "
MODEL += "the hub's name of a known one, as hf:meta-llama/Llama-3.1-8B"


EMA = "use the averages of weights that `autopar run --ema` made"


class Several(argparse.Action):
    """A flag that may come again: a tuple of its values, instead of the default."""

    def __call__(
        self, _: Any, namespace: argparse.Namespace, value: Any, flag: Any = None
    ) -> None:
        held = getattr(namespace, self.dest)
        before = () if held is self.default else held
        setattr(namespace, self.dest, (*before, value))


def add_options(
    add: Any, names: Iterable[str], left_out: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Adds flags for options of `compile`.

    left_out: of options that are None if left out, what help calls that; "": as usual.
    """
    for name in names:
        option, default = OPTIONS[name], None if name in left_out else usual(name)
        flag = f"--{name.replace('_', '-')}"
        auto = option.auto if left_out.get(name) != SEARCH else ""
        told = f"{option.help}; auto {auto}" if auto else option.help
        known_as = left_out.get(name) or option.default or shown_default(usual(name))
        told += f" (default: {known_as})"
        if isinstance(usual(name), bool):
            act = argparse.BooleanOptionalAction
            add.add_argument(flag, action=act, default=default, help=told)
        elif option.choices:
            choices = (*option.choices, AUTO) if auto else option.choices
            add.add_argument(flag, choices=choices, default=default, help=told)
        elif name == "hints":
            add.add_argument(
                *("--hint", flag), type=hint, action="append",
                default=[], dest=name,
                help=told, metavar=option.metavar,
            )  # fmt: skip
        else:
            kind = size if name == "memory" else number(name)
            add.add_argument(
                flag, type=kind, default=default, help=told, metavar=option.metavar
            )


def add_model(add: Any, **how: Any) -> None:
    """Adds the positional MODEL. how: further keywords of `add_argument`."""
    add.add_argument("model", type=text, metavar="MODEL", help=MODEL, **how)


def add_batch_sizes(add: Any, usual: str, *former: str) -> None:
    """Adds flags for the samples and tokens of a step. usual: the default number of
    samples. former: other names of the flag of samples."""
    add.add_argument(
        *("--global-batch", *former), type=number("global_batch"), metavar="N",
        help=f"samples of a step (default: {usual})",
    )  # fmt: skip
    told = f"tokens of a sample, for hf: models (default: {SEQ})"
    add.add_argument("--seq", type=number("seq"), metavar="N", help=told)


def add_seed(add: Any, of: str) -> None:
    """Adds --seed. of: what is drawn."""
    add.add_argument("--seed", type=number("seed"), default=0, help=f"seed of {of}")


def add_switch(add: Any, flag: str, told: str) -> None:
    """Adds a flag that is there or not. told: its help."""
    add.add_argument(flag, action="store_true", help=told)


def add_json(add: Any, told: str = "print values as JSON") -> None:
    """Adds --json."""
    add_switch(add, "--json", told)


def add_backend(add: Any) -> None:
    """Adds --backend; None, its default, leaves the plan's."""
    add_options(add, ["backend"], {"backend": "the plan's"})


def number(name: str) -> Callable[[str], Any]:
    """A number in the range of that name."""
    return lambda written: _in_range(written, RANGES[name])


def numbers(of: Range) -> Callable[[str], tuple[int, ...]]:
    """Numbers in a range, with commas between."""

    def read(written: str) -> tuple[int, ...]:
        return tuple(_in_range(piece, of) for piece in text(written).split(","))

    return read


def text(written: str) -> str:
    """Text that is there, and that can be printed and stored."""
    if not written.strip():
        raise _refused(written, "empty: leave the option out, or give it a value")
    return text_or_nothing(written)


def text_or_nothing(written: str) -> str:
    """The same, or an empty text: the mesh of one rank has no axes."""
    if len(written) > LONGEST:
        raise _refused(written, f"longer than {LONGEST} characters")
    if not written.isprintable():  # nor are bytes that are no UTF-8
        raise _refused(written, "not text: give printable characters, as UTF-8")
    return written


def path(written: str) -> Path:
    """A path that a file could have; whether one has it is not looked at."""
    text(written)
    if any(len(os.fsencode(part)) > NAME for part in Path(written).parts):
        raise _refused(written, f"no path: names in it have at most {NAME} bytes")
    return Path(written)


def size(written: str) -> int:
    """Bytes, as `16GiB`, `70GB` or `8e9`."""
    try:
        return read_bytes(text(written))
    except AutoparError:
        wanted = f"{RANGES['memory']} of bytes, as 16GiB, 70GB or 8e9"
        raise _refused(written, f"not {wanted}") from None


def hint(written: str) -> tuple[str, str]:
    """A pattern of parameters, and what splits these. Raises: HintError."""
    pattern, equals, split = text(written).partition("=")
    if not (pattern and equals and split):
        raise HintError(
            f"'{written}' is not a hint",
            fix="write --hint 'blocks.*.mlp.up.weight=ffn/tp'",
        )
    return pattern, split


def _in_range(written: str, of: Range) -> Any:
    value = of.parse(written)
    if value is None:
        raise _refused(written, f"not {of}")
    return value


def _refused(written: str, problem: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{shown(written)} is {problem}")
