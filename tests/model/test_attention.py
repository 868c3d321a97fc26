"""Every way to attention computes the whole square's softmax, for every length, grouping and packing."""

import contextlib
import importlib
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import thorough_but
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from meshtrain.compat import residuals
from meshtrain.compat_kernels import describe_gpu
from meshtrain.model import attention, fused
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.kernels import BLOCK, BLOCKS, attention_kernel
from meshtrain.model.products import linear


def attend(q: jax.Array, *others: Any, **named: Any) -> jax.Array:
    return attention.attend(q, *others, **named).reshape(*q.shape[:3], -1)


def full(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: np.ndarray | None,
    window: int = 0,
    scale: float = 0.0,
    cap: float = 0.0,
    causal: bool = True,
) -> jax.Array:
    """Softmax over the whole [T, T] square of each head."""
    length, heads = q.shape[1:3]
    k, v = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (k, v))
    allowed = np.tril(np.ones((length, length), bool), 0 if causal else length)[
        None, None
    ]
    if window:
        allowed = (
            allowed & ~np.tril(np.ones((length, length), bool), -window)[None, None]
        )
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    return jnp.einsum(
        "bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v
    )


def graded(run, cotangent, *given):
    """Output and gradients of `run`."""
    out, vjp = jax.vjp(run, *given)
    return out, *vjp(cotangent)


def assert_same(run, other, cotangent, *given) -> None:
    """Both compute the same output and gradients."""
    found, right = (
        jax.jit(partial(graded, f))(cotangent, *given) for f in (run, other)
    )
    for i, (x, y) in enumerate(zip(found, right, strict=True)):
        np.testing.assert_allclose(x, y, atol=3e-5 if i else 3e-6)


def numbers(
    length: int, heads: int, groups: int, width: int = 8, values: int = 0
) -> tuple[jax.Array, ...]:
    """Queries, keys, values and a cotangent; values are as wide as keys unless given."""
    widths = (width, width, values or width, values or width)
    shapes = [
        (2, length, *of)
        for of in zip((heads, groups, groups, heads), widths, strict=True)
    ]
    random = np.random.default_rng(length)
    return tuple(jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes)


# length, heads, groups, window
SQUARES = [
    (1, 2, 2, 0),
    (7, 4, 1, 0),
    (7, 4, 1, 3),
    (BLOCK - 1, 2, 1, 0),
    (BLOCK, 4, 2, 0),
    (BLOCK, 2, 2, BLOCK),
    (BLOCK + 1, 3, 3, 0),
    (BLOCK + 1, 3, 1, 1),
    (2 * BLOCK + 5, 6, 2, 0),
    (2 * BLOCK + 5, 6, 2, 50),
    (BLOCKS * BLOCK + 3, 2, 1, 0),
    (BLOCKS * BLOCK + 3, 2, 1, 2 * BLOCK + 1),
]
# The shortest; grouped and packed; a window of one block; a query over; several blocks with all of it.
NOW_SQUARES = {(*SQUARES[i], i % 2 == 1) for i in (0, 1, 5, 6, 9)}
# One query short of a block, a window of one, many blocks with a window.
FEW_SQUARES = {(*SQUARES[i], i % 2 == 0) for i in (3, 7, 11)}


@pytest.mark.parametrize(
    "case",
    thorough_but(
        [(*s, p) for s in SQUARES for p in (False, True)],
        NOW_SQUARES.__contains__,
        FEW_SQUARES,
    ),
    ids=str,
)
def test_output_and_gradients_are_those_of_the_full_square(case):
    length, heads, groups, window, packed = case
    q, k, v, cotangent = numbers(length, heads, groups)
    segments = (
        np.sort(np.random.default_rng(0).integers(0, 3, (2, length)), axis=1)
        if packed
        else None
    )

    def blockwise(q, k, v):
        return attend(
            q,
            k,
            v,
            None if segments is None else jnp.asarray(segments),
            Collectives(),
            window=window,
        )

    assert_same(
        blockwise, lambda q, k, v: full(q, k, v, segments, window), cotangent, q, k, v
    )


