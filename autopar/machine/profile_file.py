"""profile.json: what machines were measured to take, by machine and torch version.

{"format": 1, "machines": {"AMD EPYC (x86_64), 2 cores, ...": {
  "ops": {"2": {"timed": {"aten.add.Tensor(...)": [seconds, bytes, flops, compiled]},
                "update": [[bytes, seconds], ...]}},
  "messages": {"4": [["all_reduce", 2, 1, [[bytes, seconds], ...]], ...]},
  "skew": {"4": [[2, 1, seconds], ...]},
  "wakeup": {"4": seconds},
  "alone": {"aten.linear.default(...)": [seconds, bytes, flops, 0]},
  "backends": {"cpu": [eager, inductor, products]}}}}

ops: by how many ranks compute at once. messages: by how many ranks there are; the
collective, ranks of a group, and how far apart they are. skew: the same, and what they
wait for the last of them after a second of computing. wakeup: what it takes until who
waits for a message goes on, while all others compute. alone: ops by themselves,
by which stages are cut. backends: seconds of a few layers, by the kind of device, and
those of products and collectives among them, which are called as they are.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from autopar.machine.machine import machine_text
from autopar.passes.decode import decode, parse_json
from autopar.passes.errors import AutoparError
from autopar.passes.price.measured import Messages, Ops, Point, Timed
from autopar.passes.ranges import shown
from autopar.terminal import command

FORMAT = 1
LEAST = 0.05  # of what ops take as Python, where clocks say that it is next to nothing
LOG = logging.getLogger("autopar")


class ProfileError(AutoparError):
    """A file of measurements cannot be read, or is of another machine."""


class BackendTimes(NamedTuple):
    """Seconds of a few layers as Python, and as Inductor compiles them. products: of
    these, what products and collectives take, in both."""

    eager: float
    inductor: float
    products: float = 0.0

    @property
    def beside_products(self) -> float:
        """Compiled seconds over eager seconds, without products."""
        rest = self.eager - self.products
        return max(LEAST, (self.inductor - self.products) / rest) if rest > 0 else 1.0


Backends = Mapping[str, BackendTimes]  # by the kind of device


@dataclass(frozen=True)
class Profile:
    """The measurements of one machine; see the top of this file."""

    ops: Mapping[int, Ops] = field(default_factory=dict)
    messages: Mapping[int, Messages] = field(default_factory=dict)
    alone: Mapping[str, Timed] = field(default_factory=dict)
    backends: Backends = field(default_factory=dict)

    def with_more(self, other: Profile) -> Profile:
        """The union of two profiles; where both measured the same, the other's."""
        ops = dict(self.ops)
        for busy, more in other.ops.items():
            old = ops.get(busy, Ops())
            timed = {
                k: _compiled_as(old.timed.get(k), t) for k, t in more.timed.items()
            }
            ops[busy] = Ops({**old.timed, **timed}, more.update or old.update)
        return Profile(
            ops,
            {**self.messages, **other.messages},
            {**self.alone, **other.alone},
            {**self.backends, **other.backends},
        )


def _compiled_as(old: Timed | None, new: Timed) -> Timed:
    """The new measurement, with the old one's compiled seconds if it has none."""
    return new if new.compiled or not old else replace(new, compiled=old.compiled)


