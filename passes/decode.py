"""Reading JSON as the types that it was written from, with errors that name the place.

    decode(StageSpec, data, "stages[0] of program.json", ProgramError)

The types say what is legal: dataclasses (all of their fields, and no others), tuples,
mappings of text, unions, numbers, text and truth; and types that `parse` the text that
they are written as. An int will do for a float, and True for neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import AutoparError
from .ranges import shown

ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
AGAIN = "write it again with this version of autopar"
# What was written by another name once -> what it is called now.
FORMER = {
    "labels": "op_shardings",
    "labelled": "has_op_shardings",
    "notes": "remarks",
    "waits": "exposed",
    "samples": "global_batch",
    "saved": "residuals",
    "weight_saved": "weight_residuals",
}
SIMPLE = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
}


def parse_json(text: str, where: str, error: type[AutoparError], fix: str = "") -> Any:
    """Read JSON. Raises `error` for text that is none, or has a number without end."""
    try:
        data = json.loads(text, parse_constant=_endless, parse_float=_finite)
        if ESCAPED.search(text):  # half a character, which no text can have
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except RecursionError:
        raise error(f"{where} is nested too deeply", fix=fix) from None
    except ValueError as cause:
        raise error(f"{where} is not JSON: {cause}", fix=fix) from None


def decode(
    kind: Any, data: Any, where: str, error: type[AutoparError], fix: str = AGAIN
) -> Any:
    """Converts JSON into a value of a type. Raises `error`, which names the place.

    fix: of each error; "": it says what is wanted.
    """
    return _Reader(error, fix).read(kind, data, where)


class _Reader:
    def __init__(self, error: type[AutoparError], fix: str) -> None:
        self.error, self.fix = error, fix

    def read(self, kind: Any, data: Any, where: str) -> Any:
        origin, of = get_origin(kind), get_args(kind)
        if kind is Any:
            return data
        if kind in SIMPLE:
            right = _fits(kind, data)
            return data if right else self.refuse(where, data, SIMPLE[kind])
        if origin in (Union, UnionType):
            return self.read_union(of, data, where)
        if origin is tuple or origin is list:
            return self.read_row(origin, of, data, where)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self.read_mapping(of, data, where)
        if hasattr(kind, "parse"):
            return kind.parse(self.read(str, data, where))
        assert is_dataclass(kind), f"no rule reads {kind}"
        return self.read_dataclass(kind, data, where)

    def read_union(self, of: tuple[Any, ...], data: Any, where: str) -> Any:
        """The first of the types that JSON's own type fits."""
        for kind in of:
            if _fits(kind, data):
                return self.read(kind, data, where)
        return self.refuse(where, data, " or ".join(map(_named, of)))

    def read_row(
        self, origin: Any, of: tuple[Any, ...], data: Any, where: str
    ) -> Sequence[Any]:
        if not isinstance(data, list):
            return self.refuse(where, data, "a list")
        if origin is list or of[1:] == (Ellipsis,):
            of = of[:1] * len(data)
        elif len(of) != len(data):
            return self.refuse(where, data, f"a list of {len(of)}")
        pairs = enumerate(zip(of, data, strict=True))
        return origin(self.read(k, x, f"item {i} of {where}") for i, (k, x) in pairs)

    def read_mapping(self, of: tuple[Any, ...], data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            return self.refuse(where, data, "an object of names")
        return {k: self.read(of[1], v, f"'{k}' in {where}") for k, v in data.items()}

    def read_dataclass(self, kind: Any, data: Any, where: str) -> Any:
        return kind(**decode_fields(kind, data, where, self.error, self.fix))

    def check_keys(
        self, data: Mapping[str, Any], known: set[str], needed: set[str], where: str
    ) -> None:
        if unknown := sorted(set(data) - known):
            raise self.error(
                f"unknown key '{unknown[0]}' in {where}",
                fix=f"the keys are {', '.join(sorted(known))}",
            )
        if missing := sorted(needed - set(data)):
            fix = self.fix or f"add {missing[0]} = ..."
            raise self.error(f"{where} has no '{missing[0]}'", fix=fix)

    def refuse(self, where: str, data: Any, wanted: str) -> Any:
        fix = self.fix or f"write {wanted}"
        raise self.error(f"{where} is {shown(data)}, not {wanted}", fix=fix)


def decode_fields(
    kind: Any,
    data: Any,
    where: str,
    error: type[AutoparError],
    fix: str = AGAIN,
    written: Mapping[str, Any] = MappingProxyType({}),
    without: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The fields of a dataclass, and no others, by name. Raises `error`.

    written: types of fields that JSON has as other ones, and of what it has beside.
    without: fields that come from elsewhere.
    """
    reader = _Reader(error, fix)
    if not isinstance(data, dict):
        reader.refuse(where, data, "an object")
    kinds = {**_hints(kind), **written}
    known, beside = {f.name for f in fields(kind)}, written.keys() - _hints(kind).keys()
    data = {k if k in known else FORMER.get(k, k): v for k, v in data.items()}
    needed = (_needed(kind) | beside) - without
    reader.check_keys(data, (known | beside) - without, needed, where)
    return {k: reader.read(kinds[k], v, f"'{k}' in {where}") for k, v in data.items()}


def _fits(kind: Any, data: Any) -> bool:
    """Whether JSON's own type is that of a kind, whatever is inside."""
    if kind in SIMPLE:  # not isinstance: True is no number
        return type(data) is kind or (kind is float and type(data) is int)
    return isinstance(data, list if get_origin(kind) in (tuple, list) else dict)


def _named(kind: Any) -> str:
    is_row = get_origin(kind) in (tuple, list)
    return SIMPLE.get(kind, "a list" if is_row else "an object")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _needed(kind: Any) -> set[str]:
    """The fields that have no value of their own."""
    return {
        f.name
        for f in fields(kind)
        if f.default is MISSING and f.default_factory is MISSING
    }


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _endless(text)


def _endless(text: str) -> float:
    raise ValueError(f"{text} is no number")
