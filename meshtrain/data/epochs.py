"""`train.epochs`: how many steps so many passes over the data are, once the data is open."""

import math

from meshtrain.config import Config, replaced
from meshtrain.config.key import keys
from meshtrain.errors import ConfigError

STEPS = keys(Config)["train.steps"].default


def in_epochs(config: Config, batches: int) -> Config:
    """The config with the `train.steps` that follow from `train.epochs` of so many batches each; as it is without epochs.

    What is left to the default follows; ConfigError for other steps than those. The same data gives the same steps, so that a run
    that goes on has those of its beginning.
    """
    train = config.train
    if not train.epochs:
        return config
    steps = max(1, math.ceil(train.epochs * batches - 1e-9))
    if train.steps not in (STEPS, steps):
        raise ConfigError(
            f"train.steps is {train.steps}, but train.epochs {train.epochs:g} of {batches:,} batches each are {steps:,} steps; "
            "give one of the two."
        )
    return replaced(config, train={"steps": steps})
