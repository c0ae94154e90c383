"""Operations: each is declared once, in the file of its family (see `op.Op`)."""

from autopar.passes.ops import (
    attention,
    captured,
    collectives,
    creation,
    dropout,
    experts,
    lookups,
    pointwise,
    products,
    recurrent,
    reductions,
    views,
)
from autopar.passes.ops.op import declare

for family in (
    *(views, pointwise, reductions, products, attention, lookups, experts),
    *(recurrent, creation, dropout, captured, collectives),
):
    declare(*family.OPS)
