"""Drafts change no token: a step takes two where the draft is what the model chooses, and one where it is not."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import build_for, config
from golden import GOLDEN
from refusals import refused, tells
from tiny_models import hugging_face

import meshtrain as mt
from meshtrain.checkpoint import Checkpointer
from meshtrain.config import ConfigError
from meshtrain.generate.__main__ import main
from meshtrain.generate.drafting import Drafting
from meshtrain.generate.programs import Decoding
from meshtrain.generate.request import Sampling
from meshtrain.reader import Model

LENGTH = 32
VOCABULARY = 31
SIZES = {
    "layers": 2,
    "d_model": 32,
    "heads": 4,
    "d_ff": 48,
    "vocab_size": VOCABULARY,
    "mtp": 1,
}
MLA = {"q_rank": 12, "kv_rank": 16, "nope": 8, "rope": 4, "value": 6}
MOE = {"experts": 4, "top_k": 2, "d_ff": 16, "shared_experts": 1, "router": "sigmoid"}
DENSE_FIRST = {"d_ff": None, "dense_d_ff": 48, "dense_layers": 1}
MODELS = {
    "plain": {"kv_heads": 2, "tied_head": True},
    "latent": {**DENSE_FIRST, "mla": MLA, "moe": MOE, "mtp": 2},
    "learned positions, window": {
        "family": "gpt2",
        "max_positions": LENGTH,
        "window": 5,
    },
}
MESHES = {"one": {}, "data 2, tensor 2": {"data": 2, "tensor": 2}}
PROMPTS = {0: [3, 5, 8, 2], 2: [7], 3: [n * 3 % VOCABULARY for n in range(17)]}
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=5)


def program_of(name, mesh="one", **more):
    settings = mt.load(
        {
            "model": SIZES | MODELS[name] | more,
            "mesh": MESHES[mesh],
            "train": {"global_batch_size": 16, "sequence_length": LENGTH},
            "optimizer": {
                "learning_rate": 1e-2,
                "schedule": "constant",
                "warmup_steps": 0,
            },
        }
    )
    return mt.Program(settings, mt.make_mesh(settings))


@cache
def trained(name):
    """Weights that have learned to add three, and that now and then another number comes."""
    program = program_of(name)
    state = program.init()
    random = np.random.default_rng(0)
    for _ in range(15):
        steps = np.where(random.random((16, LENGTH + 1)) < 0.15, 5, 3)
        text = (
            random.integers(VOCABULARY, size=(16, 1)) + np.cumsum(steps, axis=1)
        ) % VOCABULARY
        rows = text.astype(np.int32)
        batch = program.place({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
        state, _ = program.train_step(state, batch)
    return jax.tree.map(np.asarray, program.layout.canonical(state.params))


def model_of(name, mesh="one"):
    program = program_of(name, mesh)
    layout = program.layout
    live = layout.live(jax.tree.map(jnp.asarray, trained(name)))
    return Model(program, layout.map(lambda w, x: x, live), 0, GOLDEN)


def texts_of(run, sampling, damage=lambda state: state):
    """Returns the texts behind PROMPTS, which begin one step after the other, and for each draft whether it was right."""
    state = run.empty()
    waiting = list(PROMPTS)
    texts = {slot: [] for slot in PROMPTS}
    right = {slot: [] for slot in PROMPTS}
    while waiting or min(len(PROMPTS[s]) + len(texts[s]) for s in PROMPTS) < LENGTH:
        if waiting:
            slot = waiting.pop(0)
            state, picked = run.prefill(state, slot, np.array(PROMPTS[slot]), sampling)
            texts[slot].append(int(picked.tokens))
        state, picked = run.decode(damage(state))
        for slot in set(PROMPTS) - set(waiting):
            tokens = np.asarray(picked.tokens)[slot].reshape(-1)
            if picked.accepted is not None:
                right[slot].append(bool(picked.accepted[slot]))
                tokens = tokens[: 1 + right[slot][-1]]
            texts[slot] += tokens.tolist()
    return {s: text[: LENGTH - len(PROMPTS[s])] for s, text in texts.items()}, right


@cache
def undrafted(name):
    return Decoding(model_of(name), 4, LENGTH)


@cache
def drafted(name, mesh="one"):
    return Drafting(model_of(name, mesh), 4, LENGTH)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_drafts_of_which_some_are_right(name, mesh):
    for sampling in (GREEDY, DRAWN):
        texts, right = texts_of(drafted(name, mesh), sampling)
        assert texts == texts_of(undrafted(name), sampling)[0]
        checked = np.concatenate(list(right.values()))
        assert checked.mean() > 0.1
        # drawn tokens are often others than the drafts
        assert sampling == GREEDY or checked.mean() < 1


@pytest.mark.thorough
def test_a_wrong_draft_is_never_taken_and_leaves_nothing_behind():
    random = np.random.default_rng(1)

    def damage(state):
        other = random.integers(VOCABULARY, size=4).astype(np.int32)
        return state._replace(drafts=jax.device_put(other, state.drafts.sharding))

    for sampling in (GREEDY, DRAWN):
        texts, right = texts_of(drafted("plain"), sampling, damage)
        assert texts == texts_of(undrafted("plain"), sampling)[0]
        assert np.concatenate(list(right.values())).mean() < 0.15


@pytest.mark.thorough
def test_log_probabilities_are_those_without_drafts():
    chosen = []
    for run in (undrafted("plain"), drafted("plain")):
        state, first = run.prefill(run.empty(), 1, np.array(PROMPTS[0]), GREEDY)
        rows = [[float(first.logprobs), *np.asarray(first.likeliest_ids)[:3]]]
        while len(rows) < 12:
            state, picked = run.decode(state, likeliest=True)
            of_slot = [np.asarray(x)[1] for x in picked if x is not None]
            if picked.accepted is None:
                of_slot = [x[None] for x in of_slot] + [False]
            _, logprobs, ids, _, accepted = of_slot
            rows += [[logprobs[k], *ids[k][:3]] for k in range(1 + accepted)]
        chosen.append(rows[:12])
    np.testing.assert_allclose(*chosen, atol=1e-5)


# --- commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one step, of a model of bytes that predicts a token more."""
    settings = config(
        tmp_path_factory.mktemp("runs") / "mine", model={"layers": 2, "mtp": 1}
    )
    program = build_for(settings)
    checkpointer = Checkpointer(settings, program)
    checkpointer.save(3, program.init(), 1.0)
    checkpointer.wait()
    checkpointer.close()
    return settings.run.directory