@pytest.mark.parametrize(
    "length, packed, how",
    [
        pytest.param(1, False, {}, marks=pytest.mark.thorough),
        pytest.param(17, False, {}, marks=pytest.mark.slow),
        pytest.param(
            BLOCK + 69, False, {}, marks=pytest.mark.thorough
        ),  # a class token and 14 x 14 patches
        (2 * BLOCK + 5, True, {"scale": 0.7, "cap": 1.5}),
    ],
)
def test_both_ways_every_query_sees_every_key(length, packed, how):
    q, k, v, cotangent = numbers(length, 4, 2)
    segments = np.random.default_rng(0).integers(0, 3, (2, length)) if packed else None

    def blockwise(q, k, v):
        return attend(
            q,
            k,
            v,
            None if segments is None else jnp.asarray(segments),
            Collectives(),
            causal=False,
            **how,
        )

    assert_same(
        blockwise,
        lambda q, k, v: full(q, k, v, segments, causal=False, **how),
        cotangent,
        q,
        k,
        v,
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_window_has_no_use_both_ways(platform):
    q, k, v, _ = numbers(7, 2, 2)
    with pytest.raises(ValueError, match="both ways"):
        attend(q, k, v, None, On(platform), window=3, causal=False)


@pytest.mark.thorough
@pytest.mark.parametrize("local", [None, True, False])
def test_scores_are_scaled_and_capped_and_the_device_says_whether_the_window_counts(
    local,
):
    q, k, v, cotangent = numbers(2 * BLOCK + 5, 4, 2)
    how, window = {"scale": 0.7, "cap": 1.5}, 0 if local is False else 50

    def blockwise(q, k, v):
        sees = None if local is None else jnp.full((), local)
        return attend(q, k, v, None, Collectives(), window=50, local=sees, **how)

    assert_same(
        blockwise,
        lambda q, k, v: full(q, k, v, None, window, **how),
        cotangent,
        q,
        k,
        v,
    )


@pytest.mark.thorough
def test_no_query_sees_a_later_key():
    q, k, v, _ = numbers(BLOCK + 9, 2, 1)
    gradient = jax.jit(
        jax.grad(lambda v, at: attend(q, k, v, None, Collectives())[:, at].sum())
    )
    for at in (0, BLOCK - 1, BLOCK, BLOCK + 5):
        seen = np.abs(gradient(v, at)).sum((0, 2, 3)) > 0
        assert seen.tolist() == [s <= at for s in range(BLOCK + 9)]


def test_no_query_sees_further_back_than_the_window():
    q, k, v, _ = numbers(BLOCK + 9, 2, 1)
    gradient = jax.jit(
        jax.grad(
            lambda v, at: attend(q, k, v, None, Collectives(), window=20)[:, at].sum()
        )
    )
    for at in (0, 19, 20, BLOCK, BLOCK + 5):
        seen = np.abs(gradient(v, at)).sum((0, 2, 3)) > 0
        assert seen.tolist() == [at - 20 < s <= at for s in range(BLOCK + 9)]


@pytest.mark.thorough
def test_keys_before_the_window_of_a_block_are_never_multiplied():
    q, k, v, _ = numbers(8 * BLOCK, 1, 1)
    runs = [
        partial(attend, segments_BT=None, collectives=Collectives(), window=window)
        for window in (0, BLOCK)
    ]
    whole, near = (
        jax.jit(run).lower(q, k, v).compile().cost_analysis()["flops"] for run in runs
    )
    # a block of queries meets its own keys and, but for the first, those before: 15 blocks of 36
    assert near / whole == pytest.approx(15 / 36, rel=0.1)


def test_scores_beyond_the_block_of_a_query_are_never_computed():
    """n blocks compute (n+1)/2n of the square's multiplications."""
    blocks = 8
    q, k, v, _ = numbers(blocks * BLOCK, 1, 1)
    cost = (
        jax.jit(lambda q, k, v: attend(q, k, v, None, Collectives()))
        .lower(q, k, v)
        .compile()
        .cost_analysis()
    )
    square = (
        jax.jit(lambda q, k, v: full(q, k, v, None))
        .lower(q, k, v)
        .compile()
        .cost_analysis()
    )
    assert cost["flops"] / square["flops"] == pytest.approx(
        (blocks + 1) / (2 * blocks), rel=0.1
    )


def test_probabilities_are_kept_for_the_backward_pass_under_no_remat_policy():
    q, k, v, _ = numbers(BLOCK, 2, 1)
    run = lambda q, k, v: attend(q, k, v, None, Collectives())
    for layer in (
        run,
        jax.checkpoint(run, policy=jax.checkpoint_policies.everything_saveable),
    ):
        kept = jax.tree.leaves(
            jax.eval_shape(
                lambda *given, layer=layer: jax.vjp(layer, *given)[1], q, k, v
            )
        )
        assert kept and not any(a.shape[-2:] == (BLOCK, BLOCK) for a in kept)


def test_bfloat16_keeps_its_dtype_and_softmax_its_precision():
    q, k, v, _ = numbers(BLOCK + 3, 4, 2)
    out = jax.jit(lambda *given: attend(*given, None, Collectives()))(
        *(a.astype(jnp.bfloat16) for a in (q, k, v))
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32),
        jax.jit(partial(full, segments=None))(q, k, v),
        atol=0.1,
    )


