"""Refusals that say what is wrong, and fixes that work: values that decide what is
computed, recurrent layers, writes under no_grad."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

import autopar
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.read_program import read_program
from autopar.runtime.agreement.validate import ModelMismatch, check_model

NUMBERS = "forward reads numbers out of a tensor by "
ROWS = "how many rows "
CHOSEN = "which rows there are depends on the values .* and "


def counted(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        m.count.add_(torch.histc(ids.float(), bins=4, min=0, max=VOCAB))
    return x


def in_place(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


def in_place_by_a_view(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        x.view(-1).mul_(2)
    return x


def written(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Where a number was written to what is known by itself, by a view."""
    place = torch.zeros(ids.shape[1], dtype=ids.dtype)
    place[1:3].fill_(ids[0, 0])
    return x if place.max() > 3 else 2 * x


def branch(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    if ids.max() > 3:
        return x
    return 2 * x


def lengths(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    sizes = (ids > 3).sum(1).tolist()
    return torch.stack([y[:n].sum(0) for y, n in zip(x, sizes, strict=True)])[:, None]


def chosen(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    weight, expert = m.router(x).softmax(-1).topk(2, -1)
    return weight, expert


def looped(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    weight, which = chosen(m, rows)
    y = torch.zeros_like(rows)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(which == e)
        y[row] += expert(rows[row]) * weight[row, place, None]
    return y.view_as(x)


def used(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    _, which = chosen(m, x)
    for e in which.unique():
        x = x + m.experts[int(e)](x) * (which == e).any(-1, keepdim=True)
    return x


def used_anywhere(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    for e in chosen(m, x)[1].unique():
        x = x + m.experts[int(e)](x)
    return x


def unless_none(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    for e, expert in enumerate(m.experts):
        if len(row := torch.where(chosen(m, rows)[1] == e)[0]):
            rows = rows.index_add(0, row, expert(rows[row]))
    return rows.view_as(x)


def asked(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    _, which = chosen(m, x)
    for e, expert in enumerate(m.experts):
        if (mask := (which == e).any(-1)).any():
            x = 2 * x + expert(x) * mask[..., None]
    return x


def all_rows(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    weight, which = chosen(m, x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y = y + expert(x) * (weight * (which == e)).sum(-1, keepdim=True)
    return y


def looked_up(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    weight, which = chosen(m, rows)
    copies = rows.repeat_interleave(2, 0)[..., None]
    y = torch.bmm(m.weights[which.flatten()], copies).view(-1, 2, WIDTH)
    return (y * weight[..., None]).sum(1).view_as(x)


# What forward does with x [b, s, 32] and ids [b, s] -> what the error says.
WRONG: dict[str, tuple[Callable[..., Tensor], str]] = {
    "item": (lambda m, x, ids: x * ids.max().item() ** 2, rf"{NUMBERS}\.item"),
    "float": (lambda m, x, ids: x * float(x.mean()), rf"{NUMBERS}float\(\)"),
    "math": (lambda m, x, ids: x * math.sqrt(ids.sum().item()), rf"{NUMBERS}\.item"),
    "max": (lambda m, x, ids: x * max(ids[0].tolist()), rf"{NUMBERS}.*\.tolist"),
    "sorted": (lambda m, x, ids: x * sorted(ids[0].tolist())[0], rf"{NUMBERS}.*tol"),
    "range": (lambda m, x, ids: x * len(range(ids.max().item())), rf"{NUMBERS}\.item"),
    "table": (lambda m, x, ids: x * {3: 2.0}.get(ids[0, 0].item(), 1), rf"{NUMBERS}"),
    "numpy": (lambda m, x, ids: x * ids.numpy().sum(), rf"{NUMBERS}\.numpy"),
    "steps": (lambda m, x, ids: x if m.steps > 2 else 2 * x, rf"{NUMBERS}if"),
    "branch": (branch, rf"{NUMBERS}if"),
    "written": (written, rf"{NUMBERS}if"),
    "empty": (lambda m, x, ids: x if torch.empty(3).sum() > 1 else -x, rf"{NUMBERS}if"),
    "lengths": (lengths, rf"{NUMBERS}\.item|{ROWS}x"),
    "ones": (lambda m, x, ids: x * torch.ones(ids.max().item()).sum(), NUMBERS),
    "classes": (
        lambda m, x, ids: x + F.one_hot(ids).sum(-1, keepdim=True),
        r"how many classes one_hot has(?s:.*)by a number of Python",
    ),
    "mask": (lambda m, x, ids: x + x[ids > 3].std(), rf"{CHOSEN}'std'"),
    "two masks": (lambda m, x, ids: x + (x[ids > 3] + x[ids < 4]).sum(), CHOSEN),
    "experts": (used_anywhere, rf"{ROWS}\.unique(?s:.*)go over all experts"),
    "used experts": (asked, rf"{NUMBERS}if(?s:.*)go over all experts"),
    "nonzero": (
        lambda m, x, ids: x + x.flatten(0, 1)[ids.flatten().nonzero()[:, 0]].sort(0)[0],
        rf"{CHOSEN}'sort",
    ),
    "in place": (in_place, r"'mul_' writes in place under no_grad"),
    "by a view": (in_place_by_a_view, r"'mul_' writes in place under no_grad"),
    "recurrent": (lambda m, x, ids: m.stack(x)[0], r"the dropout of 0\.5 .* 'lstm'"),
}


def far(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Scales frequencies of positions that it counts itself, as a rotary embedding."""
    place = torch.arange(ids.shape[1]).unsqueeze(0).expand(len(ids), -1)
    most = place.max() + 1
    scale = most / 3 if most > 3 else torch.ones(())
    return x * torch.cos(place / scale)[..., None].to(x)


def guarded(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    if not torch.compiler.is_exporting():
        m.count.add_(1)
    return x


def local(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    with torch.no_grad():
        mask[:, 0] = 0
        mask.mul_(2)
    return x * mask


def masked(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    mask = (ids > 3)[..., None]
    return torch.where(mask, x, 0) + (x * mask).sum(1, True) / mask.sum(1, True)


# As the fixes say it.
FIXED: dict[str, Callable[..., Tensor]] = {
    "classes": lambda m, x, ids: (
        x + m.head.weight[0, :6] @ F.one_hot(ids.clamp(max=6), 7)[..., :6, None].to(x)
    ),
    "no rows": unless_none,
    "of buffers": lambda m, x, ids: x if m.count[:2].sum() else x * (1 + m.count[0]),
    "of positions": far,
    "item": lambda m, x, ids: x * ids[:, :1, None],
    "an integer": lambda m, x, ids: x * (1 - ids[0, 0].item()),
    "a real one": lambda m, x, ids: x / (ids.sum().item() + 1e-3),
    "a share": lambda m, x, ids: x * (2 * ids[0].sum().item() / ids.sum().item()),
    "of ids": lambda m, x, ids: x * (1.5 - 1 / (ids.float().std().item() + 0.5)),
    "of weights": lambda m, x, ids: x / m.head.weight.abs().max().item(),
    "branch": lambda m, x, ids: torch.where((ids > 3)[..., None], x, 2 * x),
    "mask": masked,
    "experts of their rows": looped,
    "experts that are used": used,
    "experts of all rows": all_rows,
    "experts that are looked up": looked_up,
    "in place": lambda m, x, ids: x + (2 * x - x).detach(),
    "counted": counted,
    "counted, but not where it is exported": guarded,
    "local": local,
    "lstm": lambda m, x, ids: m.lstm(x)[0],
    "gru": lambda m, x, ids: m.gru(x.transpose(0, 1))[0].transpose(0, 1),
    "rnn": lambda m, x, ids: m.rnn(x, m.state.expand(2, len(x), WIDTH // 2))[0],
    "one by one": lambda m, x, ids: m.lstm(F.dropout(m.lstm(x)[0], 0.5))[0],
}


class Between(nn.Module):
    """Whatever is wanted between an embedding and a head."""

    def __init__(self, table: dict[str, Any], what: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.state = nn.Parameter(torch.randn(2, 1, WIDTH // 2))
        self.stack = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, False) for _ in range(4))
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.fixed, self.what = table is FIXED, what

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        found = FIXED[self.what] if self.fixed else WRONG[self.what][0]
        y = self.head(found(self, self.embed(input_ids), input_ids))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()[: y[..., 0].numel()])


def between(table: dict[str, Any], what: str) -> Case:
    torch.manual_seed(0)
    model = randomize(Between(table, what))
    return Case(model, token_batch(seq=4, ignored="none")).double()


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize("what", WRONG)
def test_what_a_graph_cannot_have_is_named_with_its_line(what, capfd):
    case = between(WRONG, what)
    with pytest.raises(CaptureError, match=WRONG[what][1]) as error:
        trace(case.model, case.batch)
    at = r"\n  at   .*test_values_read\.py:\d+.*\n  fix  "
    assert re.search(at, str(error.value))
    assert "def forward" not in capfd.readouterr().err


def test_a_branch_beside_a_choice_of_experts_is_no_loop_over_experts():
    """Each configuration of Hugging Face has the choice, whether or not the model has
    experts."""
    case = between(WRONG, "branch")
    case.model.config = SimpleNamespace(_experts_implementation="eager")
    with pytest.raises(CaptureError, match=WRONG["branch"][1]):
        trace(case.model, case.batch)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("what", FIXED)
def test_as_the_fixes_have_it_models_compile(what):
    case = between(FIXED, what)
    for mesh, microbatches in (("dp=2", 2), ("pp=2,tp=2", 2)):
        case.verify(mesh, microbatches)


@pytest.mark.slow
def test_what_a_buffer_told_holds_until_it_has_other_values():
    case = between(FIXED, "of buffers")
    step = compiled(case)
    state = case.model.state_dict()
    step.load_state_dict(state)
    stored = read_program(step.program.to_json(), step.program.plan, {})
    for program in step.program, stored:
        assert list(program.known) == ["count"]
        check_model(program, case.model)
    state = {**state, "count": torch.ones(4).double()}
    with pytest.raises(ModelMismatch, match=r"'count', .* other values") as error:
        step.load_state_dict(state)
    assert "into the model first" in str(error.value)
    case.model.load_state_dict(state)
    with pytest.raises(ModelMismatch, match="'count'"):
        check_model(stored, case.model)
    compiled(case).load_state_dict(state)


def compiled(case: Case) -> autopar.Step:
    options = {"example_inputs": case.batch, "prove": False}
    return autopar.compile(case.model, "tp=1", **options)


def test_experts_in_other_words_compute_the_same():
    model, batch = between(FIXED, "mask")[:2]
    model.weights.data = torch.stack([e.weight for e in model.experts]).detach()
    x = model.embed(batch["input_ids"])
    want, *found = (f(model, x, None) for f in (looped, all_rows, looked_up))
    for y in found:
        torch.testing.assert_close(y, want)


def test_numbers_that_stay_the_same_may_come_in_the_batch():
    class Lengths(Between):
        def forward(self, input_ids: Tensor, labels: Tensor, sizes: Any) -> Tensor:
            y = self.head(self.embed(input_ids)[:, : sizes[0]].mean(1, keepdim=True))
            return F.cross_entropy(y.flatten(0, 1), labels[:, 0])

    case = Case(Lengths(FIXED, "mask"), {**token_batch(seq=4, ignored="none")})
    case.batch["sizes"] = (3, 1)
    case._replace(model=randomize(case.model).double()).verify("dp=2", 2)


def test_a_number_that_nobody_uses_is_no_matter():
    def log(module: nn.Module, given: Any, out: Tensor) -> None:
        module.largest = out.max().item()

    case = between(FIXED, "mask")
    case.model.head.register_forward_hook(log)
    assert trace(case.model, case.batch).graph.outputs