@pytest.mark.thorough
def test_the_command_says_how_many_drafts_were_accepted_and_steps_saved(run, capsys):
    words = [run, "--prompt", "some words", "--prompt", "a", "--tokens", "9"]
    assert main(words) == 0
    plain = capsys.readouterr()
    assert main([*words, "--draft"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out and plain.err in drafted.err
    sentence = drafted.err.removeprefix(plain.err)
    assert tells(sentence, "drafts accepted", "in the place of")
    numbers = re.findall(r"\d+(?:\.\d+)?", sentence)
    accepted, drafts, share, steps, instead = map(float, numbers)
    assert drafts == steps and share == pytest.approx(100 * accepted / drafts, abs=0.06)
    assert steps <= instead <= 16 and instead - steps <= accepted


@pytest.mark.thorough
def test_a_model_without_the_layer_is_refused_in_a_sentence(tmp_path, capsys):
    model = hugging_face(tmp_path / "tiny")
    sentence = refused(main, capsys, str(model), "--prompt", "x", "--draft")
    assert tells(sentence, "draft ... model.mtp is 0")


def test_linear_attention_is_refused_which_cannot_forget_a_draft():
    pattern = ["linear", "full"]
    sizes = {"linear": {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6}}
    program = program_of("plain", pattern=pattern, **sizes)
    with pytest.raises(ConfigError, match="linear attention"):
        Drafting(Model(program, None, 0, GOLDEN), 4, LENGTH)
