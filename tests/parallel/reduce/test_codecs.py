"""Codecs in blocks against others in NumPy, one number after the other, by the definition of each format; top-k, alone
and with feedback.
"""

import dataclasses
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closing import Closing
from covering import thorough_but

from meshtrain.compression import codec_of
from meshtrain.config.reduce import ReduceConfig
from meshtrain.parallel.reduce.codecs import TopK

NAMES = ("bfloat16", "float8", "int8", "int4")
LARGEST = {"float8": 448.0, "int8": 127.0, "int4": 7.0}
FLOAT_MAX = float(np.finfo(np.float32).max)


def codec(name, block=256):
    return codec_of(
        dataclasses.replace(ReduceConfig(feedback=False), compression=name, block=block)
    )


def through(name, rows, block=256):
    """What arrives of rows, and what was sent."""
    chosen = codec(name, block)
    sent = jax.jit(chosen.encode)(rows)
    return np.asarray(
        jax.jit(lambda s: chosen.decode(s, rows.shape[1]))(sent)
    ), np.asarray(sent)


def rows_of(k, n=3, seed=0):
    """Of very different sizes, block by block and number by number."""
    draw = np.random.default_rng(seed)
    return (draw.standard_normal((n, k)) * 10.0 ** draw.integers(-6, 4, (n, k))).astype(
        np.float32
    )


