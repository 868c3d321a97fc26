"""Ends a run whose drawing and training disagree, and says what they disagree about.

With the same weights a token's log-probability must be the same where it was drawn and where it is learned from. Where
it is not, the answers are drawn once more, with the weights of now, and read by a third reader: the scorer, which
knows neither caches nor neighbours nor padding between texts.

    weights        what draws does not hold what training holds; adapters among them
    drawing        the scorer agrees with training: drawing attends to padding, or tells another temperature
    training       the scorer agrees with drawing: training forgets the temperature, or attends beyond a text
    experts        neither of these, and the model has experts: they are chosen differently
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import refusal
from meshtrain.parallel.forward import Batch
from meshtrain.rl.episodes import Episode
from meshtrain.rl.rollouts import Rollouts
from meshtrain.rl.rows import Learned, pack
from meshtrain.rl.scoring import LogprobReader
from meshtrain.run.directory import GAPS
from meshtrain.run.processes import is_first
from meshtrain.step import Program


class Disagreement(FloatingPointError):
    """Drawing and training give the same tokens other log-probabilities, with the same weights."""


class GapGate:
    """Compares drawing with training, for runs in `directory`. `place`: puts a global batch on the devices."""

    def __init__(
        self,
        program: Program,
        rollouts: Rollouts,
        directory: Path,
        place: Callable[[dict[str, np.ndarray]], Batch],
    ) -> None:
        self._program = program
        self._rollouts = rollouts
        self._directory = directory
        self._place = place
        self._limit = program.config.rl.gap_limit
        self._scorer = LogprobReader(rollouts.forward, rollouts.resharding)

    def passes(self, gap: float) -> bool:
        """Returns whether log-probabilities are near enough; NaN is not."""
        return gap <= self._limit

    def close(
        self,
        step: int,
        gaps: np.ndarray,
        batch: dict[str, np.ndarray],
        params: Any,
        draw_again: Callable[[], Iterable[Episode]],
    ) -> None:
        """Saves the rows of a batch that disagree, and raises Disagreement. `gaps`: of each row, or of its parts."""
        by_row = gaps.reshape(len(batch["tokens"]), -1).max(1)
        wrong = np.flatnonzero(~(by_row <= self._limit))
        file = self._directory / GAPS / f"{step}.npz"
        told = f"The {len(wrong)} rows are in {file}."
        try:
            if is_first():
                file.parent.mkdir(exist_ok=True)
                arrays: dict[str, Any] = {name: x[wrong] for name, x in batch.items()}
                np.savez(file, gaps=by_row[wrong], **arrays)
        except OSError as error:
            told = (
                f"The {len(wrong)} rows cannot be written to {file}: {refusal(error)}."
            )
        self._rollouts.synchronise(params)
        cause = self._different_weights(params) or self._different_reading(
            params, list(draw_again())
        )
        raise Disagreement(
            f"step {step}: with the same weights the log-probability of a token is {by_row.max():.3g} apart between "
            f"drawing and training, above rl.gap_limit {self._limit:g}: {cause}. {told}"
        )

    def _different_weights(self, params: Any) -> str:
        """Returns a sentence's part on weights that drawing has otherwise than training; "" if all are the same."""
        assert self._rollouts.weights is not None
        differ = self._rollouts.resharding.differing(params, self._rollouts.weights)
        if not differ:
            return ""
        names = ", ".join(weight.name for weight in differ[:3])
        more = f" and {len(differ) - 3} more" if differ[3:] else ""
        kind = (
            "adapters' factors"
            if all(weight.adapter for weight in differ)
            else "weights"
        )
        return f"what draws does not hold the {kind} that are trained ({names}{more})"

    def _different_reading(self, params: Any, episodes: Sequence[Episode]) -> str:
        rl = self._program.config.rl
        held = self._rollouts.weights
        assert held is not None
        texts = [episode.tokens for episode in episodes]
        scored = self._scorer.logprobs(held, texts, rl.temperature)
        plain = self._scorer.logprobs(held, texts, 1.0)
        told = [episode.logprobs[1:] for episode in episodes]
        masks = [episode.drawn[1:] for episode in episodes]
        drawn_right = self._agree(told, scored, masks)
        if self._trains_as(params, episodes, scored):
            if drawn_right:
                return "it does not happen again with the weights of now"
            if self._agree(told, plain, masks):
                return "drawing tells log-probabilities at temperature 1, not at rl.temperature"
            return (
                "drawing attends to the padding of prompts, or to another slot's keys"
            )
        if self._trains_as(params, episodes, plain):
            return "training takes log-probabilities at temperature 1, not at rl.temperature"
        if self._trains_as(params, episodes, scored, alone=True):
            return "training attends beyond a text: to padding, or to its neighbours in a row"
        if self._program.config.model.moe.experts:
            return "drawing and training choose other experts"
        return "the same text alone has another log-probability in training"

    def _agree(
        self, some: list[np.ndarray], others: list[np.ndarray], masks: list[np.ndarray]
    ) -> bool:
        of_all = zip(some, others, masks, strict=True)
        return all(
            self.passes(float(np.abs((a - b)[mask]).max(initial=0)))
            for a, b, mask in of_all
        )

    def _trains_as(
        self,
        params: Any,
        episodes: Sequence[Episode],
        logprobs: Sequence[np.ndarray],
        alone: bool = False,
    ) -> bool:
        """Returns whether training gives tokens these log-probabilities, in packed rows or with each text `alone`."""
        config = self._program.config
        learned = [
            Learned(
                episode.tokens,
                episode.drawn,
                np.concatenate([[0.0], values]).astype(np.float32),
                np.zeros(len(values) + 1, np.float32),
                episode.experts,
            )
            for episode, values in zip(episodes, logprobs, strict=True)
        ]
        longest = config.train.sequence_length if alone else self._rollouts.length - 1
        batch = pack(learned, config, longest, alone)
        return self.passes(
            float(self._program.row_gaps(params, self._place(batch)).max())
        )
