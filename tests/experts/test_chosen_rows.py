"""Rows that the data choose: what is computed with all rows is what their own are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case
from losses_of_rows import (
    after_chosen,
    in_losses,
    looked_up,
    mean_of_chosen,
    of_all,
    of_all_rows,
    of_chosen,
    of_gaps,
    of_numbers,
    of_two_masks,
    of_zeros,
    written,
)
from models_of_rows import (
    EXPERTS,
    Scaled,
    by_masks,
    case,
    copies,
    counted_list,
    different,
    else_nothing,
    guarded,
    if_any,
    if_counted,
    if_first,
    if_in,
    if_in_counts,
    if_in_short_counts,
    if_not_none,
    if_positive,
    in_place,
    in_words,
    listed,
    more,
    moved,
    never_chosen,
    of_a_view,
    of_each,
    of_length,
    of_one_mask,
    of_samples,
    of_tables,
    of_two,
    one_hot,
    others,
    scattered,
    several,
    summed,
    themselves,
    weighed,
)
from torch import Tensor

from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError

ADDS = (in_place, one_hot, copies, of_samples, scattered, of_one_mask)

GUARDED = (if_any, else_nothing, by_masks, if_not_none, if_counted, if_in, if_in_counts)


@pytest.mark.slow
def test_experts_in_all_words_are_proved() -> None:
    program = case(of_all, *ADDS).proved("dp=2,tp=2")
    assert "models_of_rows.py" in program.remarks[0]
    assert program.parameters["layers.0.experts.0.1.weight"].pattern == "ffn/tp embed"


def test_a_mask_and_a_view_of_it_choose_the_same_rows() -> None:
    case(of_all, of_a_view).verify("dp=2", 1)


def test_rows_may_be_looked_up_by_lists_of_them() -> None:
    case(of_all, listed).verify("dp=2", 1)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_tables_of_rows_may_be_turned_and_rows_filled(mesh: str) -> None:
    case(of_all, of_tables).verify(mesh, 1)


def test_of_one_row_several_may_be_chosen() -> None:
    case(of_all, several).verify("dp=2", 1)


@pytest.mark.parametrize("loss", [of_zeros, of_gaps, of_numbers])
def test_rows_that_were_not_chosen_are_in_no_gradient(loss: Any) -> None:
    case(loss).verify("dp=2", 2)


def test_a_mean_in_half_precision_is_of_as_many_as_there_are() -> None:
    x = torch.rand(4, 20_000, dtype=torch.float16) + 0.5
    Case(Scaled(), {"x": x}).verify("dp=2", 2)


def test_values_are_written_at_a_place_of_each_row() -> None:
    case(written).verify("tp=2", 1)


@pytest.mark.parametrize("loss", [of_chosen, mean_of_chosen, looked_up, in_losses])
def test_a_loss_over_chosen_tokens_is_that_of_all_microbatches(loss: Any) -> None:
    case(loss).verify("dp=2", 2)


def test_the_largest_number_and_the_norm_are_those_of_chosen_rows() -> None:
    case(of_all_rows).verify("tp=2", 1)


def test_a_row_beside_one_that_was_not_chosen_may_be_none() -> None:
    case(after_chosen).verify("dp=2", 1)


@pytest.mark.slow
def test_whether_there_are_rows_may_be_asked() -> None:
    case(of_all, *GUARDED[:4]).verify("dp=2", 1)


@pytest.mark.slow
def test_it_may_be_asked_in_all_words() -> None:
    case(of_all, in_words).verify("tp=1", 1)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("change", [more, others, summed])
def test_what_is_done_if_there_are_rows_is_to_them_alone(change: Any) -> None:
    one = case(of_all, guarded(themselves))
    trace(one.model, one.batch)
    one = case(of_all, guarded(change))
    with pytest.raises(CaptureError, match=r"by if, while or bool\(\)(?s:.*)\n  fix "):
        trace(one.model, one.batch)


@pytest.mark.parametrize("add", [if_first, if_positive])
def test_one_number_that_is_0_or_less_says_nothing_of_others(add: Any) -> None:
    one = case(of_all, add)
    with pytest.raises(CaptureError, match=r"by if, while or bool\(\)(?s:.*)\n  fix "):
        trace(one.model, one.batch)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<python-input-3>"])
def test_a_model_may_be_typed_in(file: str) -> None:
    names = dict(vars(sys.modules[if_any.__module__]))
    exec(compile(inspect.getsource(if_any), file, "exec"), names)
    case(of_all, names["if_any"]).verify("dp=2", 1)


@pytest.mark.slow
def test_counts_are_as_many_as_torch_gives() -> None:
    case(of_all, if_in_short_counts, never_chosen(EXPERTS)).verify("dp=2", 1)
    one = case(of_all, never_chosen(0))
    with pytest.raises(CaptureError, match=f"fix  .*minlength={EXPERTS}"):
        trace(one.model, one.batch)


@pytest.mark.matrix(quick=5)
@pytest.mark.parametrize(
    "add", [different, of_each, moved, weighed, of_two, of_length, counted_list]
)
def test_what_else_depends_on_how_many_were_chosen_is_refused(add: Any) -> None:
    one = case(of_all, add)
    with pytest.raises(CaptureError, match=r"depends on the values|by \.item"):
        trace(one.model, one.batch)


def test_rows_of_two_masks_are_not_taken_to_be_as_many() -> None:
    one = case(of_two_masks)
    with pytest.raises(CaptureError, match="'mse_loss' does more than work on each"):
        trace(one.model, one.batch)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "add", (*ADDS[:-1], *GUARDED, in_words)
)  # torch cannot run the last
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "cp=2", "dp=2"])
def test_experts(add: Callable[..., Tensor], mesh: str) -> None:
    case(of_all, add, add).verify(mesh, 2)
