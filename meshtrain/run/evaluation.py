"""Evaluations on held-out data while a run goes on: when, of what loss, and what follows from it.

    due after a step ─► loss of the first eval.batches batches ─► the lowest so far? ─► saved (checkpoint.keep_best)
                                                               └► none lower for eval.patience of them? ─► the run ends

A save for this alone comes at most once an evaluation, and costs what one of checkpoint.every does; of all that were saved the
`checkpoint.keep` newest and the `checkpoint.keep_best` lowest stay on the disk.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain.config import Config
from meshtrain.data import SplitBatches
from meshtrain.mesh import own_rows
from meshtrain.model.dpo import counted
from meshtrain.run.best import Best, best_in
from meshtrain.run.processes import first_decides
from meshtrain.step import Program, Tree


class Evaluation:
    """Of one process of a run that goes on after step `start`; all call every method alike. `metrics`: the run's rows up to there."""

    def __init__(self, program: Program, held_out: SplitBatches | None, metrics: Path, start: int) -> None:
        self.program, self.config, self.held_out, self.start = program, program.config, held_out, start
        self.best = Best(**first_decides(lambda: asdict(best_in(metrics))))
        self._counted = jax.jit(counted)

    def due(self, step: int) -> bool:
        """Whether there is one after `step`."""
        every = self.config.eval.every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)

    def measure(self, params: Tree, synchronous: bool) -> dict[str, float]:
        """`eval_loss`, the mean over all tokens (dpo: pairs; images: images) that count in the held-out batches; of images also
        `eval_accuracy`, the share whose likeliest class is theirs. `synchronous`: each batch is waited for."""
        assert self.held_out is not None
        of_images = self.program.of_images
        evaluate = self.program.eval_images if of_images else self.program.eval_step
        names = ("eval_loss", "eval_accuracy") if of_images else ("eval_loss",)
        means: list[Any] = []
        counts: list[jax.Array | int] = []
        for k in range(self.config.eval.batches):
            rows = own_rows(self.program.batch_sharding, self.held_out.batch_shape(k)[0])
            batch = self.program.place(self.held_out.batch(k, rows))
            means.append(evaluate(params, batch))
            # Batches have different numbers of answers and pairs, so that a mean of means would be that of no text.
            counts.append(self._counted(batch) if "weights" in batch else batch["labels"].size)
            if synchronous:
                jax.block_until_ready((means[-1], counts[-1]))
        found, counted = np.array(jax.device_get(means), float), np.array(jax.device_get(counts), float)
        # A batch in which nothing counts has no loss; where none has any, neither has the whole.
        whole = lambda x: float(np.sum(x * counted) / counted.sum()) if counted.sum() else math.nan  # noqa: E731
        return dict(zip(names, map(whole, found.reshape(len(counted), -1).T), strict=True))

    def is_best(self, step: int, loss: float) -> bool:
        """Notes an evaluation; whether its state is to be saved as the best so far."""
        # That of the first process, lest another differ in its last bit and save alone.
        return self.best.add(step, first_decides(lambda: loss)) and self.config.checkpoint.keep_best > 0

    @property
    def ended(self) -> bool:
        """Whether the run is to end, or has ended, for want of a lower loss."""
        return self.best.ends(self.config.eval.patience)

    def opening(self) -> list[str]:
        """What a run says of it before its first step."""
        if not (most := saves_for_best(self.config, self.start)):
            return []
        times = f"at most {most:,} times (checkpoint.keep_best: 0: never)"
        return [f"saves also after each evaluation whose loss is the lowest so far, {times}"]

    def closing(self, step: int) -> list[str]:
        """What it says of it at its end, after `step`."""
        if step == self.start:
            return []
        if self.ended and step < self.config.train.steps:
            return [f"{self.why()}; the checkpoint of step {step} is written"]
        lowest = f"lowest eval loss {self.best.loss:.4f}, of step {self.best.step}"
        return [lowest] if self.best.step not in (None, step) else []

    def why(self) -> str:
        """Why the run ended, in words."""
        return f"ended by eval.patience: {self.best.why()}"


def saves_for_best(config: Config, start: int) -> int:
    """Evaluations after `start` whose states are saved only if they are the best so far."""
    every, saved, steps = config.eval.every, config.checkpoint.every, config.train.steps
    if not every or not config.checkpoint.keep_best:
        return 0
    first = (start // every + 1) * every
    return sum(not saved or step % saved != 0 for step in range(first, steps, every))
