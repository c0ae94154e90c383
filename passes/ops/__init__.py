"""Operations: each is declared once, in the file of its family (see `op.Op`)."""

from ..ops import (
    attention,
    captured,
    collectives,
    creation,
    experts,
    lookups,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    views,
)
from ..ops.op import declare

for family in (
    *(views, pointwise, reductions, products, attention, lookups, experts),
    *(recurrent, creation, random, captured, collectives),
):
    declare(*family.OPS)
