"""The batches of a run that learns from its own answers.

step       0 ... S-1        S                S+1              S+2
batch      text             rollout 0        rollout 0        rollout 1        rl.supervised: S, rl.epochs: 2
gap                         checked                           checked

a rollout    weights ─► answers of every group ─► rewards ─► advantages ─► packed rows
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain.config import Config, replaced
from meshtrain.data.loader import Loader
from meshtrain.parallel.forward import ROW_GAPS
from meshtrain.rl.advantages import flat_groups, group_advantages
from meshtrain.rl.prompts import Prompt, Prompts
from meshtrain.rl.rewards import Case, Rewards
from meshtrain.rl.rollouts import Answer, Rollouts
from meshtrain.rl.rows import Learned, pack, rows_needed
from meshtrain.run.hooks import Batch, Row, RunHook
from meshtrain.run.processes import gathered, is_first
from meshtrain.step import Program, State, TrainStep

# Of every step the answers with the best, the worst and the median reward are kept here, for the report.
ANSWERS = "answers.jsonl"
GAPS = "gaps"


class Disagreement(FloatingPointError):
    """Drawing and training give the same tokens other log-probabilities, with the same weights."""


class PolicyProgram(Program):
    """A program that learns from text for the first `rl.supervised` steps, and from its model's answers then."""

    def __init__(self, config: Config, *given: Any, **parts: Any) -> None:
        super().__init__(config, *given, **parts)
        self.supervised: Program | None = None
        if self.config.rl.supervised:
            of_text = replaced(self.config, train={"objective": "next_token"})
            self.supervised = Program(of_text, self.mesh, **parts)

    def step_after(self, taken: int) -> TrainStep:
        if self.supervised is not None and taken < self.config.rl.supervised:
            return self.supervised.train_step
        return super().step_after(taken)


