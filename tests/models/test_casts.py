"""Mixed precision: where casts are in an emitted program, and what they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

import pytest
import torch
from cases import on_rank
from models import gpt2, plain_gpt
from test_precision import sizes_of

from autopar.passes.program import Program
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.execute.running_stage import Batch


def functions(program: Program) -> dict[str, str]:
    text = program.modules[program.module_of(0, 0)]
    return {part.partition("(")[0]: part for part in text.split("\ndef ")[1:]}


CASTS = r'p\["[\w.+]+"\]\.to\(torch\.bfloat16\)'


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.usefixtures("unrolled")
def test_each_parameter_is_cast_once_a_step(zero):
    case = plain_gpt(layers=2)  # tied: the table is read twice
    parts = functions(case.compile("dp=2", 2, precision="bf16", zero=zero))
    cast = re.findall(CASTS, parts["prologue"])
    kept = {n for n, _ in case.model.named_parameters() if "norm" not in n}
    kept -= {"positions.weight"} if not zero else set()
    assert len(cast) == len(set(cast)) == len(kept)
    assert not re.findall(CASTS, parts["forward"] + parts["backward"])


def test_zero_3_gathers_the_cast_shard_again_in_the_backward():
    case = plain_gpt(layers=1)
    parts = functions(case.compile("dp=2", 2, precision="bf16", zero=3))
    for name in ("forward", "backward"):
        started = " ".join(re.findall(r"c\.start_gather\((.*?)\], 'dp'", parts[name]))
        names = re.findall(r'b\["(\w+)"\]', started)
        assert len(names) >= 4 and len(names) == len(set(names))


@pytest.mark.usefixtures("unrolled")
def test_gradients_of_weights_are_added_up_where_they_rest():
    """No buffer in low precision, and no second one in float32."""
    case = plain_gpt(layers=1)
    text = functions(case.compile("tp=2", 2, precision="bf16"))["backward"]
    assert len(re.findall(r"weight_grad_\(g\[", text)) == 5
    assert not re.search(r"weight_grad_\((?!g\[)", text)
    # With shares, whole gradients are float32 until they are reduced.
    text = functions(case.compile("dp=2", 2, precision="bf16", zero=3))["backward"]
    zeros = re.findall(r"aten\.zeros\.default\(.*dtype=(torch\.\w+)", text)
    assert zeros and set(zeros) == {"torch.float32"}


def test_what_is_added_up_in_float32_is_never_a_copy_in_float32():
    """Gradients of biases: read in half the bits by the sum itself."""
    program = gpt2(layers=1).compile("dp=2", precision="bf16", zero=3)
    text = program.modules[program.module_of(0, 0)]
    sums = re.findall(r"sum\.dim_IntList\((\w+), .*?dtype=torch\.float32", text)
    assert sums
    for name in sums:
        assert not re.search(rf"\b{name} = .*\.to\(torch\.float32\)", text), name


def test_memory_is_counted_in_the_dtypes_that_it_has():
    case = plain_gpt(layers=2)
    everything, exact = sizes_of(case)
    exact += case.model.positions.weight.numel()
    low, whole = (case.compile("tp=1", precision=p) for p in ("bf16", "model"))
    assert low.stages[0].footprint.step == 2 * (everything - exact)  # the copies
    assert whole.stages[0].footprint.step == 0
    saved = [p.stages[0].footprint.residuals for p in (low, whole)]
    assert 0.5 < saved[0] / saved[1] < 0.9  # the residual stream stays float32


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors, each once."""
    held = [x.untyped_storage() for x in tensors]
    return {s.data_ptr(): s.nbytes() for s in held}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.usefixtures("unrolled")
def test_the_footprint_is_what_a_step_keeps(zero):
    """Against the tensors that an emitted prologue and forward return."""
    case = plain_gpt(layers=2)
    program = case.compile("dp=2", precision="bf16", zero=zero)

    def body(comm: Comm) -> tuple[int, int]:
        executor = on_rank(program, comm, case.model)
        stage = executor.stages[0]
        held = (comm, stage.tensors, stage.constants)
        batch = Batch(case.batch)
        batch.begin(stage.module["prologue"], *held)
        _, saved = stage.module["forward"](*held, batch)
        made = {name: batch[name] for name in batch.keys() - case.batch.keys()}
        outside = (stage.tensors, stage.constants, made, case.batch)
        there = storages(x for values in outside for x in values.values())
        kept = storages(saved).items() - there.items()
        once = storages(x for x in made.values() if x.is_floating_point())
        return sum(size for _, size in kept), sum(once.values())

    with torch.no_grad():
        kept, once = run_virtual(program.mesh, 1, body)[0]
    gradients = program.modules[program.module_of(0, 0)]
    entries = re.findall(
        r"^    .*: \(\(([\d, ]+)\), torch.float32\),$",
        gradients.partition("WHOLE_GRADIENTS = ")[2].partition("FLOPS")[0],
        re.M,
    )
    sizes = [prod(int(n) for n in re.findall(r"\d+", shape)) for shape in entries]
    assert bool(sizes) == (zero == 1)
    assert program.stages[0].footprint.step == once + 4 * sum(sizes)
    assert program.stages[0].footprint.residuals == kept
