"""Checks of `optimizer.transfer` and `eval.samples`: where there is no rule for one, or no text for the other."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from meshtrain.families import FAMILIES

PROMPT = 32  # tokens of a text that a sample is given
MOST = 128  # tokens of a sample


def problems(config: Any) -> Iterator[str]:
    """Yields a sentence on each."""
    return chain(_transfer_problems(config), _sample_problems(config))


def _transfer_problems(config: Any) -> Iterator[str]:
    transfer = config.optimizer.transfer
    model = config.model
    if not transfer:
        return
    linear_or_latent = bool(model.mla.kv_rank or "linear" in model.pattern)
    reasons = {
        f"optimizer.name is {config.optimizer.name}, and its rules are of adamw and lion": (
            config.optimizer.name not in ("adamw", "lion")
        ),
        f"model.weights {model.weights} has begun already": model.weights,
        f"lora.rank {config.lora.rank} trains adapters": config.lora.rank,
        "train.trainable freezes weights": config.train.trainable,
        f"model.mtp {model.mtp} has a layer of its own": model.mtp,
        f"transfer.head_dim {transfer.head_dim} is for usual attention": (
            transfer.head_dim and linear_or_latent
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"optimizer.transfer is given, but {reason}; leave one of the two out."


def _sample_problems(config: Any) -> Iterator[str]:
    samples = config.eval.samples
    if not samples:
        return
    reasons = {
        "eval.every is 0, so that there are no evaluations": not config.eval.every,
        f"train.objective is {config.train.objective}": config.train.objective
        != "next_token",
        f"model.family {config.model.family} cannot go on with a text": not FAMILIES[
            config.model.family
        ].causal,
        "data.source is synthetic, which is no text": config.data.source == "synthetic",
        f"mesh.islands is {config.mesh.islands}": config.mesh.islands > 1,
        f"model.attention {config.model.attention} knows of no cache": config.model.attention,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"eval.samples is {samples}, but {reason}; set it to 0."
