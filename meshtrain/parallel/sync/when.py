"""When islands are brought together, and what a fragment of the model is, in plain numbers.

    every 6, fragments 2, delay 2       after step    1   2   3   4   5   6   7   8   9
    fragment 0: layers 0, 2, 4 ...                            sent    in              sent
    fragment 1: layers 1, 3, 5 ...                                        sent    in

Fragments are spread evenly over the interval, and their layers over the depth of the model: strided, as in Streaming
DiLoCo (section 3.1). The embedding goes with the first one, the head with the last.
"""

from meshtrain.config import Config
from meshtrain.config.reduce import SyncConfig
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.sizes import crosses_compressed, over_islands

# Numbers that islands send besides what they moved: whether one takes part, and of how much it has learned.
BESIDE = 2


def synchronous(sync: SyncConfig, taken: int) -> bool:
    """Returns whether the step after `taken` steps sums its gradients over all islands."""
    return taken < sync.start


def due(sync: SyncConfig, taken: int) -> int | None:
    """The fragment that islands send after `taken` steps."""
    alone = taken - sync.start
    if alone <= 0:
        return None
    place = (alone - 1) % sync.every + 1
    return next(
        (
            f
            for f in range(sync.fragments)
            if sync.every * (f + 1) // sync.fragments == place
        ),
        None,
    )


def arrives(sync: SyncConfig, taken: int) -> int | None:
    """The fragment that was sent `delay` steps ago."""
    return due(sync, taken - sync.delay)


def summed_axes(config: Config) -> tuple[str, ...]:
    """The mesh axes over which a step of an island by itself sums gradients: those of data, but for islands that step
    by themselves.
    """
    return config.mesh.token_axes(across=not config.parallel.sync.every)


def sent_compressed(config: Config, weight: Placed) -> bool:
    """Returns whether islands send what they moved of a weight as `parallel.reduce.compression` has it: matrices, over
    islands.
    """
    return over_islands(config) and crosses_compressed(config, weight)


def has_layer(config: Config, fragment: int, layer: int) -> bool:
    return layer % config.parallel.sync.fragments == fragment


def has_weight(config: Config, fragment: int, weight: Placed) -> bool:
    """Returns whether anything of a weight is in the fragment."""
    if weight.stacked:
        return True
    return fragment == (
        0
        if weight.name.startswith("embedding.")
        else config.parallel.sync.fragments - 1
    )
