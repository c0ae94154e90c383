"""float32 products in TF32: as a plan has it, as long as a step computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.options import make_plan
from autopar.passes.plan import Plan, PlanError
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.tf32 import in_tf32

MATMUL = torch.backends.cuda.matmul


def settings() -> tuple[str, str, str]:
    """Those of products: by the older and the newer names, which must agree."""
    cpu = torch.backends.mkldnn.matmul.fp32_precision
    return torch.get_float32_matmul_precision(), MATMUL.fp32_precision, cpu


@pytest.fixture(autouse=True)
def as_before():
    before = settings()
    yield
    torch.set_float32_matmul_precision(before[0])
    MATMUL.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before[1:]


@pytest.mark.parametrize("own", ["none", "ieee"])
def test_settings_are_put_back(own: str) -> None:
    MATMUL.fp32_precision = own
    before = settings()
    with pytest.raises(KeyError), in_tf32(True):
        assert settings()[:2] == ("high", "tf32")
        assert MATMUL.allow_tf32, "Inductor reads it"
        raise KeyError
    assert settings() == before
    with in_tf32(False):
        assert settings() == before


def test_what_the_user_turned_on_stays_on() -> None:
    torch.set_float32_matmul_precision("medium")
    before = settings()
    for wanted in (True, False):
        with in_tf32(wanted):
            assert settings() == before
        assert settings() == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tf32", [True, False])
def test_a_step_multiplies_as_its_plan_says_on_gpus(device: str, tf32: bool) -> None:
    executor: Any = SimpleNamespace(
        program=SimpleNamespace(plan=make_plan("", tf32=tf32)),
        comm=SimpleNamespace(device=torch.device(device)),
    )
    with Executor.multiplying(executor):
        assert (MATMUL.fp32_precision == "tf32") == (tf32 and device == "cuda")


def test_plans_keep_it() -> None:
    plan = make_plan("", tf32=True)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="tf32='yes'"):
        make_plan("", tf32="yes")  # type: ignore[typeddict-item]