def test_scores_of_float16_do_not_overflow():
    q, k, v, _ = (100 * a for a in numbers(16, 2, 2))
    out = jax.jit(lambda *given: attend(*given, None, Collectives()))(
        *(a.astype(jnp.float16) for a in (q, k, v))
    )
    assert jnp.isfinite(out).all()


@pytest.mark.thorough
def test_dropped_probabilities_still_sum_to_one_on_average():
    q, k, v, _ = numbers(32, 2, 2)
    dropout = Dropout(0.3, jax.random.key(0), jnp.arange(2))
    sums = jnp.stack(
        [
            attend(q, k, jnp.ones_like(v), None, Collectives(), dropout.at(i))
            for i in range(20)
        ]
    )
    assert float(sums.std()) > 0.1
    np.testing.assert_allclose(sums.mean(), 1, atol=0.02)


@pytest.mark.parametrize(
    "platform, dtype, width, length, packed, dropout, kernel",
    [
        ("gpu capped", "bfloat16", 64, 100, False, False, "fused"),
        ("tpu capped", "bfloat16", 64, 384, False, False, "splash"),
        ("gpu", "bfloat16", 64, 100, False, False, "cudnn"),
        ("gpu", "float16", 60, 100, False, False, "fused"),
        ("gpu", "bfloat16", 256, 100, False, False, "fused"),
        ("gpu", "float32", 64, 100, False, False, "fused"),
        ("gpu", "bfloat16", 64, 100, True, False, "fused"),
        ("gpu", "bfloat16", 64, 100, False, True, "fused"),
        ("gpu", "bfloat16", 320, 100, False, False, "blocks"),
        ("tpu", "bfloat16", 64, 384, True, False, "splash"),
        ("tpu", "bfloat16", 64, 100, False, False, "blocks"),
        ("tpu", "bfloat16", 80, 384, False, False, "blocks"),
        ("tpu", "bfloat16", 64, 384, False, True, "blocks"),
        ("cpu", "float32", 64, 384, True, True, "blocks"),
    ],
)
def test_the_kernel_follows_from_platform_dtype_shape_packing_and_dropout(
    platform, dtype, width, length, packed, dropout, kernel
):
    platform, _, capped = platform.partition(" ")
    assert (
        attention_kernel(platform, dtype, width, length, packed, dropout, bool(capped))
        == kernel
    )


