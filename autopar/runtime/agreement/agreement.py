"""The values that ranks must have alike, and the errors where they have not.

Every rank passes the whole batch and the same weights, and updates them in the same
way. Ranks with others of their own would train a plausible curve that is wrong; so what
they hold goes, as digests, with their roll calls.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.passes.digest import digest, digest_of_text
from autopar.passes.errors import AutoparError, BatchError
from autopar.passes.program import Program
from autopar.runtime.agreement.replicas import ON_CPU, ON_GPU, Replicas
from autopar.runtime.agreement.roll_call import (
    Facts,
    Judge,
    RollCall,
    others,
    ranks_text,
)
from autopar.runtime.agreement.updates import Updates, plain
from autopar.runtime.agreement.validate import ModelMismatch
from autopar.runtime.comm.comm import Comm

LOG = logging.getLogger("autopar")

# In the first calls, where a loader of its own on each rank shows, and in every so many
# later ones, batches are compared, and ranks wait for each other before they begin. In
# between they do not, so that the roll call costs no time: see `RollCall.ahead`.
FIRST, EVERY = 4, 32

WHOLE_BATCH = (
    "pass the whole batch on every rank, each takes its own part of it: draw it from "
    "one seed, without the rank in it, a DistributedSampler or accelerator.prepare. Or "
    "let each load its own part: step(..., local=True), from DataLoader(data, "
    "sampler=step.sampler(data), ...)"
)


class Agreement(RollCall):
    """The roll calls of a step, with what it has to tell in them."""

    def __init__(self, comm: Comm, program: Program) -> None:
        tolerance = ON_CPU if comm.device.type == "cpu" else ON_GPU
        replicas = Replicas(program, comm.rank, tolerance)
        held = {"weights": replicas.judge_first, "replicas": replicas.judge}
        super().__init__(comm, {**JUDGES, **held, "part": self._part})
        self._calls: Counter[str] = Counter()
        # Of each buffer its version, and what it had then.
        self._buffers: dict[str, tuple[int, Facts]] = {}
        self._replicas = replicas

    def on_build(
        self, seed: int, program: Program | None, fixed: Mapping[str, Any]
    ) -> None:
        """Begin with what `compile` was given. Raises: ModelMismatch, BatchError."""
        text = "" if program is None else program.to_json() + str(program.modules)
        facts = {("seed", ""): seed, ("program", ""): digest_of_text(text)}
        self("build", {**facts, **{("field", k): v for k, v in plain(fixed).items()}})

    @contextmanager
    def on_batch(
        self,
        operation: str,
        batch: Mapping[str, Tensor],
        updates: Updates,
        goes_on_from: tuple[Mapping[str, Any], Mapping[str, Tensor]],
        part: tuple[int, Collection[str]] | None = None,
    ) -> Iterator[None]:
        """The context of an operation with a batch, after updates of the weights.
        goes_on_from: plain values and buffers, which a step does beside weights. part:
        which part of the global batch this one is, and its fields of samples, others
        are of the global batch; None: all of it is. Raises: BatchError, ModelMismatch,
        RanksDisagree."""
        if self.comm.mesh.size == 1:
            yield
            return
        count = self._calls[operation]
        self._calls[operation] += 1
        facts, of_stage = updates.facts()
        training, buffers = goes_on_from
        compares = operation == "step" and (
            self._replicas.due(training["steps"]) or count == 0
        )
        meets = count < FIRST or count % EVERY == 0 or compares
        if meets:
            state = {("training", name): value for name, value in training.items()}
            state |= self._of_buffers(buffers)
            held = digests("batch", batch)
            if part is not None:
                index, samples = part
                fields = {name: value for (_, name), value in held.items()}
                loaded = {name: fields.pop(name) for name in samples}
                shared = {("shared", name): value for name, value in fields.items()}
                held = {("part", ""): (index, loaded), **shared}
            if compares:
                weights = self._replicas.facts(
                    training["steps"], updates.parameters, first=count == 0
                )
                state = {**state, **weights}
            self(operation, {**facts, **held, **state}, of_stage)
        try:
            with nullcontext() if meets else self.ahead(operation, facts, of_stage):
                yield
        except Exception:
            # Others may be in it still: whoever goes on waits for them at first, or its
            # messages of the next one would be taken for those of this one.
            self._calls[operation] = 1
            raise

    def _of_buffers(self, buffers: Mapping[str, Tensor]) -> dict[tuple[str, str], Any]:
        """Facts of buffers, which are looked at where they were written to."""
        state: dict[tuple[str, str], Any] = {}
        for name, x in buffers.items():
            version, facts = self._buffers.get(name, (-1, {}))
            if version != x._version:
                facts = digests("buffer", {name: x})
                self._buffers[name] = x._version, facts
            state.update(facts)
        return state

    def refuse(self, operation: str, error: AutoparError) -> None:
        self._calls[operation] += 1  # as on the other ranks
        super().refuse(operation, error)

    @contextmanager
    def on_clip(self, max_norm: float) -> Iterator[None]:
        """Guards a clip, which is as short, and as frequent, as a step."""
        count = self._calls["clip_grad_norm_"]
        self._calls["clip_grad_norm_"] += 1
        facts = {("argument", "max_norm"): float(max_norm)}
        if count < FIRST:
            self("clip_grad_norm_", facts)
            yield
        else:
            with self.ahead("clip_grad_norm_", facts):
                yield

    def _part(self, _: str, values: Mapping[int, Any]) -> AutoparError | None:
        """Compares batches: equal within a part, of equal sizes in all; notes it if all
        parts loaded the same."""
        first = next(iter(values))
        expected = values[first][1]
        parts: dict[int, tuple[int, Any]] = {}
        for rank, (part, fields) in values.items():
            before, loaded = parts.setdefault(part, (rank, fields))
            for name, value in fields.items():
                if value[:2] != expected[name][:2]:
                    return BatchError(
                        f"'{name}' is {list(value[0])} on rank {rank}, but "
                        f"{list(expected[name][0])} on rank {first}",
                        fix="load as many samples on every rank: step.sampler(dataset) "
                        "gives each as many",
                    )
                if value != loaded[name]:
                    return BatchError(
                        f"'{name}' is not the same on rank {rank} as on rank {before}, "
                        f"which both load part {part} (step.data_rank) of the batch",
                        fix="let ranks that differ in pp, tp or cp alone read the same "
                        "samples: step.sampler(dataset) says which, with one seed",
                    )
        alike = all(fields == expected for _, fields in parts.values())
        if alike and len(parts) > 1 and self.comm.rank == 0:
            LOG.warning(
                "all ranks loaded the same samples: with local=True each loads its "
                "own, as step.sampler(dataset) gives them"
            )
        return None


def digests(kind: str, tensors: Mapping[str, Tensor]) -> Facts:
    """Facts of tensors by name: shape, dtype and values."""
    return {
        (kind, name): (tuple(x.shape), str(x.dtype), digest(x))
        for name, x in tensors.items()
    }


# --- what is said ------------------------------------------------------------------


@dataclass(frozen=True)
class Differs:
    """Makes the error of a fact that ranks have not alike.

    message: with the fact's {name}; {first}, a rank, and {other}, one that has another
    value than it; both {values}; and all the {others}.
    """

    error: type[AutoparError]
    message: str
    fix: str

    def __call__(self, name: str, values: Mapping[int, Any]) -> AutoparError:
        first, unlike = next(iter(values)), others(values)
        words = {
            "name": name,
            "first": f"rank {first}",
            "other": f"rank {unlike[0]}",
            "values": _unlike(values),
            "others": ranks_text(unlike),
        }
        return self.error(self.message.format(**words), fix=self.fix.format(name=name))


def _optimizers(name: str, values: Mapping[int, Any]) -> AutoparError | None:
    """Ranks may have different ones, as for embeddings that not all stages have; but of
    a class that each has one of, it is made alike."""
    held = {rank: made for rank, made in values.items() if made is not None}
    if len({bool(made) for made in held.values()}) > 1:
        idle = [rank for rank, made in held.items() if not made]
        return ModelMismatch(
            f"{ranks_text(idle)} did not call optimizer.step(), but others did",
            fix="update on all ranks: none has another rank's part of the weights; "
            "where it has none of those to update, AdamW([{'params': []}])",
        )
    first: dict[str, tuple[int, Any]] = {}
    for rank, made in held.items():
        for kind, options in made:
            if options is None or sum(other == kind for other, _ in made) != 1:
                continue
            before, expected = first.setdefault(kind, (rank, options))
            for option in {**expected, **options}:
                pair = {r: o.get(option) for r, o in
                        ((before, expected), (rank, options))}  # fmt: skip
                if others(pair):
                    return _option(option, kind, pair)
    return None


def _options(name: str, values: Mapping[int, Any]) -> AutoparError:
    first, rank = next(iter(values)), others(values)[0]
    pair = {r: values[r] or {} for r in (first, rank)}
    option = next(
        o for o in {**pair[first], **pair[rank]}
        if pair[first].get(o) != pair[rank].get(o)
    )  # fmt: skip
    return _option(
        option, name, {r: options.get(option) for r, options in pair.items()}
    )


def _option(option: str, whose: str, pair: Mapping[int, Any]) -> AutoparError:
    if option == "parameters":
        a, b = pair
        message = f"{whose} has other parameters on rank {b} than on rank {a}"
    else:
        message = f"'{option}' of {whose} is {_unlike(pair)}"
    return ModelMismatch(
        message, fix="make the optimizer, and change its options, alike on all ranks"
    )


JUDGES: Mapping[str, Judge] = {
    "optimizers": _optimizers,
    "options": _options,
    "trained": Differs(
        ModelMismatch,
        "other parameters require gradients on {other} than on {first}",
        "call requires_grad_() of the same parameters on all ranks",
    ),
    "training": Differs(
        ModelMismatch,
        "'{name}' of step.training_state() is {values}",
        "load the same state on all ranks",
    ),
    "batch": Differs(
        BatchError,
        "'{name}' is not the same on {others} as on rank 0 of the batch",
        WHOLE_BATCH,
    ),
    "shared": Differs(
        BatchError,
        "'{name}' is not the same on {others} as on rank 0: it has no samples, of "
        "which each rank may have loaded its own, and is that of the global batch",
        "pass the same {name} on all ranks. A count, as of labels, is that of all of "
        "their samples: dist.all_reduce({name}), and then {name} //= "
        "dist.get_world_size() // step.data_ranks, for several ranks load the same",
    ),
    "buffer": Differs(
        ModelMismatch,
        "the buffer '{name}' is not the same on {others} as on rank 0",
        "write to a model's buffers alike on all ranks",
    ),
    "field": Differs(
        BatchError,
        "'{name}' of the batch is {values}",
        "compile with the same value on all ranks",
    ),
    "shape": Differs(
        BatchError,
        "'{name}' of the batch is {values}",
        "pass batches of the same shapes on all ranks; each loads as many samples "
        "with step.sampler(dataset)",
    ),
    "state": Differs(
        ModelMismatch,
        "'{name}' is not the same on {others} as on rank 0 of the state dict",
        "read the same file on all ranks, or broadcast what one rank has read",
    ),
    "seed": Differs(
        ModelMismatch,
        "the seed is {values}",
        "give compile the same seed= on all ranks: masks of dropout follow from it "
        "and the position, and differ where they must",
    ),
    "program": Differs(
        ModelMismatch,
        "{others} was given another program than rank 0",
        "give compile the same program= on all ranks, or on none",
    ),
    "argument": Differs(
        AutoparError, "{name} is {values}", "pass {name} alike on all ranks"
    ),
}


def _unlike(values: Mapping[int, Any]) -> str:
    """`1 on rank 0, but 2 on rank 1`."""
    first, rank = next(iter(values)), others(values)[0]
    return f"{values[first]} on rank {first}, but {values[rank]} on rank {rank}"
