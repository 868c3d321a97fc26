"""Values that follow from keys: keys that follow from others, as their lines in `schema` say, and the rows of a batch.

    train.uneven_batch: pad     7 rows on data 2 x microbatches 2:   r r r r   r r r 0

A row 0 is padding with weight 0.
"""

import json
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from meshtrain.config.auto import unpaired_schedule
from meshtrain.config.key import Followed, keys
from meshtrain.config.schema import Config, ExpertsConfig
from meshtrain.config.stacks import LINEAR
from meshtrain.errors import ConfigError
from meshtrain.families import FAMILIES
from meshtrain.registry import NotImported
from meshtrain.schedule.generators import SCHEDULES, has_table

# train.loss_chunk: auto. Fewer tokens, and what a chunk adds to the sum of the head's gradient takes longer than its
# products. tokens; bytes of float32 logits
CHUNK = 2048
ROOM = 2**32

AnyConfig = TypeVar("AnyConfig", bound=Config)


def resolve(config: AnyConfig, as_far: bool = False) -> AnyConfig:
    """Returns the config in which no key is left to follow from the others.

    Raises ConfigError where one does not follow.

    `as_far`: a default that stands for itself stays where what it follows from is not imported.
    """
    for path, key in keys(type(config)).items():
        if key.follows and value_of(config, path) == key.default:
            try:
                config = put(config, **nested(path, key.follows(config)))
            except NotImported:
                if key.null or not as_far:
                    raise
    return config


def replaced(config: AnyConfig, **sections: Mapping[str, Any]) -> AnyConfig:
    """Returns a resolved config with other values, by section: replaced(config, mesh={"data": 2}).

    Values that followed from others follow again.
    """
    return resolve(put(unresolved(config), **sections))


def as_run_on(platform: str, config: AnyConfig) -> AnyConfig:
    """Returns a resolved config as devices of a platform run it: CPUs, which hide no messages, without pairs that
    nobody named.
    """
    schedule = config.parallel.schedule
    if (
        platform == "cpu"
        and isinstance(schedule, Followed)
        and (entry := SCHEDULES.get(schedule))
        and entry.paired
    ):
        return put(config, parallel={"schedule": Followed(unpaired_schedule(config))})
    return config


def unresolved(config: AnyConfig) -> AnyConfig:
    """Returns a resolved config as it was before what follows was filled in."""
    every = keys(type(config))
    for path in [path for path in every if followed(config, path)]:
        config = put(config, **nested(path, every[path].default))
    return config


def put(config: AnyConfig, **sections: Any) -> AnyConfig:
    """Returns a config with other values, by section, or other sections, and nothing else: whoever makes many of them
    fills in what follows.

    A few times as fast as `dataclasses.replace`, which searches notice.
    """
    return _put_values(config, sections)


def _put_values(section: Any, values: Mapping[str, Any]) -> Any:
    before = vars(section)
    # A dict is for a section: no key takes one. Any mapping's class would be asked for a third of the time.
    inner = {
        n: _put_values(before[n], v) for n, v in values.items() if isinstance(v, dict)
    }
    return type(section)(**{**before, **values, **inner})


def followed(config: Config, path: str) -> bool:
    """Returns whether the value of a key is the one that follows from the others."""
    key = keys(type(config))[path]
    value = value_of(config, path)
    try:
        return isinstance(value, Followed) or (
            key.follows is not None and value == key.follows(config)
        )
    except ConfigError:
        return False


def value_of(config: Any, path: str) -> Any:
    return operator.attrgetter(path)(config)


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key path, old, new) of the keys that both configs have and that differ."""
    for name in (name for name in new if name in old):
        before = old[name]
        after = new[name]
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from (
                (f"{name}.{inner}", *values)
                for inner, *values in differences(before, after)
            )
            continue
        # tuples and lists are the same
        before, after = (json.loads(json.dumps(value)) for value in (before, after))
        if before != after:
            yield name, before, after


def nested(path: str, value: Any) -> dict[str, Any]:
    """Returns `mesh.data`, 2 as {"mesh": {"data": 2}}."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


# --- the rows of a batch


def row_shards(config: Config) -> int:
    """Returns the number of microbatches, over all data ranks, that a batch is cut into."""
    return config.mesh.data * config.parallel.microbatches


def row_multiple(config: Config) -> int:
    """Returns what the rows of a batch are padded to a multiple of; 1 where they are not."""
    if config.train.uneven_batch == "pad":
        return row_shards(config)
    return 1


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def padded_batch_size(config: Config) -> int:
    """Returns the rows of a batch on the devices: train.global_batch_size and the padding."""
    return round_up(config.train.global_batch_size, row_multiple(config))


def loss_chunk(config: Config, tokens: int, rows: int) -> int | None:
    """Returns how many of `tokens` have logits at once (train.loss_chunk), on a device of `rows` ids each; None: all,
    in one piece.

    auto spares the sum of the head's gradient, which each chunk reads and writes, where there is room for the logits.
    """
    if FAMILIES[config.model.family].images:
        return None  # one label each
    chunk = config.train.loss_chunk
    if chunk == "auto":
        chunk = CHUNK if 4 * tokens * rows > ROOM else tokens
    return chunk if chunk < tokens else None


def expert_room(
    experts: ExpertsConfig,
    ranks: int,
    local: int,
    tokens: int,
    top_k: int,
    nodes: int = 1,
) -> int:
    """Returns how many rows a rank with `local` experts has room for in a round, of `tokens` tokens on each of the
    `ranks` ranks of its node: so many times an even load as `ExpertsConfig.room` says. all_to_all has equal room for
    what each rank sends, of the tokens of as many `nodes`.
    """
    most = nodes * tokens * min(top_k, local)
    pairs = tokens * top_k
    if ranks > 1 and experts.dispatch == "all_to_all":
        return ranks * min(most, math.ceil(experts.room * pairs / ranks))
    return min(ranks * most, math.ceil(experts.room * pairs))


def runs_table(config: Config) -> bool:
    """Returns whether the microbatches go by a schedule's table, and do not just follow one another."""
    return has_table(
        config.parallel.schedule, config.mesh.pipeline, config.parallel.microbatches
    )


def skips_idle_work(config: Config, platform: str) -> bool:
    """Returns whether a pipeline stage skips what it has no microbatch for: on CPU, where no predicate stalls it.

    There a message is one of all devices, so that where keys and values go round idle stages must take part.
    """
    return platform == "cpu" and not has_rings(config)


def has_rings(config: Config) -> bool:
    """Returns whether a layer sends from rank to rank over context: keys and values, or tokens for a convolution."""
    ring = config.parallel.context_strategy == "ring"
    return config.mesh.context > 1 and (ring or LINEAR in config.model.pattern)


def drops(config: Config) -> bool:
    """Returns whether a step drops anything.

    A policy never does: neither its reference nor what draws its answers does, and noise in one of the two would look
    like a preference.
    """
    of_policy = config.train.objective in ("dpo", "grpo")
    return not of_policy and (config.model.dropout > 0 or config.lora.dropout > 0)


def microbatch_rows(config: Config) -> int:
    """Returns the rows of one microbatch on one data rank, padding included."""
    # A batch that does not divide is padded, or refused.
    return -(-config.train.global_batch_size // row_shards(config))
