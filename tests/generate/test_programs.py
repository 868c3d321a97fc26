"""Reading from a cache gives what reading it all again gives: for every family, on every mesh, whatever runs in the
slots beside.
"""

from itertools import cycle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import thorough_but
from golden import FAMILIES, GOLDEN

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.generate import programs
from meshtrain.generate.held import KINDS, is_rounded, multiplied, note, round_weights
from meshtrain.generate.held import held as held_in
from meshtrain.generate.programs import Decoding, taken_over
from meshtrain.generate.request import Sampling
from meshtrain.hf.peft import ADAPTER_CONFIG as ADAPTER
from meshtrain.hf_families import CONFIG, model_section, read_json
from meshtrain.hlo import Module, byte_count, collectives
from meshtrain.parallel.layout import Layout
from meshtrain.reader import Model, read_model
from meshtrain.step import Program
from meshtrain.units import size

WORDS = 45
GREEDY = Sampling()
LENGTH = 40
RANDOM = np.random.default_rng(3)
# shorter than a bucket and than the windows of ten; longer than both
SHORT, LONG = RANDOM.integers(0, WORDS, 5), RANDOM.integers(0, WORDS, 19)
MESHES = {
    "one": {},
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "data 2, tensor 2": {"data": 2, "tensor": 2},
}
# slots lie over all axes but tensor
SPLIT = {
    "data 2, tensor 2, pipeline 2": {"data": 2, "tensor": 2, "pipeline": 2},
    "context 2, tensor 2": {"context": 2, "tensor": 2},
}


def mesh_of(name: str):
    return mt.make_mesh(mt.load({"mesh": (MESHES | SPLIT)[name]}))


def decoding(
    family: str, mesh: str = "one", slots: int = 4, adapter=None, **more
) -> Decoding:
    model = read_model(GOLDEN / family, mesh=mesh_of(mesh), adapter=adapter)
    return Decoding(model, slots, LENGTH, **more)


def told(
    run: Decoding,
    prompts: dict[int, np.ndarray],
    steps: int,
    sampling=GREEDY,
    state=None,
):
    """The tokens of prompts in slots, which join one step after the other, and the log-probabilities of each [steps, V]
    by id.

    By slot; every program told of all the vocabulary.
    """
    state = run.empty() if state is None else state
    tokens, logprobs = ({slot: [] for slot in prompts} for _ in range(2))

    def note(slot, picked, at):
        chosen, _, ids, of_ids = (np.asarray(x)[at] for x in picked[:4])
        tokens[slot].append(int(chosen))
        by_id = np.full(WORDS, np.nan, np.float32)
        by_id[ids] = of_ids
        logprobs[slot].append(by_id)

    waiting = list(prompts)
    while waiting or min(map(len, tokens.values())) < steps:
        if waiting:
            slot = waiting.pop(0)
            state, picked = run.prefill(state, slot, prompts[slot], sampling)
            note(slot, picked, ())
        state, picked = run.decode(state, likeliest=True)
        for slot in set(prompts) - set(waiting):
            note(slot, picked, slot)
    return {s: t[:steps] for s, t in tokens.items()}, {
        s: np.stack(x[:steps]) for s, x in logprobs.items()
    }


@pytest.fixture
def whole_vocabulary(monkeypatch):
    monkeypatch.setattr(programs, "MOST_LIKELY", WORDS)


def check_cached(family: str, mesh: str, adapter=None, kind=None):
    model = read_model(GOLDEN / family, adapter=adapter)
    if kind:
        round_weights(model, kind)
    check_beside(model, decoding(family, mesh, adapter=adapter, kind=kind))


