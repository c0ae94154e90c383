"""Complex numbers, in activations and weights: derivatives have their conjugates, and
neither norms nor proofs leave out the imaginary parts."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from torch import Tensor, nn

from autopar.proof.errors import relative_error

SIZE = 4


def turned(c: Tensor, w: Tensor) -> Tensor:
    return (c * w).conj() + c.mH.adjoint() + w.conj()


def products(c: Tensor, w: Tensor) -> Tensor:
    table = w[:, None] * w.conj()
    return c @ table + w + (c @ c.mH) @ c + nn.functional.linear(c, table, w)


def numbers(c: Tensor, w: Tensor) -> Tensor:
    return c * 1j * w + (2 - 3j) * c / (w + 4)


def of_reals(c: Tensor, w: Tensor) -> Tensor:
    decay = torch.exp(torch.complex(-torch.exp(w.real), w.imag))
    return c * decay + w.real + c.imag * 2.0


def spectrum(c: Tensor, w: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(c, dim=1) * w, dim=1)


class Complex(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 2 * SIZE), nn.Linear(2 * SIZE, 8)
        pairs = torch.randn(SIZE, 2)
        self.w = nn.Parameter(torch.view_as_complex(pairs).clone() if own else pairs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        c = torch.view_as_complex(self.up(x).unflatten(-1, (SIZE, 2)))
        w = self.w if self.w.is_complex() else torch.view_as_complex(self.w)
        for part in (turned, products, numbers, of_reals, spectrum):
            c = part(c, w)
            c = c / (1 + c.abs())
        out = self.down(torch.view_as_real(c).flatten(-2))
        return (out - y).square().mean()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), ("dp=2", 3)])
def test_complex_numbers_are_proved(mesh: str, zero: int, own: bool) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6, 8)}
    case = Case(Complex(own), batch)
    proof = case.proved(mesh, zero=zero).proof  # an update is part of it
    assert proof is not None and proof.error < 1e-9


def test_an_imaginary_part_counts() -> None:
    assert relative_error(torch.tensor(1 + 1j), torch.tensor(1 + 0j)) == 1.0
