"""What an instruction of the train step is for, from the names that it carries: `op_name`, made of JAX's transformations and `meshtrain.scopes`.

    jit(_train)/update/add                                              optimizer
    …/shard_map/while/body/forward_slot/…/jvp(layer)/dot_general        forward
    …/backward_slot/…/transpose(jvp(layer))/dot_general                 backward
    …/checkpoint/rematted_computation/layer/dot_general                 recomputation
    …/forward_slot/…/dynamic_update_slice                               schedule: in a slot, and of no layer

On one device JAX leaves the shard_map out. Where the table splits the backward, both halves stand in a backward_slot.
"""

import re

from meshtrain import scopes
from meshtrain.report.trace.attribution import Kind

AGAIN = "rematted_computation"  # jax.checkpoint's own name for what it computes once more


def kind_of(source: str) -> Kind:
    """The kind of an instruction whose `op_name` is `source`; unknown where that is none of a whole step's."""
    # Of instructions that XLA joined it lists all names; the first is the one that the others went into.
    source = source.partition(";")[0]
    if not source.startswith("jit("):
        return "unknown"
    words = re.findall(r"\w+", source)
    for word in words:
        if word == scopes.HEAD:
            return "head"
        if word == scopes.EMBEDDING:
            return "embedding"
        if word in (scopes.UPDATE, scopes.ZERO):
            return "optimizer"
        if word in (scopes.LAYER, AGAIN):
            break
    else:
        return "backward" if scopes.BACKWARD in words and "transpose" in words else "schedule"
    if AGAIN in words:
        return "recomputation"
    return "backward" if "transpose(" in source or scopes.BACKWARD in words else "forward"