class Answering(RunHook):
    """Draws answers to prompts, has them scored, and makes batches of them; as a hook, it tells of them in rows, and
    ends the run where drawing and training disagree.

    `texts`: batches of text for the first steps. Raises Disagreement.
    """

    def __init__(
        self,
        program: Program,
        prompts: Prompts,
        rewards: Rewards,
        texts: Loader | None,
        directory: Path,
        enter: Callable[[str], None],
    ) -> None:
        config = program.config
        rl = config.rl
        self._program = program
        self._config = config
        self._prompts = prompts
        self._rewards = rewards
        self._texts = texts
        self._directory = directory
        self._enter = enter
        self._rows = rows_needed(config, config.train.global_batch_size, prompts.longest)
        length = prompts.longest + rl.answers
        ranks = program.mesh.size // config.mesh.tensor
        slots = -(-config.train.global_batch_size // ranks) * ranks
        self._rollouts = Rollouts(program, slots, length, rl.answers, rl.temperature, prompts.ends)
        self._held: tuple[int, dict[str, np.ndarray]] | None = None  # a rollout and its batch
        self._told: dict[int, Row] = {}  # what there is to say of a step, until its row comes
        self._fresh: dict[int, dict[str, np.ndarray]] = {}  # batches whose gaps are to be checked
        self._gaps: dict[int, jax.Array] = {}
        self._tokens: dict[int, tuple[int, int]] = {}  # by steps taken, real ones and padding
        self.waited = 0.0

    # --- batches

    def next_batch(self, taken: int, state: State) -> Batch:
        """Returns the batch of the step behind `taken` steps, from which the state comes."""
        supervised = self._config.rl.supervised
        if taken < supervised:
            assert self._texts is not None
            _, batch = next(self._texts)
            return batch
        rollout = (taken - supervised) // self._config.rl.epochs
        if self._held is None or self._held[0] != rollout:
            batch, told = self._draw(rollout, state)
            self._held = rollout, batch
            self._told[taken + 1] = told
            self._fresh[taken + 1] = batch
        batch = self._held[1]
        real = int((batch["segments"] > 0).sum())
        self._tokens[taken] = real, batch["segments"].size - real
        return self._placed(batch)

    def _draw(self, rollout: int, state: State) -> tuple[dict[str, np.ndarray], Row]:
        """Returns a batch of answers drawn by the state's weights, and what there is to say of them."""
        rl = self._config.rl
        began = time.perf_counter()
        self._enter("rollout")
        self._rollouts.synchronise(state.params)
        chosen = self._prompts.chosen(rollout)
        prompts = [self._prompts.all[number] for number in chosen]
        seeds = self._prompts.seeds(rollout, chosen, rl.group)
        answers = self._rollouts.draw([prompt.tokens for prompt in prompts], seeds)
        self._rollouts.free()
        drawn = time.perf_counter()
        self._enter("reward")
        rewards, failed = self._scores(prompts, answers)
        advantages = group_advantages(rewards, rl.scale)
        flat = flat_groups(rewards)
        scored = time.perf_counter()
        learned = [
            Learned(prompt.tokens, answer, np.full(len(answer.tokens), advantage, np.float32))
            for prompt, group, of_group, teaches_nothing in zip(
                prompts, answers, advantages, flat, strict=True
            )
            if not (rl.drop_flat_groups and teaches_nothing)
            for answer, advantage in zip(group, of_group, strict=True)
        ]
        batch = pack(learned, self._config, self._rows)
        every = [answer for group in answers for answer in group]
        told = {
            "rl/reward": float(rewards.mean()),
            "rl/reward_std": float(rewards.std()),
            "rl/flat_groups": float(flat.mean()),
            "rl/answer_tokens": float(np.mean([len(answer.tokens) for answer in every])),
            "rl/ended": float(np.mean([answer.ended for answer in every])),
            "rl/rewards_failed": sum(failed.values()),
            "rl/draw_seconds": drawn - began,
            "rl/reward_seconds": scored - drawn,
        }
        self._keep(rollout, prompts, answers, rewards, advantages)
        return batch, told

    def _scores(
        self, prompts: list[Prompt], answers: list[list[Answer]]
    ) -> tuple[np.ndarray, Counter[str]]:
        """Returns the rewards, float32 [prompts, group], the same on all processes, of which each scores a share."""
        cases = [
            Case(prompt.given, self._text(answer), prompt.record)
            for prompt, group in zip(prompts, answers, strict=True)
            for answer in group
        ]
        processes = jax.process_count()
        scores = self._rewards.score(cases[jax.process_index() :: processes])
        of_all = gathered([scores.values.tolist(), dict(scores.failed)])
        rewards = np.zeros(len(cases), np.float32)
        failed: Counter[str] = Counter()
        for process, (values, kinds) in enumerate(of_all):
            rewards[process::processes] = values
            failed.update(kinds)
        return rewards.reshape(len(prompts), -1), failed

    def _text(self, answer: Answer) -> str:
        tokens = answer.tokens[:-1] if answer.ended else answer.tokens
        return self._prompts.tokenizer.decode(tokens)

    def _placed(self, batch: dict[str, np.ndarray]) -> Batch:
        rows, columns = self._program.part(batch["tokens"].shape)
        own = {name: x[rows] for name, x in batch.items()}
        if columns is not None:
            own = {name: x[:, columns] for name, x in own.items()}
        return self._program.place(own)

    def _keep(
        self,
        rollout: int,
        prompts: list[Prompt],
        answers: list[list[Answer]],
        rewards: np.ndarray,
        advantages: np.ndarray,
    ) -> None:
        """Writes the best, the worst and a median answer of a rollout into the run."""
        if not is_first():
            return
        order = np.argsort(rewards, axis=None, kind="stable")
        kinds = {"worst": order[0], "median": order[len(order) // 2], "best": order[-1]}
        with (self._directory / ANSWERS).open("a", encoding="utf-8") as file:
            for kind, at in kinds.items():
                prompt, sample = divmod(int(at), rewards.shape[1])
                line = {
                    "step": self._config.rl.supervised + rollout * self._config.rl.epochs + 1,
                    "kind": kind,
                    "prompt": prompts[prompt].given,
                    "answer": self._text(answers[prompt][sample]),
                    "reward": float(rewards[prompt, sample]),
                    "advantage": float(advantages[prompt, sample]),
                    "group_rewards": rewards[prompt].tolist(),
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # --- what a run asks of its data

    def tokens(self, k: int) -> int:
        """Returns the tokens of the batch of step k + 1, padding left out."""
        if k in self._tokens:
            return self._tokens[k][0]
        assert self._prompts.texts is not None
        return self._prompts.texts.tokens(k)

    def padding_tokens(self, k: int) -> int:
        """Returns the positions of the batch of step k + 1 that hold no token."""
        if k in self._tokens:
            return self._tokens[k][1]
        assert self._prompts.texts is not None
        return self._prompts.texts.padding_tokens(k)

    def close(self) -> None:
        """Ends the processes of rewards, and what reads text ahead."""
        self._rewards.close()
        if self._texts is not None:
            self._texts.close()

    # --- the hook

    def after_step(self, step: int, compiled: Any, metrics: dict[str, jax.Array]) -> None:
        gaps = metrics.pop(ROW_GAPS, None)
        if gaps is not None:
            self._gaps[step] = gaps

    def after_metrics(self, row: Row, due: bool) -> None:
        step = row["step"]
        row |= self._told.pop(step, {})
        gaps = self._gaps.pop(step, None)
        batch = self._fresh.pop(step, None)
        if (
            gaps is not None
            and batch is not None
            and not row["rl/gap_max"] <= self._config.rl.gap_limit
        ):
            self._end(step, row["rl/gap_max"], np.asarray(gaps), batch)

    def _end(self, step: int, gap: float, gaps: np.ndarray, batch: dict[str, np.ndarray]) -> None:
        """Saves the rows whose log-probabilities disagree, and raises Disagreement."""
        by_row = gaps.reshape(len(batch["tokens"]), -1).max(1)
        wrong = np.flatnonzero(~(by_row <= self._config.rl.gap_limit))
        file = self._directory / GAPS / f"{step}.npz"
        if is_first():
            file.parent.mkdir(exist_ok=True)
            arrays: dict[str, Any] = {name: x[wrong] for name, x in batch.items()}
            np.savez(file, gaps=by_row[wrong], **arrays)
        raise Disagreement(
            f"step {step}: with the same weights the log-probability of a token is {gap:.3g} apart between drawing and "
            f"training, above rl.gap_limit {self._config.rl.gap_limit:g}; the {len(wrong)} rows are in {file}."
        )


def begin_answering(
    program: Program,
    prompts: Prompts,
    start: int,
    loader: Callable[..., Loader],
    directory: Path,
    enter: Callable[[str], None],
) -> Answering:
    """Returns the batches behind step `start`; `loader` reads batches of text ahead, of a program that takes them."""
    assert isinstance(program, PolicyProgram)
    rl = program.config.rl
    texts = None
    if prompts.texts is not None and start < rl.supervised:
        texts = loader(prompts.texts, program.supervised)
    rewards = Rewards([(str(rl.reward), 1.0)], rl.reward_seconds)
    return Answering(program, prompts, rewards, texts, directory, enter)
