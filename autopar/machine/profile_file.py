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
those of products among them, which compiled functions call as they are.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from autopar.machine.machine import machine_text
from autopar.passes.errors import AutoparError
from autopar.passes.price.measured import Messages, Ops, Point, Timed
from autopar.terminal import command

FORMAT = 1
LEAST = 0.05  # of what ops take as Python, where clocks say that it is next to nothing
LOG = logging.getLogger("autopar")


class ProfileError(AutoparError):
    """A file of measurements that cannot be read, or is of another machine."""


class BackendTimes(NamedTuple):
    """Seconds of a few layers as Python, and as Inductor compiles them. products: of
    these, what products and collectives take, in both."""

    eager: float
    inductor: float
    products: float = 0.0

    @property
    def beside_products(self) -> float:
        """What the rest takes when compiled, over what it takes as Python."""
        rest = self.eager - self.products
        return max(LEAST, (self.inductor - self.products) / rest) if rest > 0 else 1.0


Backends = Mapping[str, BackendTimes]  # by the kind of device


@dataclass(frozen=True)
class Profile:
    """What one machine was measured to take; see the top of this file."""

    ops: Mapping[int, Ops] = field(default_factory=dict)
    messages: Mapping[int, Messages] = field(default_factory=dict)
    alone: Mapping[str, Timed] = field(default_factory=dict)
    backends: Backends = field(default_factory=dict)

    def with_more(self, other: Profile) -> Profile:
        """Both; where the same was measured, the other's."""
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
    """What was measured anew, with what is known of it compiled."""
    return new if new.compiled or not old else replace(new, compiled=old.compiled)


def usual_path() -> Path:
    """In the user's cache directory."""
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
    data = path.read_bytes()
    fix = "delete it, and measure again: autopar profile MODEL --ranks N"
    try:
        data = json.loads(data)
        if data["format"] != FORMAT:
            raise ProfileError(f"'{path}' is not of format {FORMAT}", fix=fix)
        return {name: _profile(entry) for name, entry in data["machines"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ProfileError(f"the profile '{path}' is damaged", fix=fix) from None


def profile_data(profile: Profile) -> dict[str, Any]:
    """As values for JSON; see the top of this file."""
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


def _profile(data: Any) -> Profile:
    """Reads `profile_data`. Raises: ValueError, TypeError, KeyError, AttributeError."""
    ops = {
        int(busy): Ops(
            {key: _timed(row) for key, row in entry["timed"].items()},
            _points(entry["update"]) if entry["update"] else (),
        )
        for busy, entry in data["ops"].items()
    }
    # Profiles of before have none of these.
    skew, wakeup = data.get("skew", {}), data.get("wakeup", {})
    messages = {
        int(ranks): Messages(
            {
                (str(kind), int(size), int(stride)): _points(points)
                for kind, size, stride, points in rows
            },
            {
                (int(size), int(stride)): late
                for size, stride, late in (_numbers(r, 3) for r in skew.get(ranks, []))
            },
            *_numbers([wakeup.get(ranks, 0.0)], 1),
        )
        for ranks, rows in data["messages"].items()
    }
    entry = data.get("alone", {})  # profiles of before have other seconds
    alone = {key: _timed(row) for key, row in entry.items()}
    entry = data.get("backends", {})  # profiles of before have none
    backends = {
        str(kind): BackendTimes(*_numbers(row, max(2, min(3, len(row)))))
        for kind, row in entry.items()
    }
    return Profile(ops, messages, alone, backends)


def _timed(row: Any) -> Timed:
    """Profiles of before do not say what is compiled."""
    return Timed(*_numbers(row, max(3, min(4, len(row)))))


def _points(rows: list[Any]) -> tuple[Point, ...]:
    """Raises ValueError, unless bytes ascend and all is above 0."""
    points = [(_numbers(row, 2)[0], row[1]) for row in rows]
    ascending = all(a < b for (a, _), (b, _) in pairwise(points))
    if not points or not ascending or min(map(min, points)) <= 0:
        raise ValueError(f"{rows!r} are no points")
    return tuple(points)


def _numbers(row: Any, count: int) -> list[float]:
    """Raises ValueError for anything but so many numbers that are not negative."""
    if not isinstance(row, list) or len(row) != count:
        raise ValueError(f"{row!r} are not {count} numbers")
    if not all(type(x) in (int, float) and 0 <= x < math.inf for x in row):
        raise ValueError(f"{row!r} are no amounts")
    return row
