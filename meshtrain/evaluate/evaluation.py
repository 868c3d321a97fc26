"""Evaluations on validation data while a run goes on: when, of what loss, and with what effect.

    due after a step ─► loss of the first eval.batches batches, or of all ─┬► the lowest so far? ─► saved
                                                                           │              (checkpoint.keep_best)
                                                                           └► none lower for eval.patience? ─► run ends

A save for this alone comes at most once an evaluation, and costs what one of checkpoint.every does; of all that were
saved the `checkpoint.keep` newest and the `checkpoint.keep_best` lowest stay on the disk.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from meshtrain.config import Config
from meshtrain.data import SplitBatches
from meshtrain.data.batches import TextBatches
from meshtrain.model.loss import counted
from meshtrain.run.best import Best, best_in
from meshtrain.run.processes import first_decides
from meshtrain.step import Program, Tree

B = TypeVar("B")


def averages(
    batches: Iterable[B], measure: Callable[[B], tuple[Any, Any]]
) -> tuple[list[float], float]:
    """Averages what `measure` returns of each batch, (mean or several means, how many it is the mean of): (means, how
    many in all).

    Batches have different numbers of answers and pairs, so that a mean of means would be that of no text. NaN where
    nothing counts.
    """
    means, counts = zip(*map(measure, batches), strict=True)
    values = np.array(jax.device_get(means), float)
    weights = np.array(jax.device_get(counts), float)
    total = weights.sum()
    columns = values.reshape(len(weights), -1).T
    return [
        float(np.sum(x * weights) / total) if total else math.nan for x in columns
    ], float(total)


class Evaluation:
    """Evaluates a run that goes on after step `start`, in each process alike. `metrics`: the run's rows up to there."""

    def __init__(
        self,
        program: Program,
        validation: SplitBatches | None,
        metrics: Path,
        start: int,
    ) -> None:
        self.program = program
        self.config = program.config
        self.validation = validation
        self.start = start
        self.best = Best(**first_decides(lambda: asdict(best_in(metrics))))
        self._counted = jax.jit(counted)
        self._samples: Any = None
        if self.config.eval.samples:
            assert isinstance(validation, TextBatches), "config.check refuses others"
            from meshtrain.evaluate.samples import TextSamples

            self._samples = TextSamples(program, validation)

    def due(self, step: int) -> bool:
        """Returns whether an evaluation follows `step`."""
        every = self.config.eval.every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)

    def measure(self, params: Tree, synchronous: bool) -> dict[str, Any]:
        """Returns `eval_loss`, the mean over all tokens (dpo: pairs; images: images) that count in the validation
        batches, without label smoothing and z-loss; `eval_regularized_loss`, the same with them, where they are trained
        with; of images also `eval_accuracy`, the share whose class is the argmax; of `eval.samples` the texts as
        `samples`.
        `synchronous`: blocks on each batch.
        """
        assert self.validation is not None
        data = self.validation
        program = self.program
        names: list[str] = []

        def measured(batch: Any) -> tuple[Any, Any]:
            found = program.eval_metrics(params, batch)
            names[:] = found
            result = (
                list(found.values()),
                self._counted(batch) if "weights" in batch else batch["labels"].size,
            )
            return jax.block_until_ready(result) if synchronous else result

        indices = data.one_pass(self.config.eval.batches)
        batches = (
            program.place(data.batch(k, *program.part(data.batch_shape(k))))
            for k in indices
        )
        means, _ = averages(batches, measured)
        samples = {"samples": self._samples.draw(params)} if self._samples else {}
        return dict(zip(names, means, strict=True)) | samples

    def is_best(self, step: int, loss: float) -> bool:
        """Records an evaluation and returns whether to save its state as the best so far."""
        # The first process decides, lest another differ in its last bit and save alone.
        return (
            self.best.add(step, first_decides(lambda: loss))
            and self.config.checkpoint.keep_best > 0
        )

    @property
    def ended(self) -> bool:
        """Returns whether the run ends, or has ended, for want of a lower loss."""
        return self.best.ends(self.config.eval.patience)

    def opening(self) -> list[str]:
        """Returns the lines that a run logs before its first step."""
        asked = self.config.eval
        if self.validation is not None and asked.every:
            lines = self.validation.fewer(asked.batches)
        else:
            lines = []
        if most := saves_for_best(self.config, self.start):
            times = f"at most {most:,} times (checkpoint.keep_best: 0: never)"
            lines.append(
                f"saves also after each evaluation whose loss is the lowest so far, {times}"
            )
        return lines

    def closing(self, step: int) -> list[str]:
        """Returns the lines that a run logs at its end, after `step`."""
        if step == self.start:
            return []
        if self.ended and step < self.config.train.steps:
            return [f"{self.why()}; the checkpoint of step {step} is written"]
        lowest = f"lowest eval loss {self.best.loss:.4f}, of step {self.best.step}"
        if self.best.step not in (None, step):
            return [lowest]
        return []

    def why(self) -> str:
        """Why the run ended, in words."""
        return f"ended by eval.patience: {self.best.why()}"


def saves_for_best(config: Config, start: int) -> int:
    """Returns how many evaluations after `start` have states that are saved only if they are the best so far."""
    every = config.eval.every
    saved = config.checkpoint.every
    steps = config.train.steps
    if not every or not config.checkpoint.keep_best:
        return 0
    first = (start // every + 1) * every
    return sum(not saved or step % saved != 0 for step in range(first, steps, every))
