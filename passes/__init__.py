"""The compiler: pure functions from one type to the next, folder by folder.

    ops        Op                            all that there is to say of an operation
    capture    find_repeats        Repeats   layers that do the same: few are read
               trace               Traced    the model's forward, down to the loss:
      forward                                what it asks, calls and keeps as it runs,
      exported   functionalize               its graph, without writes,
      rows       batch_expert_loops          experts that are modules, as one product,
                 join_weights                parameters that are read as one stack
                 find_input_ranges  InputRange  what integers of a batch may be
               lower_precision     Traced    casts, where autocast would compute so
      normalize  normalize         Traced    one spelling for each thing
                 unsort_rows                 rows of experts where they were
    dims       name_dims           Named     what each dim of each tensor is
    schedule   make_schedule       Schedule  what each rank does in turn: the one named,
               fit_schedule                  or one made for what stages take
    recompute  POLICIES                      what the backward makes again
    shard      few_layers          FewLayers layers that do the same: few are lowered
               split_updates       Named     what buffers have after a step, of sums
               split_groups        Plan      tp in two, where ranks share heads of keys
               propagate           Sharded   which axis splits which dim, of every value
               cut_weights         Sharded   pieces, of a weight that is used in pieces
               insert_collectives  Lowered   every move between shardings is an op
               sort_rows           Lowered   rows lie in the order of their experts
               few_layers.whole    Lowered   that of all layers, from that of the few
    stage      split_stages        Staged    pipeline stages of balanced cost
               localize                      from global shapes to one rank's own
               differentiate       LocalStage  forward, backward, transposed collectives
               split_backward                the halves that zero-bubble schedules want
               overlap                       parameters' collectives beside computing
               reuse                         results written over what nobody reads
    emit       outline, find_loops           equal runs as functions, layers as a loop
               emit                text      readable Python
    pipeline                       Program   all of these in turn: `schedule_stages`
                                             prices stages and chooses a schedule,
                                             `emit_modules` emits each stage and kind of
                                             rank, `assemble` says what ranks need to
                                             know beside the texts

What to compile is found beside it:

    price      price, estimate     Estimate  seconds and bytes of a plan, on paper
    search     search              Ranking   the best plans; what each op splits best
               choose_recompute    Staged    what is computed again, to fit into memory
    proof      differs             Difference  of a large text from its small one, which
                                             is run beside the model

A folder imports those above it, never one below; each stands on the types that flow, as
far as they are made of what is above it: errors, graph, mesh; plan; program.
`pipeline.compile_program` shows the whole way on a page.
"""
