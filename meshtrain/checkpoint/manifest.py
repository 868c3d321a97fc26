"""manifest.json of a step: everything of a checkpoint but the arrays; what it may hold is checked, so that no reader
need ask.
"""

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.steps import MANIFEST, Damaged, Renamed
from meshtrain.config import Config, resolve
from meshtrain.config.follow import nested, put, value_of
from meshtrain.config.key import keys, known
from meshtrain.files import write_atomically
from meshtrain.registry import Unimported
from meshtrain.run.versions import versions

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepManifest:
    """manifest.json of a step."""

    step: int
    loss: float | None  # null where it is not finite
    eval_loss: float | None
    saved: str  # UTC; to be read by people, never compared: clocks are set back
    data: dict[
        str, Any
        # The one counter of the data: global batches read so far; digests of what they are read from
    ]
    rng: dict[str, int]  # dropout's key of a step is folded from the two
    leaves: dict[str, Json]  # name -> shape, dtype; frozen, where it is
    config: Json
    versions: dict[str, str]
    hooks: dict[str, str]  # replaced parts of the model -> the function's name

    @property
    def weights_alone(self) -> bool:
        """True if `meshtrain.adopt import` made the step from weights alone: there is no state to go on from."""
        return "step" not in self.leaves

    @classmethod
    def make(
        cls,
        step: int,
        loss: float,
        eval_loss: float | None,
        config: Config,
        leaves: dict[str, Json],
        hooks: dict[str, str],
        data_digests: Mapping[str, str],
    ) -> "StepManifest":
        return cls(
            step=step,
            loss=float(loss) if math.isfinite(loss) else None,
            eval_loss=None
            if eval_loss is None or not math.isfinite(eval_loss)
            else float(eval_loss),
            saved=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            data={"batches": step, **data_digests},
            rng={"seed": config.run.seed, "step": step},
            leaves=leaves,
            config=dataclasses.asdict(config),
            versions=versions(),
            hooks=hooks,
        )

    @classmethod
    def read(cls, directory: Path) -> "StepManifest":
        """Returns the manifest of a step that is committed, unchanged, and what its name says; the arrays are not
        looked at.

        All who look at a step come through here. Damaged with what is wrong; NewerFormat if it cannot be judged.
        """
        if problem := steps.commit_problem(directory):
            raise Damaged(problem)
        if problems := digests.problems(directory, only=[MANIFEST]):
            raise Damaged(problems[0])
        content = steps.parsed(directory / MANIFEST)
        if not isinstance(content, dict):
            raise Damaged(f"{MANIFEST} is not a manifest")
        content = {"hooks": {}, **content}  # older checkpoints have none
        for name, is_legal in LEGAL.items():
            if name not in content or not is_legal(content[name]):
                raise Damaged(f"{MANIFEST} has no legal {name}")
        manifest = cls(**{name: content[name] for name in LEGAL})
        if steps.is_number(directory.name) and directory.name != str(manifest.step):
            raise Renamed(manifest.step)
        return manifest

    def write(self, directory: Path) -> None:
        write_atomically(
            directory / MANIFEST,
            json.dumps(dataclasses.asdict(self), indent=1).encode(),
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """The verified step from which a run starts."""

    directory: Path
    manifest: StepManifest
    own: bool  # of this run; else of the one that checkpoint.resume names


def earlier_config(old: Mapping[str, Any], kind: type[Config] = Config) -> Config:
    """Returns a checkpoint's config in this version's keys; older ones hold null where a value followed from the
    others.

    A name in it may be registered no more.
    """
    before = put(kind(), **_tuples(known(old, kind)))
    for path, key in keys(kind).items():
        if (
            key.one_of is not None
            and isinstance(name := value_of(before, path), str)
            and name not in key.one_of
        ):
            before = put(before, **nested(path, Unimported(name, path, "RUN")))
    return resolve(before, as_far=True)


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuples(x) for name, x in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _is_loss(x: Any) -> bool:
    return x is None or type(x) is float


def _is_record(x: Any) -> bool:
    try:
        shape = x["shape"]
        dtype = np.dtype(x["dtype"])
    except (KeyError, TypeError, ValueError):
        return False
    is_shape = (
        isinstance(shape, list)
        and all(map(_is_count, shape))
        and _is_count(math.prod(shape))
    )
    is_dtype = dtype.name == x["dtype"] and (
        dtype.name == "bool" or jnp.issubdtype(dtype, jnp.number)
    )
    return is_shape and is_dtype and type(x.get("frozen", True)) is bool


def _each(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and all(map(is_value, x.values()))


# What each key of a manifest may hold.
LEGAL: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "loss": _is_loss,
    "eval_loss": _is_loss,
    "saved": lambda x: isinstance(x, str),
    "data": lambda x: isinstance(x, dict) and _is_count(x.get("batches")),
    "rng": lambda x: isinstance(x, dict) and type(x.get("seed")) is int,
    "leaves": _each(_is_record),
    "config": _each(lambda section: isinstance(section, dict)),
    "versions": _each(lambda version: isinstance(version, str)),
    "hooks": _each(lambda name: isinstance(name, str)),
}
