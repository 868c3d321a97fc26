"""What a checkpoint says of itself: everything but the arrays."""

import dataclasses
import datetime
import json
import math
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.canonical import Entry
from meshtrain.checkpoint.steps import MANIFEST
from meshtrain.config import Config
from meshtrain.files import write_atomically

PACKAGES = ("meshtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """manifest.json of a step."""

    step: int
    loss: float | None  # null where it is not finite
    eval_loss: float | None
    saved: str  # UTC; to be read by people, never compared: clocks are set back
    data: dict[str, int]  # the one counter of the data: global batches read so far
    rng: dict[str, int]  # dropout's key of a step is folded from the two
    leaves: dict[str, dict[str, Any]]  # name -> shape, dtype
    config: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(
        cls, step: int, loss: float, eval_loss: float | None, config: Config, entries: Sequence[Entry]
    ) -> "Manifest":
        return cls(
            step=step,
            loss=_finite(loss),
            eval_loss=_finite(eval_loss),
            saved=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            data={"batches": step},
            rng={"seed": config.run.seed, "step": step},
            leaves={e.name: {"shape": list(e.shape), "dtype": str(e.live.dtype)} for e in entries},
            config=dataclasses.asdict(config),
            versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        return cls(**json.loads((directory / MANIFEST).read_bytes()))

    def write(self, directory: Path) -> None:
        write_atomically(directory / MANIFEST, json.dumps(dataclasses.asdict(self), indent=1).encode())


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
