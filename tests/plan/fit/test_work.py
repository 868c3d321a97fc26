"""What instructions move and multiply: hand-written fusions of each sort, loops, messages, and a program compiled for
real.
"""

import jax
import numpy as np
import pytest

from experiments.plan.work import Moved, Work
from meshtrain.hlo.module import Module

HEAD = "HloModule jit_step, is_scheduled=true\n"


def fusion(computation: str, operands: str, result: str) -> str:
    """A program whose entry is one fusion, of a ring f32[8,100], a value f32[1,100], a place and a predicate."""
    return f"""{HEAD}
%inside (ring: f32[8,100], value: f32[1,100], at: s32[], active: pred[]) -> {result} {{
{computation}
}}

ENTRY %main (ring: f32[8,100], value: f32[1,100], at: s32[], active: pred[]) -> {result} {{
  %ring = f32[8,100]{{1,0}} parameter(0)
  %value = f32[1,100]{{1,0}} parameter(1)
  %at = s32[] parameter(2)
  %active = pred[] parameter(3)
  ROOT %fused = {result} fusion({operands}), kind=kLoop, calls=%inside
}}
"""


PARAMETERS = """  %r = f32[8,100]{1,0} parameter(0)
  %v = f32[1,100]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
"""
ALL = "%ring, %value, %at, %active"
RING = "f32[8,100]{1,0}"
SLICE = "  %old = f32[1,100]{1,0} dynamic-slice(%r, %i, %zero), dynamic_slice_sizes={1,100}\n"


def of_entry(text: str) -> Moved:
    work = Work(Module(text))
    return work.total(work.module.entry)


@pytest.mark.parametrize(
    ("inside", "result", "read", "written"),
    [
        # cut out, also behind an elementwise operation; a place has 4 bytes, a predicate 1
        (
            SLICE + "  ROOT %n = f32[1,100]{1,0} negate(%old)",
            "f32[1,100]{1,0}",
            404,
            400,
        ),
        (
            "  %n = f32[8,100]{1,0} negate(%r)\n"
            "  ROOT %c = f32[1,100]{1,0} dynamic-slice(%n, %i, %zero), dynamic_slice_sizes={1,100}",
            "f32[1,100]{1,0}",
            404,
            400,
        ),
        # put in, in place; under a mask the old value is read besides
        (
            "  ROOT %u = f32[8,100]{1,0} dynamic-update-slice(%r, %v, %i, %zero)",
            RING,
            404,
            400,
        ),
        (
            SLICE
            + "  %p = pred[] parameter(3)\n  %b = pred[1,100]{1,0} broadcast(%p), dimensions={}\n"
            "  %s = f32[1,100]{1,0} select(%b, %v, %old)\n"
            "  ROOT %u = f32[8,100]{1,0} dynamic-update-slice(%r, %s, %i, %zero)",
            RING,
            400 + 400 + 4 + 1,
            400,
        ),
        # read at another place than is written: XLA writes all of it anew
        (
            "  %other = f32[1,100]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={1,100}\n"
            "  %s = f32[1,100]{1,0} add(%v, %other)\n"
            "  ROOT %u = f32[8,100]{1,0} dynamic-update-slice(%r, %s, %i, %zero)",
            RING,
            3200 + 400 + 4,
            3200,
        ),
        # the buffer is made in the fusion
        (
            "  %n = f32[8,100]{1,0} negate(%r)\n  ROOT %u = f32[8,100]{1,0} dynamic-update-slice(%n, %v, %i, %zero)",
            RING,
            2800 + 400 + 4,
            3200,
        ),
        # two results, one of them behind a bitcast
        (
            "  %u = f32[8,100]{1,0} dynamic-update-slice(%r, %v, %i, %zero)\n  %c = f32[800]{0} bitcast(%u)\n"
            "  %n = f32[1,100]{1,0} negate(%v)\n  ROOT %t = (f32[800]{0}, f32[1,100]{1,0}) tuple(%c, %n)",
            "(f32[800]{0}, f32[1,100]{1,0})",
            404,
            800,
        ),
        # used twice, read once
        (
            "  %n = f32[8,100]{1,0} negate(%r)\n  ROOT %s = f32[8,100]{1,0} add(%r, %n)",
            RING,
            3200,
            3200,
        ),
        # filled
        ("  ROOT %f = f32[8,100]{1,0} broadcast(%zero), dimensions={}", RING, 0, 3200),
    ],
)
def test_a_fusion_reads_and_writes_what_it_must(inside, result, read, written):
    assert of_entry(fusion(PARAMETERS + inside, ALL, result)) == Moved(read, written)


