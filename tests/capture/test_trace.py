"""Capturing a model: which loss, which parameters, and what cannot be captured."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpret import loss_of
from torch import Tensor, nn

from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError


def batch(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, 6), "y": torch.randn(rows, 6)}


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Model(nn.Module):
    """A linear layer; `returns` says in what its loss comes out."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.up(x)
        return self.returns(F.mse_loss(out, y), out)


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda loss, out: loss,
    "one element": lambda loss, out: loss[None],
    "tuple": lambda loss, out: (loss, out),
    "tuple, loss last": lambda loss, out: (out, loss),
    "object": lambda loss, out: Output(loss, out),
    "dict": lambda loss, out: {"logits": out, "loss": loss},
}


@pytest.mark.parametrize("returns", RETURNS.values(), ids=RETURNS.keys())
def test_the_loss_is_found(returns: Callable[[Tensor, Tensor], Any]) -> None:
    model, fields = Model(returns), batch()
    traced = trace(model, fields)
    (loss,) = traced.graph.outputs
    assert loss.shape == ()
    wanted = F.mse_loss(model.up(fields["x"]), fields["y"])
    torch.testing.assert_close(loss_of(traced, model, fields), wanted)


def test_a_loss_function_reads_fields_that_the_model_does_not_take() -> None:
    model, fields = nn.Linear(6, 6), {"input": batch()["x"], "scales": torch.ones(4)}

    def loss_fn(out: Tensor, fields: dict[str, Tensor]) -> Tensor:
        return (out.square().sum(-1) * fields["scales"]).sum()

    traced = trace(model, fields, loss_fn)
    assert [v.name for v in traced.graph.inputs] == ["input", "scales"]
    wanted = model(fields["input"]).square().sum()
    torch.testing.assert_close(loss_of(traced, model, fields), wanted)


class AnyKeyword(nn.Module):
    """Hands what it does not know on to a layer, which takes a factor alone."""

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return self.layer(x, **more)

    def layer(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x * factor


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({}, 3.0), ({"y": torch.ones(3)}, 6.0), ({"factor": torch.tensor(2.0)}, 9.0)],
)
def test_any_keyword_may_be_one_that_the_model_cannot_do_with(
    more: dict[str, Tensor], wanted: float
) -> None:
    def loss_fn(out: Tensor, fields: dict[str, Tensor]) -> Tensor:
        return (out + fields.get("y", 0.0) + more.get("factor", 1.0) - 1).sum()

    fields = {"x": torch.ones(3), **more}
    traced = trace(AnyKeyword(), fields, loss_fn)
    assert loss_of(traced, AnyKeyword(), fields) == wanted


def test_a_field_that_nobody_reads_is_not_left_out_of_the_call() -> None:
    fields = {"x": torch.ones(3), "mask": torch.ones(3)}
    with pytest.raises(CaptureError, match="unexpected keyword argument 'mask'"):
        trace(AnyKeyword(), fields, lambda out, _: out.sum())


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    return F.gaussian_nll_loss(x, y, x.exp())


