"""Rollouts draw what the trainer's own program says, with its log-probabilities, the same answers on every mesh."""

from functools import lru_cache

import jax
import numpy as np
import pytest
from covering import thorough_but

import meshtrain as mt
from meshtrain.compat import varying
from meshtrain.config import ConfigError
from meshtrain.hlo import Module, byte_count
from meshtrain.rl.rollouts import Answer, Rollouts

WORDS = 61
LENGTH, MOST = 32, 10
ENDS = frozenset({3, 5, 8, 13, 21})
GROUP = 3
RANDOM = np.random.default_rng(0)
# a bucket is 16 tokens; the last one leaves room for fewer than MOST
PROMPTS = [RANDOM.integers(0, WORDS, n).astype(np.int32) for n in (1, 5, 16, 17, 26)]
SEEDS = RANDOM.integers(0, 2**32, (len(PROMPTS), GROUP), np.uint32)
MODEL = {
    "layers": 2,
    "d_model": 16,
    "heads": 2,
    "kv_heads": 2,
    "d_ff": 32,
    "vocab_size": WORDS,
}
EXPERTS = {"family": "mixtral", "d_ff": 0, "moe": {"experts": 4, "top_k": 2, "d_ff": 8}}
EACH = {
    "one": {},
    "data 8": {"mesh": {"data": 8}, "parallel": {"zero_stage": 3}},
    "data 2, tensor 2, pipeline 2": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3},
    },
    "context 2": {"mesh": {"data": 2, "context": 2}, "parallel": {"zero_stage": 3}},
    "context 2, pipeline 2, tied": {
        "model": {"tied_head": True, "layers": 3},
        "mesh": {"tensor": 2, "context": 2, "pipeline": 2},
    },
    "experts": {"model": EXPERTS},
    "expert 2": {"model": EXPERTS, "mesh": {"data": 4, "expert": 2}},
    "expert 2, tensor 2, pipeline 2": {
        "model": EXPERTS,
        "mesh": {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
    },
    "LoRA": {
        "mesh": {"data": 2, "tensor": 2},
        "lora": {"rank": 2},
        "parallel": {"zero_stage": 3},
    },
}


class Drawn:
    """A program, its weights, and what rollouts of it draw."""

    def __init__(
        self, name: str, compute: str = "float32", temperature: float = 1.0
    ) -> None:
        given = EACH[name]
        config = mt.load(
            given
            | {
                "model": MODEL | given.get("model", {}),
                "train": {"global_batch_size": 16, "sequence_length": LENGTH},
                "precision": {"compute": compute},
            }
        )
        self.program = mt.Program(config)
        layout = self.program.layout
        shardings = jax.tree.map(lambda x: x.sharding, layout.masters)
        # larger than they begin, so that a token's probability depends on all before it
        larger = lambda key: jax.tree.map(lambda x: 3 * x, layout.init(key))
        self.params = jax.jit(larger, out_shardings=shardings)(jax.random.key(1))
        self.rollouts = Rollouts(self.program, 16, LENGTH, MOST, temperature, ENDS)
        self.rollouts.synchronise(self.params)
        self.answers = self.rollouts.draw(PROMPTS, SEEDS)

    def teacher_forced(self) -> list[np.ndarray]:
        """The log-probability of each token by the losses of labels of the training program."""
        rows = [
            np.concatenate([p, a.tokens])
            for p, of in zip(PROMPTS, self.answers, strict=True)
            for a in of
        ]
        tokens = np.zeros((16, LENGTH + 1), np.int32)
        for row, whole in zip(tokens, rows, strict=False):
            row[: len(whole)] = whole
        program = self.program
        local = program.local
        batch = program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})

        def losses(params, batch):
            batches, _ = local.microbatches(batch)
            weights = local.zero.gather_params(params)
            losses = local._label_losses(local.forward, weights, batches).losses[0]
            others = sorted(varying(losses) - set(program.config.mesh.token_axes()))
            return jax.lax.psum(losses, tuple(others)) if others else losses

        run = jax.shard_map(
            losses,
            mesh=program.mesh,
            in_specs=(program.layout.shards, program.rows),
            out_specs=program.rows,
        )
        found = -np.asarray(jax.jit(run)(self.params, batch))
        if (order := program.column_order(LENGTH)) is not None:
            found = found[:, np.argsort(order)]
        prompts = [p for p in PROMPTS for _ in range(GROUP)]
        return [
            of_row[len(p) - 1 : len(whole) - 1]
            for of_row, p, whole in zip(found, prompts, rows, strict=False)
        ]


