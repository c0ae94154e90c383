"""Predicted activation memory and traffic against what a run shows."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import on_rank
from processes import run_ranks

import autopar
from autopar.passes.capture.trace import trace
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.schedule.footprint import Footprint
from autopar.runtime.comm import process_groups
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from examples.benchmarks.live_bytes import LiveBytes
from examples.gpt import GPT, Config

CONFIG = Config(layers=3, width=64, heads=4, context=64, vocab=512)


def compiled(mesh: str, microbatches: int = 1, schedule: str = "1f1b"):
    model = GPT(CONFIG)
    ids = torch.randint(CONFIG.vocab, (8, 64))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    plan = Plan(Mesh.parse(mesh), microbatches, schedule)
    return model, batch, compile_program(trace(model, batch), plan, PLAIN)


def run_watched(schedule: str) -> tuple[Program, dict[tuple[int, str], Any]]:
    """A program of two stages; (stage, function) -> the bytes that a run of it adds at
    most, and leaves behind."""
    model, batch, program = compiled("pp=2", schedule=schedule)
    measured: dict[tuple[int, str], Any] = {}

    def body(comm: Comm) -> None:
        executor = on_rank(program, comm, model)
        for index, stage in executor.stages.items():
            for part in PARTS & stage.module.keys():
                run = stage.module[part]
                stage.module[part] = watched(run, (index, part), measured)
        executor.step(batch)

    run_virtual(program.mesh, 1, body)
    return program, measured


PARTS = {"forward", "backward", "backward_input", "backward_weight"}
HIDDEN = 8 * 64 * 64 * 4  # bytes that stages send each other


# Kernels have temporaries of their own, which the prediction leaves out.


@pytest.mark.slow
def test_activation_bytes_are_those_of_a_run() -> None:
    program, measured = run_watched("1f1b")
    for index, stage in enumerate(program.stages):
        predicted = stage.footprint
        forward, saved = measured[index, "forward"]
        assert saved == pytest.approx(predicted.residuals, rel=0.05)
        assert forward == pytest.approx(predicted.forward_peak, rel=0.05)
        backward, _ = measured[index, "backward"]
        before = predicted.residuals + (HIDDEN if index == 0 else 0)
        assert backward == pytest.approx(predicted.backward_peak - before, rel=0.15)


@pytest.mark.slow
def test_activation_bytes_in_halves_are_those_of_a_run() -> None:
    program, measured = run_watched("zb-h1")
    for index, stage in enumerate(program.stages):
        predicted = stage.footprint
        cotangent, sent = (HIDDEN, 0) if index == 0 else (0, HIDDEN)
        _, saved = measured[index, "forward"]
        input_half, change = measured[index, "backward_input"]
        weight_half, _ = measured[index, "backward_weight"]
        assert saved == pytest.approx(predicted.residuals, rel=0.05)
        assert saved + cotangent + change - sent == pytest.approx(
            predicted.weight_residuals, rel=0.05
        )
        most = max(
            saved + cotangent + input_half, predicted.weight_residuals + weight_half
        )
        assert most == pytest.approx(predicted.backward_peak, rel=0.15)


def watched(run, key, measured):
    """The function, noting how many bytes it adds at most, and leaves behind."""

    def call(*args):
        with LiveBytes(resizing=True) as live:
            before = live.now
            result = run(*args)
            measured[key] = (live.peak - before, live.now - before)
        return result

    return call


def test_traffic_is_that_of_a_run() -> None:
    model, batch, program = compiled("tp=2", microbatches=2)
    logs = run_virtual(
        program.mesh,
        2,
        lambda comm: log_of(comm, model, batch, program),
    )
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        said = [c for c in program.communication if c.kind == kind]
        calls, moved = logs[0].get((kind, ("tp",)), (0, 0))
        assert calls == 2 * sum(c.calls for c in said), kind
        assert moved == 2 * sum(c.bytes for c in said), kind


def log_of(comm, model, batch, program):
    on_rank(program, comm, model).step(batch)
    return {key: (t.calls, t.bytes) for key, t in comm.log.items()}


def measure_shared_out() -> tuple[int, int, Footprint]:
    """Most bytes that a forward and a backward of this rank add, and those said."""
    model = GPT(Config(layers=4, width=128, heads=4, context=16, vocab=64))
    ids = torch.arange(4 * 16).view(4, 16) % 64
    batch = {"ids": ids, "labels": ids}
    step = autopar.compile(model, "dp=2", zero=3, example_inputs=batch)
    # Gloo's threads may keep a message's tensors for as long as they do not run.
    kept = keep_arguments(dist, "all_to_all_single")
    kept_too = keep_arguments(process_groups, "_all_gather")
    measured: dict[str, tuple[int, int]] = {}
    (stage,) = step.executor.stages.values()
    for part in ("forward", "backward"):
        stage.module[part] = watched(stage.module[part], part, measured)
    step(**batch)
    assert kept and kept_too
    predicted = step.program.stages[0].footprint
    return measured["forward"][0], measured["backward"][0], predicted


def keep_arguments(module: ModuleType, name: str) -> list[Any]:
    """What a function of a module is called with from now on, kept alive."""
    kept: list[Any] = []
    run = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        kept.append(args)
        return run(*args, **kwargs)

    setattr(module, name, call)
    return kept


@pytest.mark.slow
def test_bytes_with_parameters_shared_out_are_those_of_a_run() -> None:
    for forward, backward, predicted in run_ranks(measure_shared_out, 2):
        assert forward == pytest.approx(predicted.forward_peak, rel=0.01)
        above = predicted.backward_peak - predicted.residuals
        assert backward == pytest.approx(above, rel=0.01)