def normal(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return -torch.distributions.Normal(x, x.exp(), **options).log_prob(y).mean()


def categorical(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    of = torch.distributions.Categorical(logits=x, **options)
    return -of.log_prob(y.argmax(-1)).mean() + of.entropy().mean()


def looks_into_tensors() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


@pytest.mark.parametrize("loss", [gaussian, normal, categorical])
def test_where_torch_looks_into_tensors_there_is_a_way_without(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch's default, which whoever compiles with Dynamo turns off for the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model, fix = Model(lambda _, out: out), ""
    asked = loss if loss is gaussian else partial(loss, validate_args=True)
    try:
        trace(model, batch(), lambda out, b: asked(out, b["y"]))
    except CaptureError as error:
        fix = error.fix
    found: Callable[..., Tensor] = loss
    if loss is gaussian:
        assert "0.5 * (var.log() + (x - y) ** 2 / var).mean()" in fix

        def found(x: Tensor, y: Tensor) -> Tensor:
            return 0.5 * (x.exp().log() + (x - y) ** 2 / x.exp()).mean()

    else:
        # From torch 2.15 on it looks only where nothing is traced.
        assert "validate_args=False" in fix or not looks_into_tensors()
        assert torch.distributions.Distribution._validate_args
    traced = trace(model, batch(), lambda out, b: found(out, b["y"]))
    wanted = loss(model.up(batch()["x"]), batch()["y"])
    torch.testing.assert_close(loss_of(traced, model, batch()), wanted)


def test_what_is_no_tensor_is_part_of_the_program() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: float, flip: bool) -> Tensor:
            return (x * factor).sum() * (-1 if flip else 1)

    fields = {"x": torch.ones(3), "factor": 2.0, "flip": True}
    traced = trace(Scaled(), fields)
    assert [v.name for v in traced.graph.inputs] == ["x"]
    assert loss_of(traced, Scaled(), {"x": torch.ones(3)}) == -6.0


NO_LOSS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "logits": (
        lambda loss, out: out,
        "a tensor of shape (4, 6), in which there is no ",
    ),
    "no loss": (lambda loss, out: Output(None, out), "a Output, in which there is no "),
    "dict": (
        lambda loss, out: {"out": out},
        "dict with fields out, in which there is no",
    ),
    "two": (
        lambda loss, out: (loss, loss + 1),
        "in which there is more than one scalar ",
    ),
}


@pytest.mark.parametrize(("returns", "message"), NO_LOSS.values(), ids=NO_LOSS.keys())
def test_without_one_loss_the_error_shows_what_came_back(
    returns: Callable[[Tensor, Tensor], Any], message: str
) -> None:
    with pytest.raises(CaptureError, match="give compile a loss_fn") as error:
        trace(Model(returns), batch())
    assert message in error.value.message


def test_a_field_named_as_a_parameter_is_refused() -> None:
    fields = {"input": batch()["x"], "weight": torch.ones(4)}
    with pytest.raises(
        CaptureError, match="field 'weight' has the name of a parameter"
    ):
        trace(nn.Linear(6, 6), fields, lambda out, fields: out.sum())


def test_a_batch_without_a_tensor() -> None:
    with pytest.raises(CaptureError, match="the batch holds no tensor"):
        trace(Model(RETURNS["tensor"]), {"x": 1})


def test_a_branch_on_data_is_shown_at_its_line() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            y = self.other(y) if y.sum() > 0 else self.other(y + 1)
            return y.sum()

    lines, first = inspect.getsourcelines(Branch.forward)
    line = first + next(i for i, text in enumerate(lines) if "y.sum() > 0" in text)
    with pytest.raises(CaptureError) as error:
        trace(Branch(), {"x": torch.randn(3)})
    assert error.value.source.endswith(f"test_trace.py:{line}")
    assert "torch.where" in error.value.fix


def test_running_statistics_may_be_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6))
    fields = {"input": batch()["x"]}

    def loss_fn(out: Tensor, _: dict[str, Tensor]) -> Tensor:
        return out.square().sum()

    with pytest.raises(CaptureError, match=r"buffer '0.running_mean'"):
        trace(model, fields, loss_fn)
    traced = trace(model.eval(), fields, loss_fn)
    wanted = model(fields["input"]).square().sum()
    torch.testing.assert_close(loss_of(traced, model, fields), wanted)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids) * self.frozen), labels)


def test_a_tied_parameter_comes_in_once_and_keeps_its_other_name() -> None:
    ids = torch.randint(7, (5,))
    traced = trace(Tied(), {"ids": ids, "labels": ids})
    assert {v.name for v in traced.graph.params} == {"frozen", "table.weight"}
    assert len(traced.graph.params) == 2
    assert traced.aliases == {"head.weight": "table.weight"}
    assert traced.trainable == {"table.weight"}