drawn = lru_cache(maxsize=None)(Drawn)
USUAL = "data 2, tensor 2, pipeline 2"


def flat(answers: list[list[Answer]]) -> list[Answer]:
    return [answer for group in answers for answer in group]


def check_same(answers: list[list[Answer]], right: list[list[Answer]]) -> None:
    assert [len(group) for group in answers] == [len(group) for group in right]
    for answer, wanted in zip(flat(answers), flat(right), strict=True):
        np.testing.assert_array_equal(answer.tokens, wanted.tokens)
        np.testing.assert_allclose(answer.logprobs, wanted.logprobs, atol=1e-5)
        assert answer.ended is wanted.ended


# --- the gate


@pytest.mark.parametrize("name", thorough_but(list(EACH), lambda _: False, ["one"]))
def test_log_probabilities_are_those_of_the_training_program(name):
    run = drawn(name)
    for answer, right in zip(flat(run.answers), run.teacher_forced(), strict=True):
        np.testing.assert_allclose(answer.logprobs, right, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one", USUAL, "context 2", "expert 2", "LoRA"])
def test_in_bfloat16_they_are_as_close_as_its_numbers(name):
    run = drawn(name, "bfloat16")
    for answer, right in zip(flat(run.answers), run.teacher_forced(), strict=True):
        np.testing.assert_allclose(answer.logprobs, right, atol=2e-2)


@pytest.mark.parametrize(
    "temperature", thorough_but([0.5, 2.0], lambda _: False, [0.5])
)
def test_log_probabilities_are_of_what_is_sampled_from(temperature):
    run = drawn("one", temperature=temperature)
    for prompt, group in zip(PROMPTS, run.answers, strict=True):
        rows = np.zeros((GROUP, LENGTH), np.int32)
        for row, answer in zip(rows, group, strict=True):
            row[: len(prompt) + len(answer.tokens)] = [*prompt, *answer.tokens]
        logits = (
            np.asarray(run.program.logits(run.params, rows), np.float64) / temperature
        )
        right = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for of_row, answer in zip(right, group, strict=True):
            at = len(prompt) - 1 + np.arange(len(answer.tokens))
            np.testing.assert_allclose(
                answer.logprobs, of_row[at, answer.tokens], atol=2e-5
            )


# --- which answers


@pytest.mark.parametrize(
    "name",
    thorough_but(["data 8", USUAL, "context 2"], lambda _: False, [USUAL]),
)
def test_the_same_seeds_draw_the_same_answers_on_every_mesh(name):
    check_same(drawn(name).answers, drawn("one").answers)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["expert 2", "expert 2, tensor 2, pipeline 2"])
def test_they_do_with_experts_too(name):
    check_same(drawn(name).answers, drawn("experts").answers)


@pytest.mark.thorough
def test_an_answer_ends_with_its_first_end_token_or_at_its_length():
    ended = 0
    for prompt, group in zip(PROMPTS, drawn("one").answers, strict=True):
        for answer in group:
            *before, last = answer.tokens.tolist()
            assert not ENDS & set(before)
            assert answer.ended is (last in ENDS)
            assert answer.ended or len(answer.tokens) == min(MOST, LENGTH - len(prompt))
            assert len(answer.tokens) == len(answer.logprobs)
            assert (
                answer.tokens.dtype == np.int32 and answer.logprobs.dtype == np.float32
            )
            assert (answer.logprobs < 0).all()
            ended += answer.ended
    assert 0 < ended < len(PROMPTS) * GROUP