def check_beside(model: Model, run: Decoding):
    prompts = {3: SHORT, 0: LONG}
    tokens, logprobs = told(run, prompts, 20)
    rows = np.zeros((2, LENGTH), np.int32)
    for row, (slot, prompt) in zip(rows, prompts.items(), strict=True):
        row[: len(prompt) + 20] = [*prompt, *tokens[slot]]
    right = np.asarray(jax.nn.log_softmax(model(rows)))
    for of_row, (slot, prompt) in zip(right, prompts.items(), strict=True):
        at = slice(len(prompt) - 1, len(prompt) + 19)
        np.testing.assert_allclose(logprobs[slot], of_row[at], atol=2e-5)
        np.testing.assert_array_equal(tokens[slot], np.argmax(logprobs[slot], axis=1))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gemma2", marks=pytest.mark.thorough),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_cached_logits_are_those_of_all_read_again_at_every_position(
    family, whole_vocabulary
):
    check_cached(family, "data 2, tensor 2")


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "mesh"), [("kda", "tensor 2"), ("mamba2", "one")])
def test_every_rule_of_linear_attention_goes_on_as_the_whole_text_does(
    kind, mesh, whole_vocabulary
):
    linear = {
        "kind": kind,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 8,
        "value_dim": 6,
    }
    sizes = {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 24, "vocab_size": WORDS}
    model = sizes | {
        "pattern": ["linear", "full"],
        "linear": linear | {"chunk": 8},
        "init_std": 0.3,
    }

    def on(mesh: str) -> Model:
        program = Program(mt.load({"model": model, "mesh": MESHES[mesh]}))
        return Model(program, program.init().params, 0, Path())

    check_beside(on("one"), Decoding(on(mesh), 4, LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"), list(zip(FAMILIES, cycle(["one", "tensor 4"]), strict=False))
)
def test_cached_logits_are_those_of_all_read_again_for_every_family(
    family, mesh, whole_vocabulary
):
    check_cached(family, mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", SPLIT)
def test_a_training_mesh_decodes_with_its_slots_over_all_axes_but_tensor(
    mesh, whole_vocabulary
):
    check_cached("llama3", mesh)


@pytest.mark.parametrize(
    "family", thorough_but(["llama3", "qwen3", "gpt2"], lambda _: False, ["llama3"])
)
def test_adapters_count_in_every_step(family, whole_vocabulary):
    adapter = GOLDEN / f"{family}_lora"
    adapter = adapter if (adapter / ADAPTER).exists() else adapter / "after"
    check_cached(family, "tensor 2", adapter)


# --- weights in 8 bits


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "mesh", "kind"),
    [
        ("llama3", "tensor 2", "int8"),
        ("mixtral", "data 2, tensor 2", "float8"),
        ("gpt_oss", "tensor 2", "int8"),
        ("gpt2", "tensor 4", "float8"),
        ("qwen3", "one", "int8"),
    ],
)
def test_held_in_8_bits_it_says_what_the_rounded_model_says_on_every_mesh(
    family, mesh, kind, whole_vocabulary
):
    check_cached(family, mesh, kind=kind)


