"""Attributes of parameters that have the name of a method, as Megatron's biases do."""

from __future__ import annotations

import torch
from plans import CONFIG

import autopar
from autopar.verify import verify
from examples.gpt import build


def test_an_attribute_may_have_the_name_of_a_method():
    model, batch = build(CONFIG, 4)
    bias = model.blocks[0].attention.proj.bias
    bias.stride, bias.partition_dim = 1, 0
    plan = autopar.Plan(autopar.Mesh.parse("dp=2,tp=2"))
    program = autopar.compile_offline(model, batch, plan)
    verify(program, model, batch).check()
    assert vars(bias) == {"stride": 1, "partition_dim": 0}


def test_of_a_step_too():
    model, batch = build(CONFIG, 4)
    model.blocks[0].attention.proj.bias.stride = 1
    step = autopar.compile(model, "", example_inputs=batch)
    loss = step(**batch)
    torch.testing.assert_close(loss, model(**batch)[1].detach())
    step.state_dict()
