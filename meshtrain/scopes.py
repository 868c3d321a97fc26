"""Names that the train step gives to its parts, and that a trace of it is read by: they stand in each instruction's `op_name`.

    jit(_train) / shard_map / while / body / FORWARD / while / body / LAYER / dot_general
                                              slot                    what of it

Of names inside one another the rules of `report.trace.scopes` begin with the outermost. They change no program, only what it says of itself.
"""

FORWARD = "forward_slot"  # of the schedule's table
BACKWARD = "backward_slot"  # B; I and W where the table splits it
LAYER = "layer"
HEAD = "loss_head"
EMBEDDING = "token_embedding"
UPDATE = "update"  # of the weights, outside the shard_map
ZERO = "zero_cast"  # masters to weights, gradients to shards
