"""What linear attention remembers of ragged prompts goes on as the whole text would."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.model import LinearConfig
from meshtrain.generate.linear_cache import DecodeMix, PromptMix, no_memory
from meshtrain.model.attention import Heads
from meshtrain.model.collectives import Collectives
from meshtrain.model.linear_attention import Kernels, mixed

LINEAR = LinearConfig(
    key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv=4, chunk=8
)
LENGTH = 24
HEADS = (2, 8), (2, 8), (4, 6)


def drawn(kind: str):
    draw = np.random.default_rng(0).standard_normal
    of = lambda *shape: jnp.asarray(draw(shape), jnp.float32)
    qkv = Heads(*(of(2, LENGTH, *heads) for heads in HEADS))
    decays = (4, 8) if kind == "kda" else (4,)
    kernels = Kernels(
        Heads(*(of(4, *heads) for heads in HEADS)), of(4) - 2, of(*decays)
    )
    beta = of(2, LENGTH, 4)
    if kind == "mamba2":
        beta = None
        # its queries and keys are of no norm
        qkv = Heads(*(x / 4 for x in qkv))
        kernels = kernels._replace(
            biases=Heads(*(of(*heads) for heads in HEADS)), skip=of(4)
        )
    return qkv, beta, of(2, LENGTH, *decays), kernels


@pytest.mark.parametrize(
    "kind",
    [
        "gated_delta",
        *(pytest.param(k, marks=pytest.mark.thorough) for k in ("kda", "mamba2")),
    ],
)
def test_a_prompt_and_then_tokens_give_what_the_whole_text_gives(kind):
    *tokens, kernels = drawn(kind)
    want = jax.jit(
        partial(mixed, chunk=8, collectives=Collectives(), segments_BT=None)
    )(*tokens, kernels)
    cut = lambda rows, columns: jax.tree.map(lambda x: x[rows, columns], tokens)

    @jax.jit
    def read(tokens, length):
        prompt = PromptMix(8, length[None])
        return prompt(*tokens, kernels), prompt.cache

    @jax.jit
    def decoded(tokens, cache):
        decode = DecodeMix(cache)
        return decode(*tokens, kernels), decode.cache

    cache = no_memory(LINEAR, 2, jnp.float32)
    lengths = [2, 13]  # one shorter than the convolution
    for slot, length in enumerate(lengths):
        out, memory = read(
            cut(slice(slot, slot + 1), slice(0, 16)), jnp.asarray(length)
        )
        np.testing.assert_allclose(out[0, :length], want[slot, :length], atol=1e-5)
        cache = cache.put(memory, jnp.asarray(slot), jnp.asarray(length))
    for more in range(8):
        both = [
            cut(slice(s, s + 1), slice(n + more, n + more + 1))
            for s, n in enumerate(lengths)
        ]
        out, cache = decoded(jax.tree.map(lambda *x: jnp.concatenate(x), *both), cache)
        for slot, length in enumerate(lengths):
            np.testing.assert_allclose(
                out[slot, 0], want[slot, length + more], atol=1e-5
            )
