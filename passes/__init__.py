"""The compiler: pure functions from one type to the next, in this order.

    trace               Traced    the model's forward, down to the loss
    lower_precision     Traced    casts, where autocast would compute in half the bits
    normalize           Traced    one spelling for each thing
    name_dims           Named     what each dim of each tensor is
    propagate           Sharded   which axis splits which dim, for every value
    insert_collectives  Lowered   every move between shardings is an op
    split_stages        Staged    pipeline stages of balanced cost
    choose_recompute    Staged    what is computed again, to fit into memory
    localize                      from global shapes to one rank's own
    differentiate       LocalStage  its forward and backward, collectives transposed
    recompute                     what the backward makes again instead of keeping it
    split_backward                the halves that zero-bubble schedules want
    overlap                       parameters' collectives, while something else computes
    reuse                         results written over what nobody reads any more
    emit                text      readable Python
    choose_schedule     Schedule  the one named, or one made for measured costs
    pipeline            Program   all of these in turn, and what ranks must know

What they stand on:

    graph, rewrite, mesh, plan, hints, sharding, program, errors   the types that flow
    notation, rules, linearity, probe, formulas, atoms, origins    how dims flow
    read_export, functionalize, call_model                         reading a model
    loss, fuse, spell_attention, spell_experts                     spellings
    choose_names                                                   names for dims
    local_stage                                                    what a rank runs
    chain                                                          where stages can end
    rest, shares, collectives                                      who holds what
    ring                                                           attention on a ring
    vjp, traced_vjp, tape                                          derivatives
    cost, footprint, memory, cheapest, notes                       what a plan is worth
    allowed, labels, label_axes, label_costs, value_costs, moves   what ops split best
    search_labels                                                  the least of a sum
    schedule, make_schedule, check_schedule, simulate_schedule     the pipeline's order
    fit_schedule, list_schedule                                    orders for costs
    candidate, candidates, cluster, price, price_layers            the best plan
    balance_layers, estimate, estimate_memory, search

`pipeline.compile_program` shows the whole way on a page.
"""

AUTOPAR = True  # tells this package from another that a user may have named passes
