"""Operations: each is declared once, in the file of its family (see `op.Op`)."""

from ..ops import (
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
from ..ops.op import declare

for family in (
    *(views, pointwise, reductions, products, attention, lookups, experts),
    *(recurrent, creation, dropout, captured, collectives),
):
    declare(*family.OPS)
