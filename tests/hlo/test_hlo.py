"""What HLO says is read rightly: hand-written programs in all of XLA's spellings, and real arrays."""

import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshtrain import hlo
from meshtrain.hlo import (
    Collective,
    CompiledCollectives,
    Module,
    collectives,
    live_bytes,
    short_path,
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """data 2 x tensor 2 x pipeline 2: device d*4 + t*2 + p, by its place in the mesh."""
    devices = np.array(jax.devices()).reshape(2, 2, 2).transpose(1, 2, 0)
    return Mesh(devices, ("data", "tensor", "pipeline"))


def program(instruction: str) -> str:
    return f"""
HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  {instruction}, metadata={{op_name="jit(step)/psum" stack_frame_id=3}}
}}
"""


def only(text: str, mesh: Mesh) -> Collective:
    (found,) = collectives(text, mesh)
    return found


@pytest.mark.parametrize(
    ("groups", "axis", "ranks"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", "data", 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", "tensor", 2),
        ("{{0,1},{2,3},{4,5},{6,7}}", "pipeline", 2),
        ("{{0,1,2,3},{4,5,6,7}}", "tensor+pipeline", 4),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "none", 1),
        ("{}", "data+tensor+pipeline", 8),
        ("[4,2]<=[8]", "pipeline", 2),
        ("[1,8]<=[8]", "data+tensor+pipeline", 8),
        ("[2,4]<=[8]", "tensor+pipeline", 4),
        ("[2,4]<=[4,2]T(1,0)", "data+tensor", 4),
        ("[4,2]<=[2,4]T(1,0)", "data", 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", "tensor", 2),
        ("mesh['data'=2,'tensor'=2,'pipeline'=2] {'tensor'}", "tensor", 2),
        (
            "mesh['data'=2,'tensor'=2,'pipeline'=2] {'pipeline','tensor'}",
            "tensor+pipeline",
            4,
        ),
        (
            "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(2,1,0)) {'axis_0'}",
            "pipeline",
            2,
        ),
        (
            "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(2,1,0)) {'axis_1'}",
            "data+tensor",
            4,
        ),
        ("mesh['a'=8] {'a':(2)2}", "tensor", 2),
        ("mesh['a'=8] {'a':(1)2}", "data", 2),
        ("mesh['a'=4,'b'=2], device_ids=(0,1,4,5,2,3,6,7) {'a'}", "data+tensor", 4),
    ],
)
def test_groups_become_mesh_axes_in_every_spelling(groups, axis, ranks, mesh):
    found = only(
        program(
            f"ROOT %psum.1 = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"
        ),
        mesh,
    )
    assert (found.kind, found.axis, found.ranks, found.bytes, found.dtype) == (
        "all-reduce",
        axis,
        ranks,
        32,
        "f32",
    )
    assert found.source == "jit(step)/psum"


PAIRS = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"


@pytest.mark.parametrize(
    ("instruction", "kind", "nbytes", "dtype", "sent"),
    [
        (
            f"ROOT %a = bf16[4,8]{{1,0}} all-reduce(%p), {PAIRS}",
            "all-reduce",
            64,
            "bf16",
            64,
        ),
        (
            f"ROOT %a = (f32[8]{{0}}, f32[2,/*index=1*/3]{{1,0}}) all-reduce(%p, %q), {PAIRS}",
            "all-reduce",
            56,
            "f32",
            56,
        ),
        (
            f"%a = (f32[8]{{0}}, f32[4]{{0}}) all-reduce-start(%p, %q), {PAIRS}",
            "all-reduce",
            48,
            "f32",
            48,
        ),
        (
            f"%a = ((f32[8]{{0}}), f32[8]{{0}}) all-reduce-start(%p), {PAIRS}",
            "all-reduce",
            32,
            "f32",
            32,
        ),
        (
            f"ROOT %a = f32[16]{{0:T(256)S(1)}} all-gather(%p), {PAIRS}, dimensions={{0}}",
            "all-gather",
            64,
            "f32",
            32,
        ),
        (
            f"%a = (f32[8]{{0}}, f32[16]{{0}}) all-gather-start(%p), {PAIRS}",
            "all-gather",
            64,
            "f32",
            32,
        ),
        (
            f"%a = ((f32[8]{{0}}, f32[1]{{0}}), (f32[16]{{0}}, f32[2]{{0}})) all-gather-start(%p), {PAIRS}",
            "all-gather",
            72,
            "f32",
            36,
        ),
        (
            f"ROOT %a = f16[4]{{0}} reduce-scatter(%p), {PAIRS}, dimensions={{0}}",
            "reduce-scatter",
            16,
            "f16",
            8,
        ),
        (
            f"%a = ((f32[8]{{0}}), f32[4]{{0}}) reduce-scatter-start(%p), {PAIRS}",
            "reduce-scatter",
            32,
            "f32",
            16,
        ),
        (
            f"ROOT %a = (f32[4]{{0}}, f32[4]{{0}}) all-to-all(%p, %q), {PAIRS}",
            "all-to-all",
            32,
            "f32",
            16,
        ),
    ],
)
def test_bytes_are_those_of_the_full_buffer_and_sent_those_of_a_ring(
    instruction, kind, nbytes, dtype, sent, mesh
):
    found = only(program(instruction), mesh)
    assert (found.kind, found.axis, found.bytes, found.dtype, found.sent) == (
        kind,
        "data",
        nbytes,
        dtype,
        sent,
    )


