"""The kernels against torch's autograd."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.runtime.kernels import (
    attention,
    attention_backward,
    bias_grad_,
    embedding_grad_,
    experts,
    linear_weight_grad_,
    matmul_weight_grad_,
    sdpa,
    sum_exp,
    sum_exp_backward,
    sum_exp_backward_,
)
from autopar.runtime.kernels.experts import expert_linear, expert_weight_grad_

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def heads_last(batch: int, seq: int, heads: int, width: int, dtype) -> Tensor:
    """[B,H,S,E] strided as models make it: a view of a fused projection's output."""
    fused = torch.randn(batch, seq, heads, width + 3, dtype=dtype)
    return fused[..., :width].transpose(1, 2)


def check_attention(q, k, v, mask=None, is_causal=False, scale=None, backend=None):
    """Compare out and gradients with torch; return what attention returned."""
    kw = {"is_causal": is_causal, "scale": scale}
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    backends = [backend] if backend else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        expected = F.scaled_dot_product_attention(
            *leaves, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1], **kw
        )
    dy = torch.randn_like(expected)
    expected.backward(dy)
    out, lse = attention(q, k, v, mask, **kw)
    assert_close(out, expected.detach())
    grads = attention_backward(dy, q, k, v, out, lse, mask, **kw)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert_close(grad, leaf.grad)
    return out, lse


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_attention_is_sdpa(dtype, causal, value_dim):
    q, k = (heads_last(2, 19, 3, 8, dtype) for _ in range(2))
    v = heads_last(2, 19, 3, value_dim, dtype)
    check_attention(q, k, v, is_causal=causal, scale=0.3)
    check_attention(q, k, v, is_causal=causal)


@dtypes
@pytest.mark.parametrize("value_dim", [8, 12])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 1)])
def test_attention_broadcasts_masks(dtype, value_dim, shape):
    q, k = heads_last(2, 5, 4, 8, dtype), heads_last(2, 7, 4, 8, dtype)
    v = heads_last(2, 7, 4, value_dim, dtype)
    check_attention(q, k, v, mask=torch.rand(shape) > 0.4)
    check_attention(q, k, v, mask=torch.randn(shape, dtype=dtype))
    check_attention(
        q,
        k,
        v,
        mask=torch.randn(shape[::-1], dtype=dtype).permute(
            *reversed(range(len(shape)))
        ),
    )


