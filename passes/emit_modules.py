"""emit_modules: the modules of all stages, one for each kind of rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from .emit.emit import emit
from .mesh import Split
from .program import coords_text
from .shard.sharding import local_extent
from .stage.check_alike import check_alike
from .stage.differentiate import Draft, finish, join
from .stage.local_stage import LocalStage
from .stage.split_stages import Stage, Staged
from .watch import Watch


@dataclass(frozen=True)
class EmittedStage:
    """keys: coordinates -> the key of a module. texts: key -> (text, local stage)."""

    stage: Stage
    keys: Mapping[str, str]
    texts: Mapping[str, tuple[str, LocalStage]]

    @property
    def first(self) -> LocalStage:
        """The part of its first rank. Stages of equal text share the first one's
        analyses."""
        _, local = self.texts[next(iter(self.keys.values()))]
        return replace(local, stage=self.stage)


def emit_modules(staged: Staged, watch: Watch) -> tuple[EmittedStage, ...]:
    """Work out each stage for each kind of rank, and write its modules.

    Stages of equal text, and ranks of equal shapes, are worked out once.
    """
    plan = staged.plan
    halves = plan.splits_backward
    sizes = plan.sizes
    mesh_axes = plan.mesh.stage_axes
    known: dict[object, tuple[str, str, LocalStage]] = {}
    emitted = []
    for stage in staged.stages:
        text = stage.text()
        policies = stage.policies(plan)
        splits = find_splits(stage)
        keys: dict[str, str] = {}
        texts: dict[str, tuple[str, LocalStage]] = {}
        ranks: list[tuple[dict[str, int], str]] = []
        for place in product(*(range(n) for _, n in mesh_axes)):
            coords = {a: i for (a, _), i in zip(mesh_axes, place, strict=True)}
            full = {**dict.fromkeys(sizes, 0), **coords}
            key = (text, shape_class(splits, sizes, full), *policies.items())
            if key not in known:
                how = (plan.zero, halves, plan.scales_loss)
                joint = join(Draft(stage, sizes, full, *how))
                watch("join", joint)
                local = finish(joint, policies)
                watch("finish", local)
                module = emit(local, len(staged.stages))
                digest = hashlib.sha256(module.encode()).hexdigest()[:16]
                known[key] = (digest, module, local)
                watch(f"emit-{digest}", module)
            digest, module, local = known[key]
            keys[coords_text(coords)] = digest
            texts[digest] = (module, local)
            ranks.append((coords, digest))
        check_alike(ranks, {key: local for key, (_, local) in texts.items()})
        emitted.append(EmittedStage(stage, keys, texts))
    return tuple(emitted)


def find_splits(stage: Stage) -> list[Split]:
    """Returns (extent, axes) of every named dim that is split in a stage, in order."""
    return sorted(
        {
            (dim.size, axes)
            for name, sharding in stage.shardings.items()
            for dims, slots in zip(stage.dims[name], sharding.slots, strict=True)
            for dim, axes in zip(dims, slots, strict=True)
            if axes
        }
    )


def shape_class(
    splits: Iterable[Split], sizes: Mapping[str, int], coords: Mapping[str, int]
) -> tuple[int, ...]:
    """The sizes on which a rank's text depends: its own extents of split dims, and
    those of the ranks along each axis that it hears from. These are two at most, the
    first and the last of them, as the larger parts come first."""

    def extents(n: int, axes: tuple[str, ...]) -> Iterator[int]:
        for k, axis in enumerate(axes):
            yield local_extent(n, axes[: k + 1], sizes, coords)
            for end in (0, sizes[axis] - 1):
                yield local_extent(n, axes, sizes, {**coords, axis: end})

    return tuple(extent for split in splits for extent in extents(*split))