@pytest.mark.parametrize(
    "opcode",
    [
        "f32[8]{0} collective-permute(",
        "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(",
    ],
)
def test_messages_between_stages_are_told_by_their_pairs(opcode, mesh):
    found = only(
        program(
            f"ROOT %m = {opcode}%p), source_target_pairs={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}"
        ),
        mesh,
    )
    assert (found.kind, found.axis, found.bytes, found.sent) == (
        "collective-permute",
        "pipeline",
        32,
        32,
    )


NESTED = """
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%wrapped_limit (n: s32[]) -> pred[] {
  %n = s32[] parameter(0)
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %limit), direction=LT
}

inner_condition (c: (s32[], f32[8])) -> pred[] {
  c = (s32[], f32[8]{0}) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  ROOT less = pred[] fusion(i), kind=kLoop, calls=%wrapped_limit
}

inner_body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  c = (s32[], f32[8]{0}) parameter(0)
  x = f32[8]{0} get-tuple-element(c), index=1
  ROOT sum = f32[8]{0} all-reduce(x), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=add
}

%idle (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

%busy (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%x), condition=%inner_condition, body=%inner_body
}

%outer_body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %y = f32[8]{0} conditional(%p, %x, %x), branch_computations={%idle, %busy}
  ROOT %m = f32[8]{0} collective-permute(%y), source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
}

%outer_condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] custom-call(%c), custom_call_target="until_done"
}

%async (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %w = (s32[], f32[8]{0}) while(%t), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"11"}}
  %start = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%async
  %done = f32[4]{0} async-done(%start), calls=%async
  ROOT %copy = f32[8]{0} copy(%p)
}
"""


def test_trips_multiply_over_loops_and_conditionals_are_told(mesh):
    found = {c.kind: c for c in collectives(NESTED, mesh)}
    assert len(collectives(NESTED, mesh)) == 3, "a start and its done are one"
    assert (found["all-reduce"].loops, found["all-reduce"].conditionals) == (
        (11, 5),
        (1,),
    )
    assert (
        found["collective-permute"].loops,
        found["collective-permute"].conditionals,
    ) == (
        (11,),
        (),
    )
    assert (found["reduce-scatter"].trips, found["reduce-scatter"].axis) == (1, "data")


def test_traffic_sums_what_is_sent_by_axis_as_often_as_it_is_executed(mesh):
    found = collectives(NESTED, mesh)
    assert found.traffic == {"tensor": 55 * 32, "pipeline": 11 * 32, "data": 16}
    assert collectives(NESTED, mesh, lambda source: 0.5).traffic == {
        "tensor": 55 * 32 / 2,
        "pipeline": 11 * 32,
        "data": 16,
    }


def test_of_one_loop_those_of_one_turn_are_told(mesh):
    module = Module(NESTED)
    assert list(module.bodies()) == [("main", ()), ("outer_body", (11,))], (
        "branches are no sequences"
    )
    found = collectives(module, mesh, body="outer_body")
    assert {(c.kind, c.trips) for c in found} == {
        ("all-reduce", 5),
        ("collective-permute", 1),
    }