PLAIN = f"""{HEAD}
%called (x: f32[8,100]) -> f32[8,100] {{
  %x = f32[8,100]{{1,0}} parameter(0)
  ROOT %again = f32[8,100]{{1,0}} copy(%x)
}}

ENTRY %main (ring: f32[8,100], value: f32[1,100], at: s32[]) -> f32[8,100] {{
  %ring = f32[8,100]{{1,0}} parameter(0)
  %value = f32[1,100]{{1,0}} parameter(1)
  %at = s32[] parameter(2)
  %rows = s32[3,1]{{1,0}} constant({{...}})
  %three = f32[3,100]{{1,0}} constant({{...}})
  ROOT INSTRUCTION
}}
"""


@pytest.mark.parametrize(
    ("instruction", "read", "written", "moves"),
    [
        ("%i = f32[8,100]{1,0} copy(%ring)", 3200, 3200, True),
        (
            "%i = (f32[8,100]{1,0}, f32[8,100]{1,0}, u32[]) copy-start(%ring)",
            3200,
            3200,
            True,
        ),
        ("%i = f32[8,100]{1,0} copy-done(%ring)", 0, 0, False),
        ("%i = f32[800]{0} bitcast(%ring)", 0, 0, True),
        (
            "%i = f32[8,100]{1,0} dynamic-update-slice(%ring, %value, %at, %at)",
            400,
            400,
            True,
        ),
        ("%i = f32[2,100]{1,0} slice(%ring), slice={[0:2], [0:100]}", 800, 800, True),
        (
            "%i = f32[8,100]{1,0} scatter(%ring, %rows, %three), to_apply=%called",
            12 + 2 * 1200,
            1200,
            False,
        ),
        ("%i = f32[8,100]{1,0} call(%ring), to_apply=%called", 3200, 3200, False),
        (
            '%i = (f32[8,100]{1,0}, s8[4096]{0}) custom-call(%ring), custom_call_target="mine"',
            3200,
            3200,
            False,
        ),
        (
            "%i = (f32[8,100]{1,0}, f32[16,100]{1,0}) all-gather-start(%ring), replica_groups={{0,1}}",
            3200,
            6400,
            False,
        ),
        ("%i = f32[8,100]{1,0} negate(%ring)", 3200, 3200, False),
    ],
)
def test_an_instruction_outside_fusions_moves_its_operands_and_results(
    instruction, read, written, moves
):
    text = PLAIN.replace("INSTRUCTION", instruction)
    assert of_entry(text) == Moved(read, written)
    module = Module(text)
    assert Work(module).only_moves(module.named("main")["i"]) is moves


def test_what_fills_copies_or_masks_computes_nothing():
    def only_moves(inside: str) -> bool:
        module = Module(fusion(PARAMETERS + inside, ALL, RING))
        return Work(module).only_moves(module.named("main")["fused"])

    # the place may be computed
    moved = "  %n = s32[] add(%i, %i)\n  ROOT %u = f32[8,100]{1,0} dynamic-update-slice(%r, %v, %n, %zero)"
    assert only_moves(moved)
    assert not only_moves(
        moved.replace("%v, %n", "%w, %n").replace(
            "  ROOT", "  %w = f32[1,100]{1,0} negate(%v)\n  ROOT"
        )
    )


