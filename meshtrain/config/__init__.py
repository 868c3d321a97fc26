"""The configuration: YAML and `--set` in, one frozen `Config` out, and every mistake refused before a device is
touched.

    YAML ──► nodes ──values──► by declared type ──follow──► what follows from other keys ──check──► Config
          with lines    by the key's own line

A key is one line of `meshtrain.config.schema`: its type, default, bounds, meaning, what it follows from, and what a
resume does when it has changed. Everything else reads that line. A mistake is one sentence: where, what, what is legal,
and the nearest right spelling.

- `meshtrain.config.schema`: every key, a section a class. Sections of a file of their own are called as the file:
  `mesh`, `model` (with
  `lora`), `images` (`data.images`), `reduce` (`parallel.reduce`, `parallel.sync`), `telemetry`. `meshtrain.config.key`:
  what a key's line can say.
- `meshtrain.config.auto`: what `auto` stands for, one function a key.
- `meshtrain.config.load`: `load`, of a file, dicts or another config, and overrides; `to_yaml`.
- `meshtrain.config.values`: YAML whose types nobody has guessed; a text by its key's type, and a value as text.
- `meshtrain.config.follow`: `resolve`, and `replaced` for a config with some values changed; the rows of a batch.
- `meshtrain.config.check`: which keys contradict each other. `meshtrain.config.notes`: what is legal but costs
  something; what was `chosen`.
- `meshtrain.config.places`: configs that come along by name, and what paths in a file count from.
- `meshtrain.config.imports`: Python files and modules that a config names, and the functions in them that keys name.
- `meshtrain.config.inject`: the faults that `survive.inject` names.
"""

from meshtrain.config.check import check
from meshtrain.config.follow import replaced, resolve
from meshtrain.config.load import load, to_yaml
from meshtrain.config.model import LoraConfig, ModelConfig
from meshtrain.config.notes import chosen, notes
from meshtrain.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SurviveConfig,
    TrainConfig,
)
from meshtrain.config.telemetry import TelemetryConfig
from meshtrain.errors import ConfigError, refusal, short

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "SurviveConfig",
    "TelemetryConfig",
    "TrainConfig",
    "check",
    "chosen",
    "load",
    "notes",
    "refusal",
    "replaced",
    "resolve",
    "short",
    "to_yaml",
]
