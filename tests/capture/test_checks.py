"""Checks of values that raise an error: programs leave them out, and say so. What else
asks for values decides what is computed, and is refused."""

from __future__ import annotations

import pytest
from models_that_check import CHECKS, DECIDES, both, case_of

from autopar.passes.capture.forward import guards
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("look", CHECKS)
def test_a_check_is_left_out_with_a_remark(look):
    case = case_of(look)
    told = [x for x in case.trace().remarks if "leave out what is checked" in x]
    assert len(told) == (3 if look is both else 1)
    assert all("at models_that_check.py:" in line for line in told)
    case.verify("dp=2,tp=2")


@pytest.mark.parametrize("look", DECIDES)
def test_what_values_decide_of_the_result_is_refused(look, monkeypatch):
    monkeypatch.setattr(guards, "MOST", 50)
    model, batch, _ = case_of(look)
    with pytest.raises(CaptureError, match="forward reads numbers out of a tensor"):
        trace(model, batch)