@pytest.mark.thorough
def test_a_model_that_is_loaded_again_runs_what_was_compiled_for_it_and_no_other_does():
    kept, prompt = {}, {0: SHORT}
    first, again, other = (
        decoding("llama3"),
        decoding("llama3"),
        decoding("llama3", slots=2),
    )
    first.reuse(kept)
    right = told(first, prompt, 4)[0]
    for run in (again, other):
        run.reuse(kept)
    assert (first.compiled, again.compiled) == (2, 0) and again.is_compiled(
        ("decode", True)
    )
    assert not other.is_compiled(("decode", True))
    first.free()
    assert told(again, prompt, 4)[0] == right and again.compiled == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_stand_beside_a_base_in_8_bits(kind, whole_vocabulary):
    check_cached("llama3", "tensor 2", GOLDEN / "llama3_lora" / "after", kind)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama3", "mixtral"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("int8", "float32"), ("float8", "bfloat16")]
)
def test_products_in_8_bits_take_a_quarter_or_a_half_of_the_bytes(family, kind, dtype):
    model = read_model(GOLDEN / family, precision=dtype, masters=False)
    of = {
        name: taken_over(model, Layout(model.config, model.program.mesh), True, name)
        for name in (None, kind)
    }
    wide, narrow = (
        jax.tree.leaves(of[name], is_leaf=is_rounded) for name in (None, kind)
    )
    held = [(x, q) for x, q in zip(wide, narrow, strict=True) if is_rounded(q)]
    names = 7 * model.config.model.layers
    assert len(held) == names, "seven weights of each layer"
    for x, q in held:
        assert (
            q.values.nbytes * jnp.dtype(dtype).itemsize == x.nbytes
            and q.scale.nbytes <= 4 * x.size // x.shape[-2]
        )
        error = np.abs(np.float32(multiplied(q, jnp.float32)) - np.float32(x))
        # half a step of int8, a sixteenth of e4m3's own number and of its least normal one
        most = (
            q.scale / 2
            if kind == "int8"
            else np.abs(np.float32(x)) / 16 + q.scale * 2.0**-10
        )
        assert (error <= most * 1.001).all() and error.max() > 0
    rest = [(x, q) for x, q in zip(wide, narrow, strict=True) if not is_rounded(q)]
    assert all((np.asarray(x) == np.asarray(q)).all() for x, q in rest)
    now, before = (
        sum(x.nbytes for x in jax.tree.leaves(of[name])) for name in (kind, None)
    )
    assert (
        note(kind, of[kind], dtype)
        == f"weights held in {kind} take {size(now)} in place of {size(before)} in {dtype}."
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_stay_so(kind):
    x = jnp.array([[1.0, jnp.inf, jnp.nan], [2.0, 1.0, 1.0]])
    wide = np.asarray(multiplied(held_in(kind, x, (0, 1)), jnp.float32))
    assert np.isfinite(wide).all(axis=0).tolist() == [True, False, False]
    assert (
        np.asarray(multiplied(held_in(kind, jnp.zeros((2, 2)), (0, 1)), jnp.float32))
        == 0
    ).all()


@pytest.mark.thorough
def test_what_is_rounded_once_more_is_the_same():
    x = jax.random.normal(jax.random.key(0), (64, 32)).astype(jnp.bfloat16)
    for kind in KINDS:
        once = multiplied(held_in(kind, x, (0, 1)), jnp.bfloat16)
        assert (once == multiplied(held_in(kind, once, (0, 1)), jnp.bfloat16)).all()


def check_greedy(run: Decoding, family: str):
    """The texts that transformers wrote."""
    right = np.load(GOLDEN / family / "generated.npy")
    prompts = np.random.default_rng(0).integers(0, WORDS, (2, 48))[:, :16]
    state, found = run.empty(), []
    for slot, prompt in enumerate(prompts):
        state, picked = run.prefill(state, slot + 1, prompt, Sampling())
        found.append([int(picked.tokens)])
    while len(found[0]) < right.shape[1]:
        state, picked = run.decode(state)
        for text, token in zip(found, np.asarray(picked.tokens)[1:], strict=False):
            text.append(int(token))
    np.testing.assert_array_equal(found, right)


@pytest.fixture(scope="module")
def four() -> Decoding:
    """The same model as `eight` on data 2 x tensor 2."""
    return decoding("llama3", "data 2, tensor 2")


@pytest.mark.thorough
def test_greedy_says_what_transformers_says(four):
    check_greedy(four, "llama3")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "mesh"), list(zip(FAMILIES, cycle(reversed(MESHES)), strict=False))
)
def test_greedy_says_what_transformers_says_for_every_family(family, mesh):
    check_greedy(decoding(family, mesh), family)


# --- slots


@pytest.fixture(scope="module")
def eight() -> Decoding:
    """Of three layers on one device, for what needs no mesh."""
    return decoding("llama3", slots=8)