@pytest.mark.thorough
def test_neither_slot_nor_wave_nor_what_runs_beside_changes_an_answer():
    run = drawn("one")
    # groups are split over waves, and a slot of the last one stays free
    few = Rollouts(run.program, 4, LENGTH, MOST, 1.0, ENDS)
    few.synchronise(run.params)
    check_same(few.draw(PROMPTS, SEEDS), run.answers)


@pytest.mark.thorough
def test_groups_of_one_and_prompts_in_another_order_get_the_same():
    run = drawn(USUAL)
    turned = run.rollouts.draw(PROMPTS[::-1], SEEDS[::-1, :1])
    check_same(turned[::-1], [group[:1] for group in run.answers])


# --- the program


@pytest.mark.thorough
def test_other_weights_are_drawn_from_once_they_are_synchronised_and_nothing_is_compiled():
    run = drawn("one")
    rollouts = Rollouts(run.program, 16, LENGTH, MOST, 1.0, ENDS)
    rollouts.synchronise(jax.tree.map(lambda x: x / 2, run.params))
    other = rollouts.draw(PROMPTS, SEEDS)
    assert any(
        a.tokens.tolist() != b.tokens.tolist()
        for a, b in zip(flat(other), flat(run.answers), strict=True)
    )
    programs = rollouts.resharding.program, rollouts._program
    rollouts.synchronise(run.params)
    check_same(rollouts.draw(PROMPTS, SEEDS), run.answers)
    assert [program._cache_size() for program in programs] == [1, 1]


def test_a_wave_is_one_program_that_reads_each_prompt_once_a_rank_and_copies_no_cache():
    rollouts = drawn("one").rollouts
    (wave,) = rollouts._waves(PROMPTS, SEEDS)
    assert wave.prompts.shape == (len(PROMPTS), LENGTH)
    program = Module(
        rollouts._program.lower(rollouts.weights, wave).compile().as_text()
    )
    bodies = [
        op.attributes.split("body=%")[1].split(",")[0]
        for operations in program.computations.values()
        for op in operations
        if op.opcode == "while" and f"[{16},{MOST}]" in op.result
    ]
    least = 4 * 16 * MODEL["kv_heads"] * LENGTH * 8
    copies = [
        op
        for body in bodies
        for op in program.computations[body]
        if op.opcode in ("copy", "transpose") and byte_count(op.result) >= least
    ]
    assert len(bodies) == 1 and not copies


# --- what is refused


def test_what_cannot_be_drawn_is_refused_in_a_sentence():
    run = drawn("one")
    with pytest.raises(ConfigError, match=r"answers of 32 tokens .* legal are 1 to 31"):
        Rollouts(run.program, 16, LENGTH, LENGTH, 1.0, ENDS)
    for prompt, says in (
        (np.zeros(0, int), r"prompt of 0 tokens .* 1 to 31"),
        (np.zeros(LENGTH, int), r"prompt of 32 tokens .* 1 to 31"),
        (np.array([2, WORDS]), "token 61"),
    ):
        with pytest.raises(ConfigError, match=says):
            run.rollouts.draw([PROMPTS[0], prompt], SEEDS[:2])


@pytest.mark.thorough
def test_slots_that_the_ranks_cannot_share_and_islands_are_refused():
    program = drawn(USUAL).program
    with pytest.raises(
        ConfigError, match=r"6 slots .* data 2 x pipeline 2; give a multiple"
    ):
        Rollouts(program, 6, LENGTH, MOST, 1.0, ENDS)
    islands = mt.Program(mt.load({"model": MODEL, "mesh": {"data": 4, "islands": 2}}))
    with pytest.raises(ConfigError, match=r"mesh\.islands is 2"):
        Rollouts(islands, 8, LENGTH, MOST, 1.0, ENDS)
