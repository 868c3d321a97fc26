"""Instructions are for what their names say, and those without a name for what is around or behind them."""

import pytest

from meshtrain.hlo import Module
from meshtrain.report.trace.instructions import instructions, kind_of

HLO = """HloModule jit__train, is_scheduled=true

%inside (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %one = f32[8]{0} add(%q, %q), metadata={op_name="jit(_train)/shard_map/forward_slot/jvp(layer)/add"}
  %two = f32[8]{0} add(%one, %q), metadata={op_name="jit(_train)/shard_map/forward_slot/jvp(layer)/add"}
  ROOT %three = f32[8]{0} add(%two, %q), metadata={op_name="jit(_train)/shard_map/loss_head/add"}
}

%parallel (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  ROOT %partly = f32[8]{0} negate(%s)
}

ENTRY %main (state: f32[8]) -> f32[8] {
  %state = f32[8]{0} parameter(0), metadata={op_name="state.params"}
  %copied = f32[8]{0} copy(%state)
  %fused = f32[8]{0} fusion(%copied), kind=kLoop, calls=%inside
  %called = f32[8]{0} call(%fused), to_apply=%parallel, metadata={op_name="jit(_train)/update/neg"}
  ROOT %result = f32[8]{0} copy(%called)
}
"""


def test_a_fusion_is_for_what_most_of_it_is_for_and_others_for_what_is_around_or_behind_them():
    table = instructions(Module(HLO), {"data": 1, "tensor": 1, "pipeline": 1})
    kinds = {
        name: table[name].kind
        for name in ("three", "fused", "partly", "called", "copied", "result")
    }
    assert kinds == {
        "three": "head",
        "fused": "forward",
        "partly": "optimizer",  # of the call
        "called": "optimizer",
        "copied": "forward",  # for the fusion
        "result": "optimizer",  # of the call
    }
    assert [name for name, one in table.items() if one.container] == ["called"]


def test_axes_are_those_of_the_mesh_whose_sizes_are_told():
    hlo = HLO.replace(
        "ROOT %result",
        "%sum = f32[8]{0} all-reduce(%called), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%inside\n  ROOT "
        "%result",
    )
    of = lambda **mesh: instructions(Module(hlo), mesh)["sum"].axis
    assert of(data=2, tensor=2, pipeline=2) == "pipeline"
    assert of(data=2, tensor=4, pipeline=1) == "tensor"
    assert of(data=8, tensor=1, pipeline=1) == "data"


SLOT = "jit(_train)/shard_map/while/body/closed_call"


KINDS = [
    (
        f"{SLOT}/forward_slot/cond/branch_1_fun/while/body/closed_call/jvp(layer)/dot_general",
        "forward",
    ),
    (
        f"{SLOT}/forward_slot/cond/branch_1_fun/while/body/dynamic_update_slice",
        "schedule",
    ),
    (
        f"{SLOT}/backward_slot/cond/branch_1_fun/while/body/transpose(jvp(layer))/mul",
        "backward",
    ),
    (f"{SLOT}/backward_slot/while/body/transpose(jvp(jvp()))/add_any", "backward"),
    (f"{SLOT}/backward_slot/while/body/jvp(layer)/convert_element_type", "backward"),
    (f"{SLOT}/backward_slot/while/body/add", "schedule"),
    (
        f"{SLOT}/backward_slot/transpose(jvp(jvp()))/checkpoint/rematted_computation/layer/dot_general",
        "recomputation",
    ),
    (
        "jit(_train)/while/body/transpose(jvp())/while/body/layer/dot_general",
        "backward",
    ),  # without stages
    ("jit(_train)/while/body/jvp()/while/body/layer/dot_general", "forward"),
    (
        f"{SLOT}/loss_head/cond/branch_1_fun/transpose(jvp(loss_head))/dot_general",
        "head",
    ),
    (f"{SLOT}/token_embedding/cond/branch_1_fun/scatter-add", "embedding"),
    ("jit(_train)/shard_map/zero_cast/convert_element_type", "optimizer"),
    ("jit(_train)/update/mul;jit(_train)/update/add", "optimizer"),
    (f"{SLOT}/ppermute;{SLOT}/loss_head/mul", "schedule"),
    # a user's own layer may have names like ours inside
    (f"{SLOT}/forward_slot/jvp(layer)/loss_head/mul", "forward"),
    ("reduce_sum", "unknown"),
    ("copy", "unknown"),
]


@pytest.mark.parametrize(("source", "kind"), KINDS)
def test_names_tell_what_an_instruction_is_for(source, kind):
    assert kind_of(source) == kind
