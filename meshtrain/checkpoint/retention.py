"""Which checkpoints stay: a pure function of what there is and what the config asks for."""

import math
from collections.abc import Mapping

from meshtrain.config import CheckpointConfig


def kept(eval_losses: Mapping[int, float | None], config: CheckpointConfig) -> dict[int, str]:
    """The steps that stay, each with the reason; `eval_losses` has every committed step (None: not evaluated)."""
    steps = sorted(eval_losses)
    reasons = {step: f"one of the newest {config.keep}" for step in steps[-config.keep :]}
    evaluated = [(loss, step) for step, loss in eval_losses.items() if loss is not None and not math.isnan(loss)]
    for _, step in sorted(evaluated)[: config.keep_best]:
        reasons.setdefault(step, "best by eval loss")
    for step in steps:
        if config.keep_every and step % config.keep_every == 0:
            reasons.setdefault(step, f"a multiple of {config.keep_every}")
    return reasons
