"""What an instruction is for, from the names that it carries."""

import pytest

from meshtrain.report.trace.scopes import kind_of

SLOT = "jit(_train)/shard_map/while/body/closed_call"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (f"{SLOT}/forward_slot/cond/branch_1_fun/while/body/closed_call/jvp(layer)/dot_general", "forward"),
        (f"{SLOT}/forward_slot/cond/branch_1_fun/while/body/dynamic_update_slice", "schedule"),
        (f"{SLOT}/backward_slot/cond/branch_1_fun/while/body/transpose(jvp(layer))/mul", "backward"),
        (f"{SLOT}/backward_slot/while/body/transpose(jvp(jvp()))/add_any", "backward"),
        (f"{SLOT}/backward_slot/while/body/jvp(layer)/convert_element_type", "backward"),
        (f"{SLOT}/backward_slot/while/body/add", "schedule"),
        (
            f"{SLOT}/backward_slot/transpose(jvp(jvp()))/checkpoint/rematted_computation/layer/dot_general",
            "recomputation",
        ),
        ("jit(_train)/while/body/transpose(jvp())/while/body/layer/dot_general", "backward"),  # without stages
        ("jit(_train)/while/body/jvp()/while/body/layer/dot_general", "forward"),
        (f"{SLOT}/loss_head/cond/branch_1_fun/transpose(jvp(loss_head))/dot_general", "head"),
        (f"{SLOT}/token_embedding/cond/branch_1_fun/scatter-add", "embedding"),
        ("jit(_train)/shard_map/zero_cast/convert_element_type", "optimizer"),
        ("jit(_train)/update/mul;jit(_train)/update/add", "optimizer"),
        (f"{SLOT}/ppermute;{SLOT}/loss_head/mul", "schedule"),
        # a user's own layer may have names like ours inside
        (f"{SLOT}/forward_slot/jvp(layer)/loss_head/mul", "forward"),
        ("reduce_sum", "unknown"),
        ("copy", "unknown"),
    ],
)
def test_names_tell_what_an_instruction_is_for(source, kind):
    assert kind_of(source) == kind