@pytest.mark.parametrize("value_dim", [8, 12])
def test_a_row_that_attends_to_nothing_is_zero(value_dim):
    q, k = heads_last(2, 5, 4, 8, torch.float64), heads_last(2, 7, 4, 8, torch.float64)
    mask = torch.rand(2, 1, 5, 7) > 0.4
    mask[0, :, 3] = False
    v = heads_last(2, 7, 4, value_dim, torch.float64)
    out, _ = check_attention(q, k, v, mask=mask)
    assert (out[0, :, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_a_row_of_lowest_floats_attends_evenly(value_dim, dtype):
    q, k = (heads_last(1, 6, 2, 8, dtype) for _ in range(2))
    v = heads_last(1, 6, 2, value_dim, dtype)
    mask = torch.zeros(6, 6)
    mask[2] = torch.finfo(torch.float32).min
    out, _ = attention(q, k, v, mask)
    torch.testing.assert_close(out[:, :, 2], v.mean(2))


@pytest.mark.parametrize("value_dim", [8, 12])
@pytest.mark.parametrize(("rows", "cols"), [(5, 9), (9, 5)])
def test_causal_aligns_at_the_top_left(value_dim, rows, cols):
    q = heads_last(1, rows, 2, 8, torch.float64)
    k = heads_last(1, cols, 2, 8, torch.float64)
    v = heads_last(1, cols, 2, value_dim, torch.float64)
    check_attention(q, k, v, is_causal=True, backend=SDPBackend.MATH)


@dtypes
@pytest.mark.parametrize("value_dim", [8, 12])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_of_grouped_heads(dtype, value_dim, groups):
    q, k = heads_last(2, 5, 4, 8, dtype), heads_last(2, 5, groups, 8, dtype)
    v = heads_last(2, 5, groups, value_dim, dtype)
    check_attention(q, k, v, is_causal=True, backend=SDPBackend.MATH)


def test_attention_takes_any_strides():
    q, k, v, dy = (torch.randn(2, 3, 8, 5).mT for _ in range(4))
    out, lse = attention(q, k, v)
    copies = [x.contiguous() for x in (dy, q, k, v)]
    assert torch.equal(out, attention(*copies[1:])[0])
    grads = attention_backward(dy, q, k, v, out, lse)
    for grad, expected in zip(
        grads, attention_backward(*copies, out, lse), strict=True
    ):
        assert torch.equal(grad, expected)


def test_attention_over_no_keys_is_zero():
    q, kv = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    out, lse = attention(q, kv, kv)
    assert torch.equal(out, torch.zeros(1, 2, 3, 4))
    dq, dk, dv = attention_backward(torch.ones_like(out), q, kv, kv, out, lse)
    assert torch.equal(dq, torch.zeros_like(q))
    assert dk.shape == dv.shape == kv.shape


def test_attention_rejects_what_kernels_would_misread():
    q, kv = torch.randn(1, 3, 4, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="G divides H: got \\[1, 3, 4, 8\\], \\[1, 2"):
        attention(q, kv, kv)
    with pytest.raises(ValueError, match="not both"):
        attention(q, q, q, mask=torch.ones(4, 4).bool(), is_causal=True)


@pytest.mark.parametrize(
    ("kernel", "mask_shape"), [("flash", None), ("efficient", None), ("efficient", 30)]
)
def test_cuda_kernels_accept_our_arguments(kernel, mask_shape, monkeypatch):
    """Their shape functions run anywhere, and refuse a wrong number or kind of them."""
    monkeypatch.setattr(sdpa, "_kernel", lambda *_: kernel)
    q = torch.empty(2, 4, 32, 16, device="meta", dtype=torch.bfloat16)
    kv = torch.empty(2, 2, 30, 16, device="meta", dtype=torch.bfloat16)
    mask = q.new_ones(30, dtype=torch.bool) if mask_shape else None
    out, lse = attention(q, kv, kv, mask)
    assert out.shape == q.shape
    grads = attention_backward(out, q, kv, kv, out, lse, mask)
    assert [grad.shape for grad in grads] == [q.shape, kv.shape, kv.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value_dim", [12, 16, 24])  # explicit, flash, efficient
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_cuda(dtype, value_dim, masked):
    q, k = (heads_last(2, 19, 3, 16, dtype).cuda() for _ in range(2))
    v = heads_last(2, 19, 3, value_dim, dtype).cuda()
    mask = (torch.rand(2, 1, 19, 19) > 0.4).cuda() if masked else None
    check_attention(q, k, v, mask, not masked, backend=SDPBackend.MATH)


@pytest.mark.parametrize("shape", [(1, 1, 5, 30), (2, 1, 1, 1), (2, 4, 5, 32)])
def test_aligned_masks_hold_the_same_values(shape):
    q, k = torch.empty(2, 4, 5, 8), torch.empty(2, 4, max(shape[3], 30), 8)
    mask = torch.randn(shape)
    aligned = sdpa._aligned(mask, q, k)
    assert torch.equal(aligned, mask.expand_as(aligned))
    assert aligned.shape == (2, 4, 5, k.shape[2])
    assert all(stride % 16 == 0 for stride in aligned.stride()[:3])


@dtypes
@pytest.mark.parametrize("shape", [(7,), (3, 5, 40), (300, 1000)])
def test_sum_exp(shape, dtype):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    m = x.detach().amax(-1)
    expected = (x - m[..., None]).exp().sum(-1)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    assert_close(sum_exp(x.detach(), m), expected.detach())
    assert_close(sum_exp_backward(x.detach(), dy, m), x.grad)
    apart = torch.stack([x.detach()] * 2, -1)[..., 0]  # rows that lie in no one piece
    for own in (x.detach().clone(), apart):
        assert sum_exp_backward_(own, dy, m) is own
        assert_close(own, x.grad)


def test_sum_exp_computes_in_the_wider_dtype():
    x = torch.randn(4, 500).bfloat16()
    m = x.float().amax(-1)
    expected = (x.float() - m[:, None]).exp()
    assert_close(sum_exp(x, m), expected.sum(-1))
    dx = sum_exp_backward(x, torch.full((4,), 2.0), m)
    assert torch.equal(dx, (2 * expected).bfloat16())


def test_sum_exp_holds_no_second_copy_of_its_input():
    """The largest tensor that any op makes on the way is a block, not [T,V]."""
    x, largest = torch.randn(64, 50_000), 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                largest = max(largest, result.numel())
            return result

    with Watch():
        sum_exp(x, torch.zeros(64))
    assert 0 < largest <= 50_000


@dtypes
def test_parameter_gradients_accumulate(dtype):
    x = torch.randn(2, 5, 6, dtype=dtype).transpose(0, 1)
    weight = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, dtype=dtype, requires_grad=True)
    y = F.linear(x, weight, bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    ones = torch.ones_like
    assert_close(linear_weight_grad_(ones(weight), dy, x), weight.grad + 1)
    assert_close(matmul_weight_grad_(ones(weight.mT), x, dy), weight.grad.mT + 1)
    grad = ones(bias)
    assert bias_grad_(grad, dy) is grad
    assert_close(grad, bias.grad + 1)


@dtypes
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_embedding_gradients_accumulate(dtype, padding_idx):
    table = torch.randn(10, 6, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, 5, (4, 9))
    y = F.embedding(ids, table, padding_idx)
    dy = torch.randn_like(y)
    y.backward(dy)
    grad = embedding_grad_(torch.ones_like(table), dy, ids, padding_idx)
    assert_close(grad, table.grad + 1)


def test_gradients_may_be_wider_than_activations():
    dy, x = torch.randn(64, 4).bfloat16(), torch.randn(64, 6).bfloat16()
    ids = torch.zeros(64, dtype=torch.int64)
    expected = dy.float().sum(0)
    assert_close(bias_grad_(torch.zeros(4), dy), expected)
    assert_close(embedding_grad_(torch.zeros(1, 4), dy, ids)[0], expected)
    product = linear_weight_grad_(torch.zeros(4, 6), dy, x)
    torch.testing.assert_close(product, dy.float().mT @ x.float(), rtol=1e-2, atol=0.1)


# --- Experts -----------------------------------------------------------------------


@pytest.fixture
def grouped(monkeypatch):
    """Grouped products on the CPU, where torch has them, though they wait there."""
    monkeypatch.setattr(experts, "has_grouped_products", lambda device, dtype: True)
    calls = []

    def counted(a, b, offs):
        calls.append(offs)
        return multiply(a, b, offs=offs)

    multiply = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", counted)
    return calls


def _experts(dtype, k, n):
    """x [rows, k], experts of rows, weight [4, k, n], dy [rows, n], and what comes of
    them: y, and the gradients of x and the weight."""
    x = torch.randn(40, k, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, k, n, dtype=dtype, requires_grad=True)
    expert = torch.randint(-1, 5, (40,))  # -1 and 4 are others' experts
    expert[expert == 2] = 3  # one has no rows
    mine = (expert >= 0) & (expert < 4)
    y = (x[:, None] @ weight[expert.clamp(0, 3)])[:, 0] * mine[:, None]
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted = (y.detach(), x.grad, weight.grad)
    return (x.detach(), expert, weight.detach(), dy), wanted


def _check_experts(given, wanted):
    x, expert, weight, dy = given
    y, dx, dw = wanted
    assert_close(expert_linear(x, expert, weight), y)
    assert_close(expert_linear(dy, expert, weight.mT), dx)
    grad = torch.ones_like(weight.mT)
    assert_close(expert_weight_grad_(grad, dy, x, expert) - 1, dw.mT)
    none = expert_linear(x[:0], expert[:0], weight)
    assert none.shape == (0, weight.shape[2])


@dtypes
@pytest.mark.parametrize("k", [5, 1])
def test_each_row_meets_the_weight_of_its_expert(dtype, k):
    """1: as of biases."""
    _check_experts(*_experts(dtype, k, 3))


def test_products_of_all_experts_at_once(grouped):
    _check_experts(*_experts(torch.float32, 8, 12))
    assert len(grouped) == 3


def test_products_whose_rows_are_not_aligned_go_one_by_one(grouped):
    _check_experts(*_experts(torch.float32, 8, 5))
    given, wanted = _experts(torch.float32, 8, 12)
    x, expert, weight, dy = given
    moved = torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight)
    _check_experts((x, expert, moved, dy), wanted)
    assert len(grouped) == 1  # of aligned operands: x and dy, for the weight's gradient


def test_an_expert_without_rows_gets_no_gradient(monkeypatch, grouped):
    """Whatever a kernel leaves there, see pytorch/pytorch issue 172439; nor do rows of
    others' experts get anything."""

    def careless(a, b, offs):
        found = multiply(a, b, offs)
        ends = offs.tolist()
        if found.ndim == 3:
            found[[i for i in range(4) if ends[i] == [0, *ends][i]]] = torch.nan
        else:
            found[ends[-1] :] = torch.nan
        return found

    multiply = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", careless)
    _check_experts(*_experts(torch.float32, 8, 12))
    assert len(grouped) == 3


@pytest.mark.usefixtures("grouped")
def test_products_at_once_wait_for_no_number_of_the_device():
    """Tensors without data have none to give."""
    with FakeTensorMode():
        low = partial(torch.empty, dtype=torch.bfloat16)
        x, dy, weight = low(40, 8), low(40, 16), low(4, 8, 16)
        expert = torch.zeros(40, dtype=torch.int64)
        assert expert_linear(x, expert, weight).shape == (40, 16)
        assert expert_weight_grad_(weight.mT, dy, x, expert).shape == (4, 16, 8)
        with pytest.raises(DataDependentOutputException):
            expert_linear(x[:, 1:], expert, weight[:, 1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_no_product_of_experts():
    device = torch.device("cuda")
    if not experts.has_grouped_products(device, torch.bfloat16):
        pytest.skip("this GPU multiplies groups one by one")
    (x, expert, weight, dy), (y, dx, dw) = _experts(torch.bfloat16, 16, 24)
    x, expert, weight, dy = (t.to(device) for t in (x, expert, weight, dy))
    grad = torch.zeros_like(weight.mT)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [expert_linear(x, expert, weight), expert_linear(dy, expert, weight.mT)]
        expert_weight_grad_(grad, dy, x, expert)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, want in zip([*found, grad.mT], [y, dx, dw], strict=True):
        assert_close(got.cpu(), want)
