"""The measurements of this machine, for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autopar.machine.machine import machine_text
from autopar.machine.profile_file import Profile
from autopar.passes.price.measured import Timed, kind_of
from autopar.reports.tables import Table
from autopar.terminal import wrap
from autopar.units import seconds, size

SHOWN = 12  # kinds of ops in a table; JSON has all


def profile_report(profile: Profile) -> str:
    """Returns the tables of measured ops, messages and backends."""
    tables = [_ops_table(at_once, profile) for at_once in sorted(profile.ops)]
    tables += [_messages_table(ranks, profile) for ranks in sorted(profile.messages)]
    if profile.backends:
        tables.append(_backends_table(profile))
    if not tables:
        return wrap(f"nothing was measured on this machine: {machine_text()}")
    return "\n\n".join([wrap(machine_text()), *map(str, tables)])


def _backends_table(profile: Profile) -> Table:
    rows = tuple(
        (device, *map(seconds, took), f"{took.eager / took.inductor:.2f}")
        for device, took in sorted(profile.backends.items())
    )
    told = "by which --backend auto chooses"
    head = ("device", "eager", "inductor", "products", "ratio")
    return Table("a few layers, forward and backward", head, rows, (told,))


def _ops_table(at_once: int, profile: Profile) -> Table:
    """Ops by kind, those with the most sizes first."""
    ops = profile.ops[at_once]
    kinds: dict[str, list[Timed]] = defaultdict(list)
    for key, timed in ops.timed.items():
        kinds[kind_of(key)].append(timed)
    ordered = sorted(kinds.items(), key=lambda item: -max(t.seconds for t in item[1]))
    rows = []
    for op, samples in ordered[:SHOWN]:
        quickest, slowest = (f(t.seconds for t in samples) for f in (min, max))
        speed = max(t.flops / t.seconds for t in samples if t.seconds) / 1e9
        moved = max(t.bytes / t.seconds for t in samples if t.seconds) / 1e9
        rows.append(
            (op, len(samples), seconds(quickest), seconds(slowest), speed, moved)
        )
    notes = [f"{len(ops.timed)} ops of {len(kinds)} kinds, as emitted"]
    if ops.update:
        told = ", ".join(f"{size(b)} {seconds(s)}" for b, s in ops.update)
        notes.append(f"the optimizer's step, by a parameter's bytes: {told}")
    return Table(
        f"ops, {at_once} at a time",
        ("op", "sizes", "least", "most", "GFLOP/s", "GB/s"),
        tuple(rows),
        tuple(notes),
    )


def _messages_table(ranks: int, profile: Profile) -> Table:
    points = profile.messages[ranks].points
    sizes = sorted({bytes for row in points.values() for bytes, _ in row})
    rows = []
    for (kind, group, stride), row in sorted(points.items(), key=_order):
        took = {bytes: seconds(s) for bytes, s in row}
        rows.append((kind, f"{group}", f"{stride}", *(took.get(b, "") for b in sizes)))
    told = ", ".join(
        f"{seconds(late)} of {group}, {stride} apart"
        for (group, stride), late in sorted(profile.messages[ranks].skew.items())
    )
    notes = []
    if told:
        notes.append(f"waiting for the last rank after a second of computing: {told}")
    if wakeup := profile.messages[ranks].wakeup:
        notes.append(
            "until who waits for a message goes on, while all others compute: "
            + seconds(wakeup)
        )
    return Table(
        f"messages between {ranks} ranks, all groups at once",
        ("message", "ranks", "apart", *map(size, sizes)),
        tuple(rows),
        tuple(notes),
    )


def _order(item: tuple[tuple[str, int, int], Sequence[Any]]) -> tuple[int, int, str]:
    (kind, group, stride), _ = item
    return group, stride, kind