class On(Collectives):
    """One of two tensor ranks on an accelerator."""

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def first_head(self, heads: int) -> jax.Array:
        return jax.lax.axis_index("tensor") * heads


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas kernels as plain JAX, on any device."""
    call = pallas.pallas_call
    monkeypatch.setattr(
        pallas,
        "pallas_call",
        lambda *given, **keys: call(*given, **{**keys, "interpret": True}),
    )


def on_mesh(platform, segments, dropout_rate, how, q, k, v, cotangent):
    """Output and gradients of attention whose sequences are shared over `data`, its heads over `tensor`."""

    def local(q, k, v, cotangent, segments, rows):
        dropout = Dropout(dropout_rate, jax.random.key(3), rows)
        run = lambda q, k, v: attend(q, k, v, segments, On(platform), dropout, **how)
        out, vjp = jax.vjp(run, q, k, v)
        return out, *vjp(cotangent)

    heads, rows = P("data", None, "tensor"), jnp.arange(2)
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    of_rows = (None if segments is None else P("data"), P("data"))
    mapped = partial(
        jax.shard_map,
        local,
        mesh=mesh,
        in_specs=(heads,) * 4 + of_rows,
        out_specs=heads,
    )
    given = (q, k, v, cotangent, segments, rows)
    jax.eval_shape(mapped(check_vma=True), *given)
    # Pallas' interpreter has no types of mesh axes for what a kernel computes its places from.
    return jax.jit(mapped(check_vma=False))(*given)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "platform, length, heads, groups, width, dtype, documents, dropout, window",
    [
        pytest.param(
            "gpu", 131, 4, 2, 24, "float32", 3, 0.0, 0, marks=pytest.mark.slow
        ),
        ("gpu", 70, 2, 2, 16, "bfloat16", 0, 0.3, 0),
        ("gpu", 64, 6, 2, 16, "float32", 40, 0.3, 0),
        ("gpu", 259, 4, 2, 16, "float32", 3, 0.3, 65),
        pytest.param(
            "tpu", 128, 4, 2, 64, "float32", 3, 0.0, 0, marks=pytest.mark.slow
        ),
        pytest.param(
            "tpu", 384, 4, 2, 64, "float32", 3, 0.0, 130, marks=pytest.mark.slow
        ),
        (
            "gpu",
            100,
            2,
            2,
            16,
            "float32",
            0,
            0.0,
            {"window": 40, "cap": 1.5, "scale": 0.7, "local": True},
        ),
        (
            "tpu",
            256,
            2,
            2,
            64,
            "float32",
            3,
            0.0,
            {"window": 130, "cap": 1.5, "scale": 0.2, "local": False},
        ),
        ("gpu", 131, 4, 2, 16, "float32", 3, 0.3, {"causal": False, "cap": 1.5}),
        ("tpu", 256, 2, 2, 64, "float32", 3, 0.0, {"causal": False}),
        ("gpu", 70, 4, 2, 24, "float32", 3, 0.3, {"values": 16}),
        ("gpu", 70, 2, 2, 16, "bfloat16", 0, 0.3, {"values": 40}),
        ("tpu", 128, 2, 2, 64, "float32", 3, 0.0, {"values": 48}),
    ],
)
def test_kernels_of_accelerators_compute_what_blocks_do(
    interpreted,
    platform,
    length,
    heads,
    groups,
    width,
    dtype,
    documents,
    dropout,
    window,
):
    """Inside a mesh, where types are right too; and dropout drops the same."""
    how = window if isinstance(window, dict) else {"window": window}
    values = how.get("values", 0)
    given = [a.astype(dtype) for a in numbers(length, heads, groups, width, values)]
    segments = None
    if documents:  # ids in no order, of which one returns
        ids = np.random.default_rng(1).permutation(documents)
        lengths = np.sort(
            np.random.default_rng(2).integers(0, documents, (2, length)), axis=1
        )
        segments = jnp.asarray(
            np.where(np.arange(length) < length - 3, ids[lengths], ids[0]), jnp.int32
        )
    how = {
        key: jnp.asarray(value) if key == "local" else value
        for key, value in how.items()
        if key != "values"
    }
    for found, right in zip(
        *(on_mesh(p, segments, dropout, how, *given) for p in (platform, "cpu")),
        strict=True,
    ):
        assert found.dtype == right.dtype
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (found, right)),
            atol=1e-5 if dtype == "float32" else 0.06,
        )


@pytest.mark.thorough
@pytest.mark.parametrize("how", [{}, {"window": 40}, {"causal": False}], ids=str)
def test_the_largest_scores_are_the_same_from_a_kernel_and_from_blocks(
    interpreted, how
):
    q, k, v, _ = numbers(131, 4, 2, 24)
    segments = jnp.asarray(np.arange(131)[None] // 50 + np.zeros((2, 1)), jnp.int32)
    counted = jnp.arange(131) < jnp.asarray([[131], [70]])
    collectives = Collectives()
    rows, largest = attention.attend(
        q, k, v, segments, collectives, counted=counted, **how
    )
    collectives.platform = "gpu"
    of_kernel = attention.attend(q, k, v, segments, collectives, counted=counted, **how)
    np.testing.assert_allclose(of_kernel[0], rows, atol=1e-5)
    np.testing.assert_allclose(of_kernel[1], largest, rtol=1e-6)
    alone = attention.attend(q, k, v, segments, Collectives(), **how)
    assert np.array_equal(alone, rows)


def test_kernels_that_return_no_largest_scores_are_not_taken_for_them():
    asked = ("bfloat16", 128, 4096, False, False)
    taken = [
        attention_kernel(p, *asked, tops=t)
        for p in ("gpu", "tpu")
        for t in (False, True)
    ]
    assert taken == ["cudnn", "fused", "splash", "blocks"]


def on_accelerator(platform, drops, **how):
    """A layer's attention and the product after it, of heads [1, 256, 4, 64] and two groups, packed where it does not
    drop.
    """
    q, k, v, _ = (a[:1].astype(jnp.bfloat16) for a in numbers(256, 4, 2, 64))
    segments = None if drops or platform == "gpu" else jnp.zeros((1, 256), jnp.int32)
    dropout = (
        Dropout(0.1, jax.random.key(0), jnp.arange(1))
        if drops
        else Dropout(0.0, None, None)
    )
    collectives = Collectives()
    collectives.platform = platform

    def run(q, k, v, weight):
        return linear(
            attention.attend(q, k, v, segments, collectives, dropout, **how), weight
        )

    return run, (q, k, v, jnp.ones((256, 256), jnp.bfloat16))


@pytest.fixture
def described(monkeypatch):
    """A GPU as the planner describes it."""
    for module, name in (
        ("cudnn.fused_attention_stablehlo", "check_cudnn_version"),
        ("pallas.triton.gpu_info", "get_gpu_info"),
    ):
        with contextlib.suppress(ImportError):  # the second is not there before 0.12
            module = importlib.import_module(f"jax._src.{module}")
            # So that it is put back
            monkeypatch.setattr(module, name, getattr(module, name))
    describe_gpu((9, 8, 0))


KERNELS = [("gpu", False), ("gpu", True), ("tpu", False)]


@pytest.mark.thorough
@pytest.mark.parametrize("platform, drops", KERNELS)
def test_output_is_kept_once(described, platform, drops):
    run, given = on_accelerator(platform, drops)
    kept: list[jax.Array] = []
    jax.eval_shape(
        lambda *given: kept.extend(residuals(jax.vjp(run, *given)[1])), *given
    )
    # besides what it is given: the output as the next product keeps it, and a log of sums (and what dropout is drawn
    # from)
    assert [a.shape for a in kept if a.size >= given[0].size] == [(256, 256)]
    assert [a.shape for a in kept if a.dtype == jnp.float32] == [(1, 4, 256)]


ALONE = [(*kernel, None) for kernel in KERNELS]
BY_TURNS = [(*kernel, cap) for kernel in KERNELS for cap in (0.0, 30.0)]


@pytest.mark.thorough
@pytest.mark.parametrize("case", ALONE + BY_TURNS, ids=str)
def test_who_keeps_the_output_runs_no_forward_again(described, case):
    """In the program as it is lowered for the platform, where nothing is of the size of the scores either; with a
    window that counts or does not, of two ways to compute each.
    """
    platform, drops, cap = case

    def lowered(*names):
        policy = jax.checkpoint_policies.save_only_these_names("qkv", *names)

        def step(local, cotangent, *given):
            how = {} if cap is None else {"window": 100, "local": local, "cap": cap}
            run, _ = on_accelerator(platform, drops, **how)
            out, vjp = jax.vjp(jax.checkpoint(run, policy=policy), *given)
            return out, *vjp(cotangent)

        to, (_, given) = (
            ("cuda" if platform == "gpu" else platform,),
            on_accelerator(platform, drops),
        )
        return (
            jax.jit(step)
            .trace(True, given[3], *given)
            .lower(lowering_platforms=to)
            .as_text()
        )

    calls = [
        len(re.findall(r"custom_call @(?!Sharding)", lowered(*names)))
        for names in ((), ("attention",))
    ]
    assert calls[0] - calls[1] == (1 if cap is None else 2)
    assert "256x256xf32" not in lowered()


@pytest.mark.parametrize("causal, mask", [(True, "CAUSAL"), (False, "NO_MASK")])
def test_cudnn_is_asked_for_one_way_or_both(described, causal, mask):
    run, given = on_accelerator("gpu", False, causal=causal)

    text = (
        jax.jit(partial(graded, run))
        .trace(given[3], *given)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    # forward and backward
    assert re.findall(r"mask_type\W+([A-Z_]+)", text.replace("\\22", "")) == [mask] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("platform, drops", KERNELS)
def test_both_ways_every_kernel_is_lowered_for_its_platform(described, platform, drops):
    run, given = on_accelerator(platform, drops, causal=False)
    to = ("cuda" if platform == "gpu" else platform,)
    text = (
        jax.jit(partial(graded, run))
        .trace(given[3], *given)
        .lower(lowering_platforms=to)
        .as_text()
    )
    assert len(re.findall(r"custom_call @(?!Sharding)", text)) == (
        2 if (platform, drops) == ("gpu", False) else 3
    )
    assert "256x256xf32" not in text


def test_a_block_reads_only_what_may_hold_its_documents():
    """Blocks of 4: documents of ids 1, 1 | 2, 2 | 1, 3."""
    segments = jnp.asarray([[1] * 6 + [2] * 6 + [1] * 4 + [3] * 6])
    masks = fused._masks(
        4, 22, attention.MaskArrays(segments, None, None), of_keys=False
    )
    assert masks.first.tolist() == [[0, 0, 1, 0, 4, 4]]
    assert masks.last.tolist() == [[3, 3, 2, 3, 5, 5]]
    earlier = attention.MaskArrays(
        segments, None, None, key_segments=jnp.asarray([[0] * 4 + [1] * 18])
    )
    of_queries, of_keys = (
        fused._masks(4, 22, earlier, of_keys) for of_keys in (False, True)
    )
    assert of_queries.first.tolist()[0][:3] == [1, 1, 0] and of_queries.last.tolist()[
        0
    ][:2] == [
        5,
        5,
    ]
    assert (
        of_keys.first.tolist()[0][1:] == [0] * 5
        and of_keys.last.tolist()[0][1:] == [3] * 5
    )