@pytest.fixture(scope="module")
def prompts() -> dict[int, np.ndarray]:
    return {
        slot: np.random.default_rng(slot).integers(0, WORDS, 3 + 2 * slot)
        for slot in range(8)
    }


DRAWN = Sampling(temperature=1.5, top_k=30, seed=11)


@pytest.mark.thorough
def test_eight_sequences_that_join_one_after_the_other_get_what_each_gets_alone_bit_for_bit(
    eight, prompts
):
    tokens, logprobs = told(eight, prompts, 10, DRAWN)
    for slot in (0, 3, 7):
        alone, of_alone = told(eight, {slot: prompts[slot]}, 10, DRAWN)
        assert alone[slot] == tokens[slot]
        np.testing.assert_array_equal(of_alone[slot], logprobs[slot])


@pytest.mark.thorough
def test_it_does_not_matter_which_slot(eight, prompts):
    first, other = (told(eight, {slot: prompts[5]}, 10, DRAWN) for slot in (1, 6))
    assert first[0][1] == other[0][6]
    np.testing.assert_allclose(first[1][1], other[1][6], atol=1e-5)


@pytest.mark.thorough
def test_nothing_of_a_slots_last_sequence_stays_not_even_what_is_no_number(
    eight, prompts
):
    right, of_right = told(eight, {2: prompts[2]}, 10)
    state = eight.empty()
    state = state._replace(
        cache=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.cache)
    )
    found, of_found = told(eight, {2: prompts[2]}, 10, state=state)
    assert found == right
    np.testing.assert_array_equal(of_found[2], of_right[2])


@pytest.mark.thorough
def test_a_seed_draws_the_same_on_every_mesh(eight, four):
    texts = []
    for run in (eight, four):
        state, picked = run.prefill(run.empty(), 1, SHORT, DRAWN)
        texts.append([int(picked.tokens)])
        for _ in range(8):
            state, picked = run.decode(state)
            texts[-1].append(int(picked.tokens[1]))
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_a_slot_that_runs_past_its_end_harms_no_other(eight, prompts):
    right, of_right = told(eight, {4: prompts[4]}, 10)
    state, _ = eight.prefill(eight.empty(), 0, np.arange(LENGTH) % WORDS, Sampling())
    for _ in range(3):
        state, _ = eight.decode(state, likeliest=True)
        assert int(state.positions[0]) == LENGTH - 1
    found, of_found = told(eight, {4: prompts[4]}, 10, state=state)
    assert found == right
    np.testing.assert_array_equal(of_found[4], of_right[4])


# --- the compiled programs


@pytest.mark.thorough
def test_decode_writes_into_the_cache_that_it_is_given_and_nothing_grows(
    eight, prompts
):
    state, _ = eight.prefill(eight.empty(), 0, prompts[0], Sampling())
    state, _ = eight.decode(state)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.cache)]
    compiled, held = eight.compiled, len(jax.live_arrays())
    for _ in range(5):
        state, picked = eight.decode(state)
        del picked
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.cache)] == where
    assert eight.compiled == compiled and len(jax.live_arrays()) <= held


def test_prompts_of_one_bucket_share_a_program(eight):
    assert [eight.bucket(n) for n in (1, 16, 17, 32, 33, 40)] == [
        16,
        16,
        32,
        32,
        40,
        40,
    ]
    state, _ = eight.prefill(eight.empty(), 0, np.arange(17), Sampling())
    compiled = eight.compiled
    state, _ = eight.prefill(
        state, 1, np.arange(30), Sampling(temperature=1.0, seed=2**40)
    )
    assert eight.compiled == compiled


@pytest.mark.thorough
def test_no_copy_of_a_cache_is_made(eight):
    least = eight.empty().cache[0].keys.nbytes
    text = eight.lower().compile().as_text()
    found = [
        f"{op.opcode} {op.result}"
        for operations in Module(text).computations.values()
        for op in operations
        if op.opcode in ("copy", "transpose") and byte_count(op.result) >= least
    ]
    assert not found


