"""The compiler: pure functions from one type to the next, in this order.

    trace               Traced    the model's forward, down to the loss
    normalize           Traced    one spelling for each thing
    name_dims           Named     what each dim of each tensor is
    propagate           Sharded   which axis splits which dim, for every value
    insert_collectives  Lowered   every move between shardings is an op
    split_stages        Staged    pipeline stages of balanced cost
    localize                      from global shapes to one rank's own
    differentiate       LocalStage  its forward and backward, collectives transposed
    reuse                         results written over what nobody reads any more
    emit                text      readable Python
    pipeline            Program   all of these in turn, and what ranks must know

What the passes stand on: graph (values, nodes), mesh, plan (the decisions), sharding,
rules (how dims flow through ops), linearity, rest (where parameters lie between their
uses), vjp and traced_vjp (derivatives), tape, cost, footprint, origins, errors.
Schedules: schedule, check_schedule, simulate_schedule. `pipeline.compile_program` shows
the whole way on a page.
"""

AUTOPAR = True  # tells this package from another that a user may have named passes
