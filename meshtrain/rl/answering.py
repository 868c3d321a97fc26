"""The batches of a run that learns from its own answers.

    step       0 ... S-1        S                S+1              S+2
    batch      text             rollout 0        rollout 0        rollout 1        rl.supervised: S, rl.epochs: 2
    gap                         checked                           checked

    a rollout    weights ─► answers of every group ─► rewards ─► advantages ─► packed rows

With `rl.lag: 1` the next rollout is drawn before a step, so that its rewards are computed while the step runs:

    step       S                           S+1                         S+2
    drawn      rollouts 0 and 1            rollout 2                   rollout 3
    learned    rollout 0                   rollout 1, one step old     rollout 2, one step old

Rollouts that are still to be learned from when a checkpoint is written are kept beside it (`waiting/`): the weights
that drew them are gone.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from meshtrain.config import Config, replaced
from meshtrain.config.rl import reward_terms
from meshtrain.data.loader import Loader
from meshtrain.errors import say
from meshtrain.parallel.forward import ROW_GAPS
from meshtrain.rl import waiting
from meshtrain.rl.advantages import flat_groups, group_advantages
from meshtrain.rl.episodes import Episode, play
from meshtrain.rl.gate import GapGate
from meshtrain.rl.prompts import Prompts
from meshtrain.rl.rewards import Rewards, RewardScores
from meshtrain.rl.rollouts import Rollouts
from meshtrain.rl.rows import Learned, pack
from meshtrain.rl.teacher import Teacher
from meshtrain.run.directory import ANSWERS
from meshtrain.run.hooks import Batch, Row, RunHook
from meshtrain.run.processes import gathered, is_first
from meshtrain.step import Program, State, TrainStep


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


class Waiting(NamedTuple):
    """A rollout whose answers are being scored."""

    number: int
    groups: list[list[Episode]]
    failed: Counter[str]
    scores: Callable[[], RewardScores]  # of this process's share; waits for them


class LearnedRollout(NamedTuple):
    """A rollout, and what is to be learned from it."""

    number: int
    batch: dict[str, np.ndarray]
    told: Row  # what a row of metrics has of it


class AnswerBatches(RunHook):
    """Draws answers to prompts, has them scored, and makes batches of them; as a hook, it tells of them in rows, and
    ends the run where drawing and training disagree.

    `texts`: batches of text for the first steps. `newest`: the state after the last step. Raises Disagreement.
    """

    def __init__(
        self,
        program: Program,
        prompts: Prompts,
        texts: Loader | None,
        directory: Path,
        enter: Callable[[str], None],
    ) -> None:
        config = program.config
        rl = config.rl
        self.newest: Callable[[], State] | None = None
        self.waited = 0.0
        self._program = program
        self._config = config
        self._prompts = prompts
        self._texts = texts
        self._directory = directory
        self._enter = enter
        self._rewards = Rewards(
            reward_terms(rl.reward), rl.reward_seconds, rl.environment
        )
        ranks = program.mesh.size // config.mesh.tensor
        slots = -(-config.train.global_batch_size // ranks) * ranks
        self._rollouts = Rollouts(
            program, slots, prompts.length, rl.answers, rl.temperature, prompts.ends
        )
        self._teacher = Teacher(program, prompts.length) if rl.teacher else None
        self._gate = GapGate(program, self._rollouts, directory, self._placed)
        # One alone, since the children of rewards are asked by one thread.
        self._thread = ThreadPoolExecutor(1) if rl.lag else None
        self._waiting: dict[int, Waiting] = {}
        self._current: Waiting | None = None
        self._has_drawn = False
        self._held: LearnedRollout | None = None
        self._said: set[str] = set()  # kinds of failures of rewards
        # What there is to say of a step, until its row comes
        self._told: dict[int, Row] = {}
        self._fresh: dict[int, LearnedRollout] = {}  # whose gaps are to be checked
        self._gaps: dict[int, jax.Array] = {}
        # By steps taken, real ones and padding
        self._tokens: dict[int, tuple[int, int]] = {}

    # --- batches

    def next_batch(self, taken: int, state: State) -> Batch:
        """Returns the batch of the step behind `taken` steps, from which the state comes."""
        supervised = self._config.rl.supervised
        if taken < supervised:
            assert self._texts is not None
            _, batch = next(self._texts)
            return batch
        rollout = (taken - supervised) // self._config.rl.epochs
        if self._held is None or self._held.number != rollout:
            self._held, is_fresh = self._rollout(rollout, state)
            if is_fresh:
                self._fresh[taken + 1] = self._held
        self._told[taken + 1] = self._held.told
        batch = self._held.batch
        real = int((batch["segments"] > 0).sum())
        self._tokens[taken] = real, batch["segments"].size - real
        return self._placed(batch)

    def _rollout(self, number: int, state: State) -> tuple[LearnedRollout, bool]:
        """Returns a rollout to be learned from, and whether the state's own weights have drawn it. The next ones
        up to `rl.lag` are drawn too.
        """
        began = time.perf_counter()
        config = self._config
        steps = config.train.steps - config.rl.supervised
        last = min(number + config.rl.lag, -(-steps // config.rl.epochs) - 1)
        missing = [n for n in range(number, last + 1) if n not in self._waiting]
        if missing:
            # The first time the programs that draw are compiled.
            self._enter("rollout" if self._has_drawn else "compile")
            self._rollouts.synchronise(state.params)
            for each in missing:
                self._waiting[each] = self._scored(each, *self._play(each))
            self._rollouts.free()
            self._has_drawn = True
        drawn = time.perf_counter()
        self._enter("reward")
        rollout = self._current = self._waiting.pop(number)
        rewards, failed = self._rewards_of(rollout)
        told = {
            "rl/rewards_failed": sum((rollout.failed + failed).values()),
            "rl/draw_seconds": drawn - began,
            "rl/reward_seconds": time.perf_counter() - drawn,
        }
        return self._learn(rollout, rewards, told), number in missing

    def _learn(
        self, rollout: Waiting, rewards: np.ndarray, told: Row
    ) -> LearnedRollout:
        """Returns the batch of a rollout with its rewards, and adds what there is to tell of it."""
        config = self._config
        advantages = group_advantages(rewards, config.rl.scale)
        answers = [episode for group in rollout.groups for episode in group]
        learned = list(self._learned(rollout.groups, rewards, advantages))
        if config.rl.reward:
            told |= {
                "rl/reward": float(rewards.mean()),
                "rl/reward_std": float(rewards.std()),
                "rl/flat_groups": float(flat_groups(rewards).mean()),
            }
        told |= {
            "rl/answer_tokens": float(
                np.mean([episode.drawn.sum() for episode in answers])
            ),
            "rl/ended": float(np.mean([episode.ended for episode in answers])),
        }
        if self._teacher is not None:
            told["rl/teacher_kl"] = self._learn_from_teacher(self._teacher, learned)
        self._keep(rollout, rewards, advantages)
        return LearnedRollout(
            rollout.number, pack(learned, config, self._prompts.length - 1), told
        )

    def _play(self, rollout: int) -> tuple[list[list[Episode]], Counter[str]]:
        """Returns the episodes of a rollout, by the weights that were synchronised last."""
        numbers = self._prompts.chosen(rollout)
        chosen = [self._prompts.all[number] for number in numbers]
        seeds = self._prompts.seeds(rollout, numbers, self._config.rl.group)
        return play(self._rollouts, self._prompts, self._rewards, chosen, seeds)

    def _learned(
        self,
        groups: Sequence[Sequence[Episode]],
        rewards: np.ndarray,
        advantages: np.ndarray,
    ) -> Iterator[Learned]:
        rl = self._config.rl
        flat = flat_groups(rewards)
        for group, of_group, teaches_nothing in zip(
            groups, advantages, flat, strict=True
        ):
            # A teacher teaches where rewards do not.
            if rl.drop_flat_groups and teaches_nothing and not rl.teacher:
                continue
            for episode, advantage in zip(group, of_group, strict=True):
                each = np.full(len(episode.tokens), advantage, np.float32)
                yield Learned(
                    episode.tokens,
                    episode.drawn,
                    episode.logprobs,
                    each,
                    episode.experts,
                )

    def _learn_from_teacher(
        self, teacher: Teacher, learned: Sequence[Learned]
    ) -> float:
        """Adds what a teacher makes of each token to its advantage; returns the mean distance from it."""
        of_teacher = teacher.logprobs([each.tokens for each in learned])
        total = 0.0
        for each, logprobs in zip(learned, of_teacher, strict=True):
            distance = (each.logprobs[1:] - logprobs)[each.drawn[1:]]
            each.advantages[1:][each.drawn[1:]] -= distance
            total += float(distance.sum())
        return total / max(sum(int(each.drawn.sum()) for each in learned), 1)

    def _scored(
        self, number: int, groups: list[list[Episode]], failed: Counter[str]
    ) -> Waiting:
        """Returns a rollout whose rewards are on their way: with a lag a thread waits for them."""
        cases = [episode.case for group in groups for episode in group]
        own = cases[jax.process_index() :: jax.process_count()]
        if self._thread is None:
            return Waiting(number, groups, failed, partial(self._rewards.score, own))
        return Waiting(
            number, groups, failed, self._thread.submit(self._rewards.score, own).result
        )

    def _rewards_of(self, rollout: Waiting) -> tuple[np.ndarray, Counter[str]]:
        """Returns the rewards, float32 [prompts, group], the same on all processes, of which each scores a share."""
        scores = rollout.scores()
        # of a kind that was not told of before
        for kind, sentence in {**scores.first, **self._rewards.first}.items():
            if kind not in self._said:
                self._said.add(kind)
                say(
                    f"{sentence}; such a call counts as 0, and further ones are in rl/rewards_failed."
                )
        of_all = gathered([scores.values.tolist(), dict(scores.failed)])
        rewards = np.zeros(sum(map(len, rollout.groups)), np.float32)
        failed: Counter[str] = Counter()
        for process, (values, kinds) in enumerate(of_all):
            rewards[process :: len(of_all)] = values
            failed.update(kinds)
        return rewards.reshape(len(rollout.groups), -1), failed

    def _placed(self, batch: dict[str, np.ndarray]) -> Batch:
        rows, columns = self._program.part(batch["tokens"].shape)
        own = {name: x[rows] for name, x in batch.items()}
        if columns is not None:
            own = {name: x[:, columns] for name, x in own.items()}
        return self._program.place(own)

    def _keep(
        self, rollout: Waiting, rewards: np.ndarray, advantages: np.ndarray
    ) -> None:
        """Writes the best, the worst and a median answer of a rollout into the run."""
        if not is_first():
            return
        rl = self._config.rl
        order = np.argsort(rewards, axis=None, kind="stable")
        kinds = {"worst": order[0], "median": order[len(order) // 2], "best": order[-1]}
        with (self._directory / ANSWERS).open("a", encoding="utf-8") as file:
            for kind, at in kinds.items():
                prompt, sample = divmod(int(at), rewards.shape[1])
                episode = rollout.groups[prompt][sample]
                line = {
                    "step": rl.supervised + rollout.number * rl.epochs + 1,
                    "kind": kind,
                    "prompt": episode.given,
                    "answer": episode.answer,
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
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._texts is not None:
            self._texts.close()

    # --- the hook

    def after_step(
        self, step: int, compiled: Any, metrics: dict[str, jax.Array]
    ) -> None:
        gaps = metrics.pop(ROW_GAPS, None)
        if gaps is not None:
            self._gaps[step] = gaps

    def after_metrics(self, row: Row, due: bool) -> None:
        step = row["step"]
        row |= self._told.pop(step, {})
        gaps = self._gaps.pop(step, None)
        drawn = self._fresh.pop(step, None)
        if gaps is None:
            return
        if drawn is None:
            # The weights have moved since they drew: that is no disagreement.
            del row["rl/gap_max"], row["rl/gap_mean"]
            return
        if self._gate.passes(row["rl/gap_max"]):
            return
        assert self.newest is not None
        self._gate.close(
            step,
            np.asarray(gaps),
            drawn.batch,
            self.newest().params,
            lambda: (
                episode for group in self._play(drawn.number)[0] for episode in group
            ),
        )

    def before_save(self, step: int, state: State) -> None:
        rl = self._config.rl
        behind = dict(self._waiting)
        # Of several steps on the same answers some are still to come.
        if (
            self._current is not None
            and (step - rl.supervised) // rl.epochs == self._current.number
        ):
            behind[self._current.number] = self._current
        if behind and is_first():
            waiting.write(self._directory, step, behind)

    def take_up(self, step: int) -> None:
        """Takes up the rollouts that waited when the checkpoint of a step was written."""
        for number, groups in waiting.read(
            self._directory, step, self._prompts
        ).items():
            self._waiting[number] = self._scored(number, groups, Counter())


def begin_answering(
    program: Program,
    prompts: Prompts,
    start: int,
    loader: Callable[..., Loader],
    directory: Path,
    enter: Callable[[str], None],
) -> AnswerBatches:
    """Returns the batches behind step `start`; `loader` reads batches of text ahead, of a program that takes them."""
    assert isinstance(program, PolicyProgram)
    texts = None
    if prompts.texts is not None and start < program.config.rl.supervised:
        texts = loader(prompts.texts, program.supervised)
    answering = AnswerBatches(program, prompts, texts, directory, enter)
    answering.take_up(start)
    return answering