@pytest.mark.thorough
def test_tensor_ranks_send_two_sums_a_layer_one_of_the_embedding_and_the_logits():
    run = decoding("gemma2", "data 2, tensor 2")
    model = run.config.model
    sent = collectives(run.lower().compile(), run.mesh)
    slots, share = run.slots // 2, -(-WORDS // 2)
    sums = [4 * slots * model.d_model] * (2 * model.layers + 1)
    assert sorted((c.axis, c.kind, c.bytes) for c in sent if c.axes) == sorted(
        [("tensor", "all-reduce", n) for n in sums]
        + [("tensor", "all-gather", 4 * slots * 2 * share)]
    )


# --- what it holds, and what it refuses


@pytest.mark.thorough
def test_weights_are_taken_over_in_the_dtype_that_computes():
    model = read_model(GOLDEN / "llama3", masters=False, precision="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    run = Decoding(model, 2, LENGTH, keep=False)
    assert sum(x.nbytes for x in jax.tree.leaves(run.weights)) == size
    assert all(x.is_deleted() for x in jax.tree.leaves(model.params))
    assert run.empty().cache[0].keys.dtype == jnp.bfloat16


def test_a_position_of_deepseek_v3_is_576_numbers_a_layer():
    """Plain attention keeps 128 heads of 192 numbers in keys, and of 128 in values: 71 times as many."""
    latent = {
        "mla": {"q_rank": 8, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}
    }
    sizes = {"layers": 1, "d_model": 8, "heads": 128, "d_ff": 8, "vocab_size": 16}
    held = {}
    for kind, attention in {
        "latent": latent,
        "plain": {"head_dim": (192 + 128) // 2},
    }.items():
        config = mt.load(
            {"model": sizes | attention, "precision": {"compute": "bfloat16"}}
        )
        program = mt.Program(config)
        state = Decoding(
            Model(program, program.init().params, 0, GOLDEN), 2, 16
        ).empty()
        held[kind] = sum(x.nbytes for x in jax.tree.leaves(state.cache)) / (2 * 16)
    assert held == {"latent": 576 * 2, "plain": 128 * (192 + 128) * 2}


def unread(attention=None, **mesh: int) -> Model:
    """A model whose weights are not asked for."""
    section = model_section(read_json(GOLDEN / "gpt2" / CONFIG), CONFIG)
    config = mt.load(
        {
            "model": section,
            "mesh": mesh,
            "train": {"uneven_batch": "pad", "sequence_length": 48},
        }
    )
    return Model(mt.Program(config, attention=attention), None, 0, GOLDEN)


@pytest.mark.thorough
def test_what_cannot_generate_is_refused_in_a_sentence(eight):
    with pytest.raises(ConfigError, match=r"prompt of 41 tokens .* 1 to 40"):
        eight.prefill(eight.empty(), 0, np.zeros(41, int), Sampling())
    with pytest.raises(ConfigError, match="a prompt of 0 tokens"):
        eight.prefill(eight.empty(), 0, np.zeros(0, int), Sampling())
    with pytest.raises(ConfigError, match="the model has learned 64"):
        Decoding(unread(), 2, 65)
    with pytest.raises(ConfigError, match="0 slots"):
        Decoding(unread(), 0, 16)
    with pytest.raises(ConfigError, match="2 slots cannot be shared by pipeline 3"):
        Decoding(unread(pipeline=3), 2, 16)
    with pytest.raises(ConfigError, match=r"mesh\.islands is 2"):
        Decoding(unread(data=2, islands=2), 2, 16)
    with pytest.raises(ConfigError, match="3 slots cannot be shared by data 2"):
        Decoding(unread(data=2), 3, 16)
    mine = lambda q, k, v, segments, collectives, dropout: q.reshape(
        -1, q.shape[2] * q.shape[3]
    )
    with pytest.raises(ConfigError, match="knows of no cache"):
        Decoding(unread(attention=mine), 2, 16)