def usual_path() -> Path:
    """The path of the profile in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # As the specification of these directories has it, others are not taken.
    home = Path(cache) if cache.isprintable() and Path(cache).is_absolute() else None
    home = home or Path.home() / ".cache"
    return home / "autopar" / f"profile-{FORMAT}.json"


def read_profile(path: Path | None = None) -> Profile:
    """What was measured on this machine, with this torch; empty if nothing was.

    path: a file that must have it; None: the cache, which may have nothing, and is
    measured again (as a warning says) where it is damaged.
    Raises: ProfileError.
    """
    if path is None:
        try:
            return _profiles(usual_path()).get(machine_text(), Profile())
        except FileNotFoundError:
            return Profile()
        except OSError as error:
            LOG.warning("cannot read '%s': %s", usual_path(), error.strerror)
            return Profile()
        except ProfileError as error:
            LOG.warning("%s; what it held is measured again", error.message)
            return Profile()
    try:
        profiles = _profiles(path)
    except OSError as error:
        raise ProfileError(
            f"cannot read '{path}': {error.strerror}",
            fix=f"measure it: autopar profile MODEL --ranks N -o {command(path)}",
        ) from None
    here = machine_text()
    if here not in profiles:
        others = "".join(f"\n  it has {machine}" for machine in profiles)
        raise ProfileError(
            f"'{path}' has nothing that was measured on this machine\n"
            f"  it is   {here}{others}",
            fix="measure here: autopar profile MODEL --ranks N, and leave out the file",
        )
    return profiles[here]


def measured_machines() -> tuple[str, ...]:
    """The machines whose ops or messages are in the cache, if it can be read."""
    try:
        profiles = _profiles(usual_path())
    except (OSError, ProfileError):
        return ()
    return tuple(name for name, p in profiles.items() if p.ops or p.messages)


def save_profile(more: Profile, path: Path | None = None) -> Path:
    """Add to this machine's measurements, in one step: readers see all or nothing.

    Raises: OSError; ProfileError for a file of the user's that is no profile.
    """
    where = path or usual_path()
    try:
        known = _profiles(where)
    except FileNotFoundError:
        known = {}
    except ProfileError:
        if path is not None:
            raise
        known = {}  # a damaged cache: `read_profile` says so
    machine = machine_text()
    known[machine] = known.get(machine, Profile()).with_more(more)
    data = {name: profile_data(profile) for name, profile in known.items()}
    text = json.dumps({"format": FORMAT, "machines": data}, indent=1, sort_keys=True)
    where.parent.mkdir(parents=True, exist_ok=True)
    scratch = where.with_name(f".{where.name}.{os.getpid()}")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(where)
    return where


def _profiles(path: Path) -> dict[str, Profile]:
    """Reads the profiles of all machines in a file. Raises: OSError, ProfileError."""
    content = path.read_bytes()
    fix = "delete it, and measure again: autopar profile MODEL --ranks N"
    try:
        data = parse_json(content.decode(), "the file", _Damaged)
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise ProfileError(f"'{path}' is not of format {FORMAT}", fix=fix)
        written: _File = decode(_File, data, "the file", _Damaged)
        return {name: entry.profile for name, entry in written.machines.items()}
    except (UnicodeError, _Damaged) as error:
        problem = error.message if isinstance(error, _Damaged) else "it is no text"
        raise ProfileError(
            f"the profile '{path}' is damaged: {problem}", fix=fix
        ) from None


def profile_data(profile: Profile) -> dict[str, Any]:
    """The profile as values for JSON; see the top of this file."""
    return {
        "ops": {
            str(busy): {
                "timed": {key: list(astuple(t)) for key, t in ops.timed.items()},
                "update": list(map(list, ops.update)),
            }
            for busy, ops in profile.ops.items()
        },
        "messages": {
            str(ranks): [[*place, list(map(list, p))] for place, p in m.points.items()]
            for ranks, m in profile.messages.items()
        },
        "skew": {
            str(ranks): [[*group, late] for group, late in m.skew.items()]
            for ranks, m in profile.messages.items()
        },
        "wakeup": {str(ranks): m.wakeup for ranks, m in profile.messages.items()},
        "alone": {key: list(astuple(t)) for key, t in profile.alone.items()},
        "backends": {kind: list(took) for kind, took in profile.backends.items()},
    }


# --- what is in the file, as `passes.decode` reads it ---------------------------------

Rows = Mapping[str, tuple[float, ...]]  # some are shorter in profiles of before


class _Damaged(AutoparError):
    """The contents of a file are no profile."""


@dataclass(frozen=True)
class _Ops:
    timed: Rows
    update: tuple[Point, ...]


@dataclass(frozen=True)
class _Machine:
    """Profiles of before have no more than ops and messages."""

    ops: Mapping[str, _Ops]
    messages: Mapping[str, tuple[tuple[str, int, int, tuple[Point, ...]], ...]]
    skew: Mapping[str, tuple[tuple[int, int, float], ...]] = field(default_factory=dict)
    wakeup: Mapping[str, float] = field(default_factory=dict)
    alone: Rows = field(default_factory=dict)
    backends: Rows = field(default_factory=dict)

    @property
    def profile(self) -> Profile:
        ops = {
            _number(busy): Ops(_timed(entry.timed), _ascending(entry.update))
            for busy, entry in self.ops.items()
        }
        messages = {
            _number(ranks): Messages(
                {
                    (kind, size, stride): _ascending(points)
                    for kind, size, stride, points in rows
                },
                {(n, s): _amount(late) for n, s, late in self.skew.get(ranks, ())},
                _amount(self.wakeup.get(ranks, 0.0)),
            )
            for ranks, rows in self.messages.items()
        }
        backends = {
            kind: BackendTimes(*_row(kind, row, range(2, 4)))
            for kind, row in self.backends.items()
        }
        return Profile(ops, messages, _timed(self.alone), backends)


@dataclass(frozen=True)
class _File:
    format: int
    machines: Mapping[str, _Machine]


def _timed(rows: Rows) -> dict[str, Timed]:
    return {key: Timed(*_row(key, row, range(3, 5))) for key, row in rows.items()}


def _row(name: str, row: Sequence[float], lengths: range) -> Sequence[float]:
    if len(row) not in lengths:
        raise _Damaged(f"'{name}' has {len(row)} numbers")
    return [*map(_amount, row)]


def _ascending(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points, each of which must have more bytes than the one before it."""
    steps = [0.0, *(bytes for bytes, _ in points)]
    if any(a >= b for a, b in pairwise(steps)) or any(s <= 0 for _, s in points):
        raise _Damaged(f"no amounts of bytes that ascend: {shown(list(points))}")
    return points


def _amount(number: float) -> float:
    if number < 0:
        raise _Damaged(f"{number} is no amount")
    return number


def _number(text: str) -> int:
    if not text.isdecimal():
        raise _Damaged(f"'{text}' is no number of ranks")
    return int(text)