def e4m3_numbers():
    """Every number of the OCP's e4m3, by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F is
    NaN.
    """
    found = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        found.append(
            (mantissa / 8) * 2.0**-6
            if exponent == 0
            else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
    return np.array(found)


E4M3 = e4m3_numbers()


def nearest_e4m3(x):
    """The nearest of them, of two the one whose last bit is 0."""
    distance = np.abs(E4M3 - abs(x))
    best = np.flatnonzero(distance == distance.min())
    return np.copysign(E4M3[best[best % 2 == 0][0] if len(best) > 1 else best[0]], x)


def half_even(x):
    """A whole number, of two as near the even one; Python's own rounding."""
    return float(round(float(x)))


def nearest_bfloat16(x):
    """The upper 16 bits of a float32, rounded to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    upper, lower = bits >> 16, bits & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper & 1)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


def reference(name, rows, block):
    """The decoded numbers, by loops."""
    out = np.empty_like(rows)
    for i, row in enumerate(rows):
        for start in range(0, len(row), block):
            part = row[start : start + block]
            if name == "bfloat16":
                out[i, start : start + block] = [nearest_bfloat16(x) for x in part]
                continue
            scale = np.abs(part).max() * np.float32(1 / LARGEST[name])
            rounded = nearest_e4m3 if name == "float8" else half_even
            out[i, start : start + block] = [
                np.float32(rounded(np.float32(x / scale))) * scale if scale else 0.0
                for x in part
            ]
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("k", "block"), [(64, 16), (77, 16), (33, 256), (1, 16), (256, 256)]
)
def test_a_codec_is_its_format_number_by_number(name, k, block):
    rows = rows_of(k)
    np.testing.assert_array_equal(
        through(name, rows, block)[0], reference(name, rows, block)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 2, 255, 256, 257, 1000])
def test_as_many_bytes_are_sent_as_the_sizes_say_without_padding_to_a_block(name, k):
    sent = through(name, rows_of(k))[1]
    assert sent.dtype == np.uint8
    assert sent.shape == (3, codec(name).nbytes(k))
    values = {"bfloat16": 2 * k, "float8": k, "int8": k, "int4": (k + 1) // 2}[name]
    assert codec(name).nbytes(k) == values + (
        0 if name == "bfloat16" else 4 * -(-k // 256)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_at_most_half_a_step(name):
    rows = rows_of(1000)
    arrived = through(name, rows)[0]
    error, size = (
        np.abs(arrived.astype(np.float64) - rows),
        np.abs(rows.astype(np.float64)),
    )
    largest = np.stack(
        [np.abs(rows[:, s : s + 256]).max(axis=1) for s in range(0, 1000, 256)], axis=1
    )
    largest = np.repeat(largest, 256, axis=1)[:, :1000].astype(np.float64)
    # Half a step of each format, and what float32 loses of scale, quotient and product.
    half = {
        "bfloat16": size * 2.0**-8,
        "float8": np.maximum(size * 2.0**-4, largest / 448 * 2.0**-10),
        "int8": largest / 127 / 2,
        "int4": largest / 7 / 2,
    }[name]
    assert (error <= half * (1 + 1e-4) + largest * 2.0**-22).all()
    assert error.max() > 0.1 * half.max(), "something was lost, so the bound is one"


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zero_and_signs_are_kept(name):
    rows = np.array([[0.0, -0.0, 1.0, -1.0] * 8, [0.0] * 32, [-0.0] * 32], np.float32)
    arrived = through(name, rows, 16)[0]
    np.testing.assert_array_equal(arrived, rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_leaves_other_blocks_alone(name, bad):
    rows = rows_of(64)
    rows[1, 20] = bad
    arrived = through(name, rows, 16)[0]
    assert not np.isfinite(arrived[1, 20])
    there = np.ones_like(rows, bool)
    there[1, 16:32] = False
    np.testing.assert_array_equal(
        arrived[there], reference(name, np.where(np.isfinite(rows), rows, 0), 16)[there]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_numbers_arrive_and_those_that_are_no_normal_ones_do_no_harm(name):
    huge = np.full((1, 16), FLOAT_MAX / 2, np.float32)
    huge[0, 3] *= -1
    np.testing.assert_allclose(through(name, huge, 16)[0], huge, rtol=1e-2)
    largest = through(name, np.full((1, 16), FLOAT_MAX, np.float32), 16)[0]
    assert ((largest >= FLOAT_MAX * 0.99) | np.isnan(largest)).all(), (
        "an overflow is not hidden"
    )
    small = np.array([[1e-45, -1e-40, 1e-38, 0.0] * 4], np.float32)
    arrived = through(name, small, 16)[0]
    assert np.isfinite(arrived).all()
    assert np.abs(arrived - small).max() <= 448 * np.finfo(np.float32).tiny


def test_int4_has_fifteen_levels():
    rows = np.linspace(-7, 7, 15, dtype=np.float32)[None]
    np.testing.assert_array_equal(through("int4", rows, 16)[0], rows)


# --- top-k

RATIO = 0.05


def largest(row, ratio):
    """The row with all but its largest numbers zero."""
    k = max(1, round(ratio * row.size))
    chosen = np.argsort(-np.abs(row), kind="stable")[:k]
    out = np.zeros_like(row)
    out[chosen] = row[chosen]
    return out


SHAPES = [(3, 7, 0.3), (1, 1, 0.01), (4, 1000, 0.01), (2, 257, 1.0)]


@pytest.mark.parametrize(
    "shape", thorough_but(SHAPES, SHAPES[:1].__contains__), ids=str
)
def test_the_largest_arrive_as_they_are_and_the_others_as_zero(shape):
    rows, k, ratio = shape
    codec, x = (
        TopK(ratio),
        np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32),
    )
    sent = codec.encode(jnp.asarray(x))
    assert sent.dtype == jnp.uint8
    assert sent.shape == (rows, codec.nbytes(k)) == (rows, 8 * max(1, round(ratio * k)))
    assert np.array_equal(codec.decode(sent, k), [largest(row, ratio) for row in x])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_always_sent(bad):
    """Else a loss scale would see no overflow, and the residual would keep it for ever."""
    x = np.full((1, 100), 1e30, np.float32)
    x[0, 63] = bad
    arrived = np.asarray(TopK(0.01).decode(TopK(0.01).encode(jnp.asarray(x)), 100))
    assert not np.isfinite(arrived[0, 63])


@pytest.mark.thorough
def test_five_steps_with_feedback_are_those_of_numpy():
    made, random = (
        Closing({"data": 4}, {"compression": "topk", "ratio": RATIO}),
        np.random.default_rng(1),
    )
    owed = {
        name: np.zeros((4, *w.whole), np.float32)
        for name, w in made.weights.items()
        if w.decayed
    }
    assert owed
    for _ in range(5):
        gradients = made.draw(random)
        sums, _ = made.close(gradients)
        for name, residual in owed.items():
            weight, total = (
                made.weights[name],
                np.zeros(made.weights[name].whole, np.float64),
            )
            for rank in range(4):
                given = gradients[name][rank, 0, 0] + residual[rank]
                padding = [
                    (0, m - n) for n, m in zip(weight.whole, weight.padded, strict=True)
                ]
                parts = np.split(np.pad(given, padding), 4, axis=weight.zero_dim)
                sent = np.concatenate(
                    [
                        largest(part.reshape(-1), RATIO).reshape(part.shape)
                        for part in parts
                    ],
                    axis=weight.zero_dim,
                )[tuple(slice(n) for n in weight.whole)]
                residual[rank] = given - sent
                total += sent
            np.testing.assert_allclose(
                sums[name], total, rtol=1e-6, atol=1e-6, err_msg=name
            )
    flat = jax.tree.leaves(made.kept.residual, is_leaf=lambda x: x is None)
    for name, x in zip(made.weights, flat, strict=True):
        if x is None:
            assert name not in owed
        else:
            np.testing.assert_array_equal(np.asarray(x), owed[name], err_msg=name)
