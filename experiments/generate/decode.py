"""A decode step beside a plain JAX decode of the same model: one jitted function, a dense cache, all sequences at one
position.

    python -m experiments.generate.decode [small deep wide long]

Both take turns, and the medians are compared. Goal: no more than 1.1 times as long. What else is printed: copies as
large as a layer's cache in the compiled step, of which there must be none, and what stays allocated from step to step,
which must be the same.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench
from experiments.bench import (
    Compared,
    Stepping,
    Table,
    compare,
    config_of,
    spread,
    typical,
)
from meshtrain.generate.programs import Decoding
from meshtrain.generate.request import Sampling
from meshtrain.hlo import Module, byte_count
from meshtrain.reader import Model
from meshtrain.step import Program

GOAL = 1.1
PROMPT = 24
# layers, width, heads, key/value heads, vocabulary, slots, positions
SIZES = {
    "small": (4, 256, 4, 4, 4096, 8, 256),
    "deep": (16, 512, 8, 4, 8192, 8, 512),
    "wide": (4, 1536, 12, 4, 32000, 8, 512),
    "long": (8, 512, 8, 8, 8192, 8, 4096),
}


def model(size: tuple[int, ...]) -> Model:
    layers, width, heads, groups, words, _, length = size
    sizes = dict(
        layers=layers, d_model=width, heads=heads, kv_heads=groups, vocab_size=words
    )
    config = config_of(sizes, {}, 1, length, {"zero_stage": 0}, "float32")
    program = Program(config, masters=False)
    params = jax.jit(
        program.layout.init,
        out_shardings=jax.tree.map(lambda x: x.sharding, program.layout.masters),
    )
    return Model(program, params(jax.random.key(0)), 0, None)  # type: ignore[arg-type]


def plain(model: Model, slots: int, length: int) -> tuple[Callable[..., Any], Any]:
    """The function (state) -> state, and the state before: as short as it can be written, and no slower for that."""
    config = model.config.model
    heads, groups, width, half = (
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.head_dim // 2,
    )
    frequency = config.rope_theta ** (-jnp.arange(half) / half)
    eps = config.norm_eps
    whole = model.params
    layers = [
        jax.tree.map(lambda w, i=i: w[i], whole["blocks"]) for i in range(config.layers)
    ]
    weights = jax.block_until_ready((whole["embedding"], layers, whole["head"]))
    dtype = whole["embedding"]["tokens"].dtype

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return (
            y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps) * scale
        ).astype(x.dtype)

    def turned(x: jax.Array, position: jax.Array) -> jax.Array:
        cos, sin = (f(position * frequency).astype(x.dtype) for f in (jnp.cos, jnp.sin))
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    @partial(jax.jit, donate_argnums=1)
    def step(weights: Any, state: Any) -> Any:
        embedding, layers, head = weights
        tokens, position, cache = state
        x, after = embedding["tokens"][tokens], []
        for w, (keys, values) in zip(layers, cache, strict=True):
            a, m = w["attention"], w["mlp"]
            h = norm(x, w["attention_norm"]["scale"])
            q, k, v = (jnp.einsum("sd,dhk->shk", h, a[name]) for name in "qkv")
            q, k = turned(q, position), turned(k, position)
            keys = jax.lax.dynamic_update_slice(
                keys, k[:, :, None], (0, 0, position, 0)
            )
            values = jax.lax.dynamic_update_slice(
                values, v[:, :, None], (0, 0, position, 0)
            )
            q = q.reshape(slots, groups, heads // groups, width)
            scores = (
                jnp.einsum(
                    "sgrk,sgpk->sgrp", q, keys, preferred_element_type=jnp.float32
                )
                * width**-0.5
            )
            p = jax.nn.softmax(
                jnp.where(jnp.arange(length) <= position, scores, -1e30)
            ).astype(dtype)
            y = jnp.einsum("sgrp,sgpk->sgrk", p, values).reshape(slots, heads, width)
            x = x + jnp.einsum("shk,hkd->sd", y, a["out"])
            h = norm(x, w["mlp_norm"]["scale"])
            x = x + (jax.nn.silu(h @ m["gate"]) * (h @ m["up"])) @ m["down"]
            after.append((keys, values))
        logits = jnp.matmul(
            norm(x, head["norm"]["scale"]),
            head["weight"],
            preferred_element_type=jnp.float32,
        )
        return jnp.argmax(logits, -1).astype(jnp.int32), position + 1, after

    shape = (slots, groups, length, width)
    cache = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in layers]
    return partial(step, weights), (
        jnp.zeros(slots, jnp.int32),
        jnp.int32(PROMPT),
        cache,
    )


class Turn(NamedTuple):
    """What a size came to."""

    times: Compared
    copies: list[str]
    grown: int  # bytes of live arrays
    compiled: int
    parameters: int


def measured(size: tuple[int, ...], rounds: int, steps: int) -> Turn:
    *_, slots, length = size
    of = model(size)
    ours, (theirs, beside) = Decoding(of, slots, length), plain(of, slots, length)
    state = ours.empty()
    for slot in range(slots):
        state, _ = ours.prefill(
            state, slot, np.arange(PROMPT, dtype=np.int32), Sampling()
        )
    kept = state.cache[0].keys.nbytes

    def mine(state: Any) -> tuple[Any, Any]:
        for _ in range(steps):
            state, picked = ours.decode(state)
        return state, picked

    def other(state: Any) -> tuple[Any, Any]:
        for _ in range(steps):
            state = theirs(state)
        return state, state[0]

    step, reference = Stepping(mine, state), Stepping(other, beside)
    compare(reference, step, 1)
    before, compiled = live(), ours.compiled
    times = compare(reference, step, rounds)
    return Turn(
        times,
        copies(ours.lower().compile().as_text() or "", kept),
        live() - before,
        ours.compiled - compiled,
        of.program.layout.parameters,
    )


def live() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def copies(text: str, least: int) -> list[str]:
    """Instructions of a compiled program that copy so many bytes or more."""
    module = Module(text)
    return [
        f"{op.opcode} {op.result}"
        for operations in module.computations.values()
        for op in operations
        if op.opcode in ("copy", "transpose", "convert")
        and byte_count(op.result) >= least
    ]


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("sizes", nargs="*", default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    good = True
    title = (
        f"{jax.devices()[0].device_kind}, float32, medians of {given.rounds} rounds of {given.steps} "
        "steps"
    )
    heads = (
        "weights",
        "slots",
        "positions",
        "ours, ms",
        "plain, ms",
        "ratio             ",
        "processor",
    )
    table = Table(
        "size ",
        *heads,
        "copies of a layer's cache",
        "bytes grown",
        "programs compiled",
        title=title,
    )
    for name in given.sizes:
        size = SIZES[name]
        turn = measured(size, given.rounds, given.steps)
        times, copied, grown, compiled, _ = turn
        good &= (
            float(np.median(times.walls)) <= GOAL
            and not copied
            and grown <= 0
            and not compiled
        )
        ours, plain = (
            f"{1e3 * typical(found).wall / given.steps:.2f}" for found in times
        )
        sizes = [f"{turn.parameters / 1e6:.0f} M", size[5], size[6]]
        checks = [len(copied), grown, compiled]
        table.row(
            name,
            *sizes,
            ours,
            plain,
            spread(times.walls),
            f"{times.processor:.3f}",
            *checks,
        )
        for line in copied:
            print("   ", line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
