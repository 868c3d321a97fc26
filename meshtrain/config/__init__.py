"""The configuration: `schema` names every key and `key` is what it says, `load` reads YAML strictly, `follow` fills in what follows
from other keys, `check` refuses what cannot run before a device is touched.
"""

from meshtrain.config.check import check, notes
from meshtrain.config.follow import replaced, resolve
from meshtrain.config.load import load, to_yaml
from meshtrain.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from meshtrain.errors import ConfigError, refusal, short

__all__ = [
    "CheckpointConfig", "Config", "ConfigError", "DataConfig", "EvalConfig", "LogConfig", "MeshConfig", "ModelConfig", "OptimizerConfig",
    "ParallelConfig", "PrecisionConfig", "RunConfig", "TrainConfig", "check", "load", "notes", "refusal", "replaced", "resolve", "short",
    "to_yaml",
]  # fmt: skip
