"""What people write in their models, each in a layer of its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import Block, Stack, next_token_loss, randomize, token_batch
from test_unseen import Binary
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

HEADS, SIZE, FFN, BATCH, SEQ = 4, 8, 96, 8, 16
MESHES = ("pp=2,tp=2", "dp=2,tp=2")
sdpa = F.scaled_dot_product_attention
Body = Callable[..., Tensor]


class Logits:
    """As a model of Hugging Face returns them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return next_token_loss(Logits(logits), batch)


class Written(Block):
    """A block whose attention or MLP is a function of it and x [b, s, 32]."""

    def __init__(self, part: str, body: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.body = part, body
        self.name = body.__qualname__ + str(body.__code__.co_firstlineno)
        self.bias = nn.Parameter(torch.zeros(HEADS, SEQ, SEQ))
        self.norm = nn.BatchNorm1d(FFN).eval()
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def attention(self, x: Tensor) -> Tensor:
        return self.body(self, x) if self.part == "attention" else super().attention(x)

    def mlp(self, x: Tensor) -> Tensor:
        if self.part == "attention":
            return super().mlp(x)
        return self.down(self.body(self, self.up(x)))


def heads_in_the_batch(m: Block, x: Tensor) -> Tensor:
    q, k, v = (y.flatten(0, 1) for y in m.heads(x))
    return m.join(sdpa(q, k, v, is_causal=True).unflatten(0, (-1, HEADS)))


def mask_of_heads_in_the_batch(m: Block, x: Tensor) -> Tensor:
    q, k, v = (y.flatten(0, 1) for y in m.heads(x))
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril(2).expand(len(q), SEQ, SEQ)
    return m.join(sdpa(q, k, v, mask).unflatten(0, (-1, HEADS)))


def one_head(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    mask = torch.ones(1, SEQ, SEQ, dtype=torch.bool).tril(2)
    return m.out(sdpa(q, k, v, mask))


def five_dims(m: Block, x: Tensor) -> Tensor:
    q, k, v = (y.unflatten(1, (2, -1)) for y in m.heads(x))
    return m.join(sdpa(q, k, v, m.bias.unflatten(0, (2, -1))).flatten(1, 2))


def causal_beside_a_mask(m: Block, x: Tensor) -> Tensor:
    """As torch's fused kernel takes them on a CPU; of each sample's own keys."""
    keys = x.detach()[:, None, None, :, 0]
    hidden = torch.where(keys > 0.5, torch.finfo(x.dtype).min, keys)
    y = sdpa(*m.heads(x), hidden, is_causal=True)
    shown = (keys < 1) | (torch.arange(SEQ) == 0)
    return m.join(y + sdpa(*m.heads(x), shown, is_causal=True))


def keys_of_no_sample(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    place = torch.arange(SEQ * SIZE, dtype=x.dtype).view(1, 1, SEQ, SIZE) / SEQ / SIZE
    return m.join(sdpa(q, place.expand(1, HEADS, SEQ, SIZE), v, is_causal=True) + k)


def looked_up_in_a_vmap(m: Block, x: Tensor) -> Tensor:
    """By indices of single elements, as Hugging Face makes masks."""
    places = torch.arange(HEADS), torch.arange(SEQ), torch.arange(SEQ)
    look: Body = lambda h, row, column: m.bias[h, row, column]  # noqa: E731
    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        look = torch.vmap(look, dims)
    with TransformGetItemToIndex():
        bias = look(*places)
    return m.join(sdpa(*m.heads(x), bias))


def one_type_in_place(m: Block, x: Tensor) -> Tensor:
    y = F.gelu(x).type_as(x)
    y += 1
    y = F.dropout(y.to(x.dtype), 0.1, training=False)
    y *= 2
    return y


def looked_at(m: Block, x: Tensor) -> Tensor:
    """What no_grad gives as it is keeps its gradient; views and copies do not."""
    with torch.no_grad():
        same = x.double(), x.type_as(x), x.to(x), +x, x.flatten(1, 1)
        fresh = x.view_as(x), x.detach(), x.clone()
        with torch.autocast("cpu", enabled=False):
            size = x.to(x.dtype).square().mean(-1, keepdim=True)
    return F.gelu(x) * size + sum(same) * sum(fresh)


# What attention is instead, and what comes after the MLP's first product.
HABITS: dict[str, dict[str, Callable[[Block, Tensor], Tensor]]] = {
    "attention": {
        "heads in the batch": heads_in_the_batch,
        "mask of heads in the batch": mask_of_heads_in_the_batch,
        "one head": one_head,
        "five dims": five_dims,
        "keys of no sample": keys_of_no_sample,
        "causal beside a mask": causal_beside_a_mask,
        "looked up in a vmap": looked_up_in_a_vmap,
    },
    "mlp": {
        "one type, in place": one_type_in_place,
        "looked at": looked_at,
        "as another": lambda m, x: F.gelu(x.ravel()).reshape_as(x),
        "straight through": lambda m, x: Binary.apply(x, x.flip(-1).tanh())[0],
        "vmap": lambda m, x: torch.vmap(
            torch.vmap(lambda y: F.gelu(y) * y.sigmoid().detach() + m.up.bias)
        )(x),
        "batch norm": lambda m, x: m.norm(x.mT).mT,
        "dropout of constants": lambda m, x: x * F.dropout(torch.ones_like(x[0]), 0.2),
        "dropout of samples": lambda m, x: x * F.dropout(torch.ones_like(x), 0.2),
    },
}


def cases() -> Iterator[tuple[str, Callable[[], Block]]]:
    for part, habits in HABITS.items():
        for name, body in habits.items():
            yield name, partial(Written, part, body)


def case(*blocks: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    made = iter(blocks)
    model = Stack(lambda: next(made)(), len(blocks))
    return Case(randomize(model), token_batch(BATCH, SEQ), loss).double()


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_habits_in_one_model(mesh: str) -> None:
    case(*(block for _, block in cases())).verify(mesh, 2)


def test_what_is_detached_within_a_vmap_has_no_gradient() -> None:
    case(partial(Written, "mlp", HABITS["mlp"]["vmap"])).verify("dp=2", 1)


def test_what_is_looked_up_in_a_vmap_has_a_gradient() -> None:
    case(partial(Written, "attention", looked_up_in_a_vmap)).verify("dp=2,tp=2", 1)


def test_attention_may_be_causal_beside_a_mask() -> None:
    given = case(partial(Written, "attention", causal_beside_a_mask))
    try:
        given.model(given.batch["input_ids"])
    except RuntimeError as error:
        assert "attn_mask should not be set when is_causal=True" in str(error)
        pytest.skip("torch refuses it from 2.14 on")
    given.verify("dp=2,tp=2", 1)


def test_what_no_grad_gives_as_it_is_keeps_its_gradient() -> None:
    case(partial(Written, "mlp", looked_at)).verify("dp=2", 1)


def test_what_has_no_gradient_may_be_copied_in_depth() -> None:
    """As caches are, of which some layers are copied."""
    case(
        partial(
            Written,
            "mlp",
            lambda m, x: x * sum(copy.deepcopy([x.detach(), torch.tensor(2.0)])),
        )
    ).verify("dp=2,tp=2", 1)


def capped(x: Tensor, most: float) -> Tensor:
    return (x / most).tanh() * most


def gate(x: Tensor, scale: float) -> Tensor:
    return x * scale


def plainly_gated(x: Tensor, scale: float = 0.5) -> Tensor:
    return gate(x, scale).sigmoid() * x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gated = torch.jit.script(plainly_gated)


def gate(x: Tensor, scale: float) -> Tensor:  # type: ignore[no-redef]  # noqa: F811
    return x + scale


LOADED = torch.jit.CompilationUnit("def twice(x):\n  return 2 * x\n")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_function_of_torchscript_keeps_its_derivative() -> None:
    scripted = torch.jit.script(capped)
    one = case(partial(Written, "mlp", lambda m, x: scripted(x, 3.0)))
    for _ in range(3):  # by then it derives itself
        loss(one.model(one.batch["input_ids"]), one.batch).backward()
    one.verify("dp=2", 1)


def without_python(m: Written, x: Tensor) -> Tensor:
    return LOADED.twice(x)


def with_what_it_called_then(m: Written, x: Tensor) -> Tensor:
    return gated(x) + gated(x, scale=0.1)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("mlp", [without_python, with_what_it_called_then])
def test_a_function_of_torchscript_is_what_it_was_when_made(mlp: Body) -> None:
    one = case(partial(Written, "mlp", mlp))
    for _ in range(3):
        loss(one.model(one.batch["input_ids"]), one.batch).backward()
    one.verify("dp=2,tp=2", 1)


@pytest.mark.slow
def test_a_bias_is_wider_than_a_model_in_half_precision() -> None:
    far = -(torch.arange(SEQ)[:, None] - torch.arange(SEQ)).abs().float()
    biased = partial(
        Written, "attention", lambda m, x: m.join(sdpa(*m.heads(x), far, dropout_p=0.1))
    )
    one = case(biased, biased)
    one._replace(model=one.model.half()).verify("dp=2,tp=2", 2)


class Placed(Block):
    """Shares a module with a buffer with all other layers."""

    def __init__(self, places: nn.Module) -> None:
        super().__init__()
        self.places = places

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(x * self.places.running_var[:, None])


def test_layers_share_a_buffer() -> None:
    places = nn.BatchNorm1d(SEQ, affine=False).requires_grad_(False)
    case(*[partial(Placed, places)] * 2).verify("pp=2,tp=2", 2)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_learned_bias_is_wider_than_what_attends(precision: str) -> None:
    learned = partial(
        Written, "attention", lambda m, x: m.join(sdpa(*m.heads(x), m.bias))
    )
    one = case(learned)
    one._replace(model=one.model.float()).verify("tp=2", 2, precision=precision)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("block", [pytest.param(b, id=name) for name, b in cases()])
def test_a_habit(block: Callable[[], Block], mesh: str) -> None:
    case(block, block).verify(mesh, 2)