PRODUCTS = """
HloModule jit_step, is_scheduled=true

%gemm (a: bf16[100,30], b: bf16[30,20]) -> bf16[100,20] {
  %a = bf16[100,30]{1,0} parameter(0)
  %b = bf16[30,20]{1,0} parameter(1)
  ROOT %d = bf16[100,20]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%layers (c: (s32[], bf16[100,30])) -> (s32[], bf16[100,30]) {
  %c = (s32[], bf16[100,30]{1,0}) parameter(0)
  %x = bf16[100,30]{1,0} get-tuple-element(%c), index=1
  %w = bf16[30,20]{1,0} constant({...})
  %y = bf16[100,20]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  ROOT %out = (s32[], bf16[100,30]{1,0}) tuple(%i, %x)
}

%until (c: (s32[], bf16[100,30])) -> pred[] {
  %c = (s32[], bf16[100,30]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%tick (c: (s32[], bf16[100,30])) -> (s32[], bf16[100,30]) {
  %c = (s32[], bf16[100,30]{1,0}) parameter(0)
  %x = bf16[100,30]{1,0} get-tuple-element(%c), index=1
  %up = (bf16[100,30]{1,0}, bf16[100,30]{1,0}) collective-permute-start(%x), source_target_pairs={{1,0}}
  %loop = (s32[], bf16[100,30]{1,0}) while(%c), condition=%until, body=%layers, backend_config={"known_trip_count":{"n":"5"}}
  %came = bf16[100,30]{1,0} collective-permute-done(%up)
  %down = (bf16[100,30]{1,0}, bf16[100,30]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %filled = bf16[1000,300]{1,0} broadcast(%zero), dimensions={}
  %went = bf16[100,30]{1,0} collective-permute-done(%down)
  %product = (bf16[20,100]{1,0}, s8[64]{0}) custom-call(%y, %x), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %y = bf16[20,30]{1,0} constant({...})
  ROOT %out = (s32[], bf16[100,30]{1,0}) tuple(%i, %x)
}

ENTRY %main (p: bf16[100,30]) -> bf16[100,30] {
  %p = bf16[100,30]{1,0} parameter(0)
  %w = (s32[], bf16[100,30]{1,0}) while(%t), condition=%until, body=%tick, backend_config={"known_trip_count":{"n":"7"}}
  %q = bf16[2,16,512,64]{3,1,2,0} constant({...})
  %att = (bf16[2,16,512,64]{3,1,2,0}, f32[2,16,512]{2,1,0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxTARGET", backend_config={"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "16", "512", "512"]}, "mask_type": "MASK"}
  ROOT %r = bf16[100,30]{1,0} copy(%p)
}
"""
ONE = 2 * 100 * 30 * 20
SCORES = 2 * (2 * 16 * 512 * 512) * 64


def test_products_are_counted_through_fusions_loops_and_libraries():
    module = Module(PRODUCTS)
    work = Work(module)
    assert work.flops("layers", module.named("layers")["y"]) == ONE
    assert work.products("tick") == 5 * ONE + ONE
    assert work.flops("main", module.named("main")["w"]) == 7 * 6 * ONE
    # gathered weights and other operands of a loop are counted in its body, not where it stands
    assert work.moved("main", module.named("main")["w"]) == Moved()


@pytest.mark.parametrize(
    ("target", "mask", "products"),
    [
        ("", "NO_MASK", 2),
        ("", "CAUSAL", 1),
        ("Backward", "NO_MASK", 5),
        ("Backward", "CAUSAL", 2.5),
    ],
)
def test_attention_of_cudnn_has_its_products_and_a_causal_mask_halves_them(
    target, mask, products
):
    module = Module(PRODUCTS.replace("TARGET", target).replace("MASK", mask))
    assert Work(module).flops("main", module.named("main")["att"]) == products * SCORES


def test_a_message_travels_under_what_stands_between_its_start_and_its_done():
    up, down = Work(Module(PRODUCTS)).issued("collective-permute")
    assert (up.op.name, up.body, up.bytes, up.loops, up.flops) == (
        "up",
        "tick",
        6000,
        (7,),
        5 * ONE,
    )
    assert (down.op.name, down.flops) == ("down", 0), "a fill is no product"
    assert not list(Work(Module(PRODUCTS)).issued("all-gather"))


def test_a_message_that_is_waited_for_at_once_travels_under_nothing():
    started = "(bf16[100,30]{1,0}, bf16[100,30]{1,0}) collective-permute-start"
    text = PRODUCTS.replace(started, "bf16[100,30]{1,0} collective-permute").replace(
        "collective-permute-done", "copy"
    )
    assert [
        (m.bytes, m.flops) for m in Work(Module(text)).issued("collective-permute")
    ] == [
        (6000, 0),
        (6000, 0),
    ]


def test_a_compiled_loop_over_slots_moves_slots_not_the_ring():
    def step(ring: jax.Array, x: jax.Array) -> jax.Array:
        def turn(ring: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.dynamic_update_index_in_dim(
                ring, ring[i] * 2 + x, i, 0
            ), None

        return jax.lax.scan(turn, ring, np.arange(6))[0]

    shapes = (
        jax.ShapeDtypeStruct((6, 1000), np.float32),
        jax.ShapeDtypeStruct((1000,), np.float32),
    )
    text = jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()
    module = Module(text)
    _, (body, loops) = module.bodies()
    slot = Work(module).total(body).bytes
    assert loops == (6,)
    # one fusion cuts the slot out, the next reads it and x and puts it back; the rest are places
    assert 5 * 4000 <= slot <= 5 * 4000 + 100


def test_of_a_conditional_the_dearest_branch_counts():
    def step(once, x):
        return jax.lax.cond(once, lambda x: x @ x, lambda x: x @ x @ x, x)

    given = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((16, 16), np.float32)
    work = Work(Module(jax.jit(step).lower(*given).compile().as_text()))
    assert work.products(work.module.entry) == 2 * 2 * 16**3
