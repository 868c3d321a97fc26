"""The entry of a family: one model class of transformers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshtrain.hf_families.json_fields import Json


class WeightName(NamedTuple):
    """A weight of ours, the tensor in their files, and how its numbers lie there (see `meshtrain.hf.mapping`)."""

    ours: str
    # {} stands for the number of the layer, a second one for that of the expert
    theirs: str
    layout: Literal[
        "plain",
        "linear",
        "third",
        "patches",
        "experts",
        "merged",
        "alternating",
        "stacked",
        "half",
        "rows",
        "turned",
        "joined",
        "load",
    ] = "plain"
    # Which third or half, or of the two that alternate or are joined; turned: how many outputs
    part: int = 0
    ones: int = 0  # plain: leading dimensions of size 1 of their tensor
    # rows: heads whose rows lie beside one another, the rows of each, and the first of those that are ours
    rows: tuple[int, int, int] = (1, 0, 0)


@dataclass(frozen=True)
class HfFamily:
    """A class of transformers that holds a family of ours. `section` and `config` are inverse to one another.

    section: (config.json, where it stands) -> the keys of the section `model`. config: (section `model`, tokens of a
    sequence) -> the keys of config.json. names: section `model` -> the names of the weights, as files are written;
    `in_memory`: of some of them, as transformers has them once loaded. The rest are the options that the class can
    hold.
    """

    name: str  # of our family
    architecture: str
    section: Callable[[Json, str], dict[str, Any]]
    config: Callable[[Json, int], dict[str, Any]]
    names: Callable[[Json], Iterable[WeightName]]
    # names that some files have in the place of those
    in_memory: Callable[[Json], Iterable[WeightName]] | None = None
    model_type: str = ""  # theirs, where it is not the name
    # Before the names of all but the head; the class without a head has them without
    prefix: str = "model."
    qkv_bias: bool | None = False  # None: either
    qk_norm: bool | None = False  # None: either
    window: bool = True  # there may be one
    shared_heads: bool = True  # query heads may share keys and values
    wide_heads: bool = True  # heads may be wider than d_model / heads
    router: str = ""  # model.moe.router of its experts; "": it has none
    normalize: bool | None = True  # model.moe.normalize; None: either
    activation: str = ""  # the one that it can hold; "": any that has a name there
    window_by_turns: bool = False  # every n-th layer may see all positions
    gemma: bool = False
    # Norms by 1 + scale, layers of several kinds, heads turned in part, shared experts
    hybrid: bool = False
    score_cap: bool = False  # there may be one
    local_theta: bool = False  # there may be one
    # its first layers may be dense, and its routers have groups, shared experts, a scale and a bias
    dense_first: bool = False
    part_turned: bool = False  # a part of a head's width may be turned
    latent: bool = False  # its attention is latent
