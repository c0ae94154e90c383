"""What forward keeps of a batch in Python is nowhere after a step, and that is told."""

import pytest
import torch

from autopar.capture.capture_model import capture_model
from autopar.compiler import compile_offline
from autopar.examples.gpt import Config, build, tiny
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan


def add_hook(model, function):
    model.blocks[0].register_forward_hook(function)


def in_attribute(model):
    add_hook(model, lambda m, _, out: setattr(m, "last", out.detach().norm()))


def in_dict(model):
    seen = {}
    add_hook(model, lambda m, _, out: seen.update(last=out.detach().norm()))


def in_list(model):
    model.seen = []
    add_hook(model, lambda m, _, out: model.seen.append(out.mean(-1)))


def in_nested(model):
    add_hook(model, lambda m, _, out: setattr(m, "all", {"one": (out.norm(), 1)}))


PLACES = {
    in_attribute: "blocks.*.last",
    in_dict: "seen.last",
    in_list: "seen",
    in_nested: "blocks.*.all",
}


@pytest.mark.parametrize("keep", PLACES)
def test_whoever_reads_it_is_told(keep):
    model, batch = tiny()
    keep(model)
    traced = capture_model(model, batch)
    (remark,) = traced.remarks
    assert PLACES[keep] in remark
    assert remark in compile_program(traced, Plan(Mesh.parse("dp=2"))).remarks


def test_a_loss_function_may_return_it():
    """Of any layer, though layers that do the same are captured once."""
    torch.manual_seed(0)
    model, batch = build(Config(layers=5, width=16, heads=2, context=8, vocab=32), 4)
    for block in model.blocks:
        block.register_forward_hook(
            lambda m, _, out: setattr(m, "last", out.detach().square().mean())
        )

    def loss_fn(output, batch):
        del batch
        lasts = {f"last {i}": block.last for i, block in enumerate(model.blocks)}
        return {"loss": output[1], **lasts}

    plan = Plan(Mesh.parse("dp=2,tp=2"), microbatches=2)
    program = compile_offline(model, batch, plan, loss_fn, prove=True)
    assert program.metric_names == [f"last {i}" for i in range(5)]


def constant(m, _, out):
    m.mask = torch.ones(8, 8).tril()


def of_numbers(m, _, out):
    m.width, m.names = out.shape[-1], ["out"]


def of_buffer(m, _, out):
    m.turned = m.table.cos()


@pytest.mark.parametrize("keep", [constant, of_numbers, of_buffer])
def test_what_is_the_same_in_each_step_is_not_told(keep):
    model, batch = tiny()
    model.blocks[0].register_buffer("table", torch.arange(4.0))
    add_hook(model, keep)
    assert not capture_model(model, batch).remarks


def test_few_are_named():
    model, batch = tiny()
    for name in "abcde":
        add_hook(
            model, lambda m, _, out, name=name: setattr(m, f"kept_{name}", out.norm())
        )
    (remark,) = capture_model(model, batch).remarks
    assert "blocks.*.kept_c and 2 more" in remark
    assert "kept_d" not in remark