def test_a_loop_of_unknown_length_is_no_number(mesh):
    unknown = NESTED.replace(', backend_config={"known_trip_count":{"n":"11"}}', "")
    with pytest.raises(ValueError, match="number of turns"):
        collectives(unknown, mesh).traffic  # noqa: B018


def test_text_that_is_no_program_is_refused(mesh):
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("<html></html>", mesh)


def test_types_have_the_bytes_of_their_elements():
    sizes = {
        "f32[2,3]{1,0}": 24,
        "pred[5]": 5,
        "bf16[]": 2,
        "f8e4m3fn[3]": 3,
        "c64[2]": 16,
        "s4[3]": 2,
        "f32[0,4]": 0,
    }
    assert {kind: hlo.byte_count(kind) for kind in sizes} == sizes


def test_a_compiled_program_tells_axis_bytes_and_trips(mesh):
    def local(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(
            lambda x, _: (jax.lax.psum(x, "tensor") * 0.5, None), x, None, length=6
        )
        return jax.lax.ppermute(x, "pipeline", [(0, 1)])

    spec = PartitionSpec(("data", "pipeline"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    compiled = step.lower(jax.ShapeDtypeStruct((16, 5), np.float32)).compile()
    found = {(c.kind, c.axis, c.bytes, c.trips) for c in collectives(compiled, mesh)}
    assert found == {
        ("all-reduce", "tensor", 80, 6),
        ("collective-permute", "pipeline", 80, 1),
    }


def test_live_bytes_are_those_of_one_device(mesh):
    split = jax.device_put(
        np.zeros((8, 4), np.float32),
        jax.NamedSharding(mesh, PartitionSpec(("data", "tensor"))),
    )
    everywhere = jax.device_put(
        np.zeros(3, np.int8), jax.NamedSharding(mesh, PartitionSpec())
    )
    alone = jax.device_put(np.zeros(100, np.int8), jax.devices()[3])
    assert live_bytes({"a": split, "b": [everywhere]}, jax.devices()[0]) == 32 + 3
    assert live_bytes([split, everywhere, alone]) == 32 + 3 + 100
    assert live_bytes([]) == 0


FRAMES = """
FileNames
1 "/anywhere/model.py"
2 "/anywhere/site-packages/optax/norm.py"

FunctionNames
1 "<module>"
2 "Model.step.<locals>.local"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=31 end_line=33 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}

"""


def test_a_collective_knows_its_line_and_who_called_it(mesh):
    instruction = f"ROOT %a = f32[8]{{0}} all-reduce(%p), {PAIRS}"
    found = only(FRAMES + program(instruction), mesh)  # of frame 3
    assert [(line.file, line.number, line.function) for line in found.lines] == [
        ("/anywhere/model.py", 7, "<module>"),
        ("/anywhere/site-packages/optax/norm.py", 31, "Model.step.<locals>.local"),
        ("/anywhere/model.py", 7, "<module>"),
    ]
    assert found.where == "model.py:7 <module> ← optax/norm.py:31 local"
    assert only(program(instruction), mesh).where == "", "where XLA does not tell"


def test_a_path_is_told_without_the_machines_folders():
    assert short_path(hlo.__file__) == "meshtrain/hlo/__init__.py"
    assert short_path("/tmp/ipykernel_12/345.py") == short_path("<stdin>") == "cell"
    assert short_path("/home/me/mine.py") == "mine.py"


@dataclass
class Sent:
    kind: str
    axes: tuple[str, ...]
    loops: tuple[int | None, ...]

    @property
    def axis(self) -> str:
        return "+".join(self.axes)


def test_collectives_are_counted_in_a_line_the_most_frequent_first():
    found = [
        Sent("all-gather", ("data",), (2, 3)),
        Sent("all-reduce", ("tensor",), (4, 2)),
        Sent("all-reduce", ("tensor",), ()),
        Sent("all-reduce", (), (9,)),
    ]
    assert (
        CompiledCollectives(found).summary
        == "9 all-reduce over tensor, 6 all-gather over data"
    )
    many = CompiledCollectives(
        Sent(f"kind-{n}", ("data", "tensor", "pipeline"), ()) for n in range(40)
    ).summary
    assert len(many) <= 410 and re.fullmatch(
        r"(1 kind-\d+ over data\+tensor\+pipeline, )+\.\.\.", many
    )