def test_a_buffer_of_several_layers_comes_in_once_under_its_first_name() -> None:
    first, second, third = (nn.Module() for _ in range(3))
    first.register_buffer("turns", torch.full((4,), 2.0))
    second.register_buffer("turns", first.turns)
    third.shared = first

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([first, second, third])

        def forward(self, x: Tensor) -> Tensor:
            for layer in (first, second, third.shared):
                x = x * layer.turns
            return x.sum()

    traced = trace(Rotated(), {"x": torch.ones(4)})
    assert [v.name for v in traced.graph.buffers] == ["layers.0.turns"]
    assert loss_of(traced, Rotated(), {"x": torch.ones(4)}) == 32.0


def test_one_tensor_for_two_inputs_stays_two_inputs() -> None:
    ids = torch.randint(7, (5,))
    traced = trace(Tied(), {"ids": ids, "labels": ids})
    readers = traced.graph.consumers()
    assert [v.name for v in traced.graph.inputs] == ["ids", "labels"]
    assert readers["ids"] and readers["labels"]


def test_a_model_that_does_not_fit_in_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**18, 2**18)  # 256 GiB
    fields = {"input": torch.ones(2, 2**18)}
    traced = trace(model, fields, lambda out, _: out.sum())
    assert str(traced.graph.params[0].type) == "f32[262144,262144]"
    assert model.weight.is_meta and isinstance(model.weight, nn.Parameter)


def test_a_forward_by_another_name_has_a_place_too() -> None:
    """Torch notes the lines of functions that are called forward."""

    def patched(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return (self.up(x) - y).square().mean()

    model = Model(lambda loss, out: loss)
    model.forward = patched.__get__(model)
    *_, mean = trace(model, batch()).graph.nodes
    assert mean.location.source.startswith("test_trace.py:")


def test_nodes_know_their_module_and_line() -> None:
    traced = trace(Model(RETURNS["tensor"]), batch())
    lines, first = inspect.getsourcelines(Model.forward)
    (linear,) = [n for n in traced.graph.nodes if n.op.startswith("aten.linear")]
    assert linear.location.module == "up"
    assert linear.location.source == f"test_trace.py:{first + 1}"
    assert "self.up(x)" in lines[1]


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_what_forward_calls_of_its_own_is_known_by_its_line() -> None:
    def loss(out: Any, batch: Any) -> Tensor:
        return halved(out[1].exp()).mean()

    model = Model(lambda loss, out: (loss, halved(out.tanh())))
    places = {n.name: n.location for n in trace(model, batch(), loss).graph.nodes}
    lines = {
        f: f"test_trace.py:{f.__code__.co_firstlineno + 1}" for f in (halved, loss)
    }
    assert places["aten.div"].source == lines[halved]
    assert places["aten.mean"].source == lines[loss]


def test_a_region_without_gradient_is_part_of_the_graph() -> None:
    class Target(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = x * 2 + 1
            return (x - target).square().sum()

    fields = {"x": torch.randn(3)}
    traced = trace(Target(), fields)
    ops = [n.op.split(".")[1] for n in traced.graph.nodes]
    assert ops[:3] == ["detach", "mul", "add"]
    assert loss_of(traced, Target(), fields) == Target()(**fields)


def test_a_construct_that_is_no_operator() -> None:
    class Choice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return y.sum()

    line = inspect.getsourcelines(Choice)[1] + 2
    said = rf"'cond', which is no plain operator\n  at   test_trace.py:{line}\n"
    with pytest.raises(CaptureError, match=said):
        trace(Choice(), {"x": torch.randn(3)})


def test_shapes_that_values_decide_are_refused() -> None:
    class Pieces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes = x.long().tolist()
            return torch.ones(9)[: sizes[0]].sum() + x.sum()

    with pytest.raises(CaptureError, match="depends on the values") as error:
        trace(Pieces(), {"x": torch.tensor([4.0, 5.0])})
    assert error.value.source.startswith("test_trace.py:")
