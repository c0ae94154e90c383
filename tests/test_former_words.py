"""What was written when things had other names is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plans import small_program

from autopar.passes.decode import FORMER
from autopar.passes.read_program import read_program

BEFORE = {now: word for word, now in FORMER.items()}


def with_former_words(data: Any) -> Any:
    if isinstance(data, dict):
        return {BEFORE.get(k, k): with_former_words(v) for k, v in data.items()}
    return [with_former_words(x) for x in data] if isinstance(data, list) else data


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,tp=2"])
def test_a_program_of_former_words_is_read(mesh: str) -> None:
    program = small_program(mesh)
    written = json.loads(program.to_json())
    former = with_former_words(written)
    assert former != written
    read = read_program(json.dumps(former), program.plan, program.modules)
    assert read.stages == program.stages
    assert json.loads(read.to_json()) == written
