"""The runs that are timed on one GPU: layers of real models, as many as fit; `cases.yaml` has them."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Case(NamedTuple):
    """Rows and tokens of a step, a model and other sections of a config; or `plain` JAX that computes the same."""

    rows: int
    tokens: int
    model: dict[str, Any]
    sections: dict[str, dict[str, Any]]
    plain: bool = False

    def config(self) -> dict[str, Any]:
        train = {"global_batch_size": self.rows, "sequence_length": self.tokens}
        return {
            "precision": {"compute": "bfloat16"},
            "optimizer": {"learning_rate": 1.0e-2, "warmup_steps": 2},
            **self.sections,
            "model": self.model,
            "train": train | self.sections.get("train", {}),
        }


_CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())["cases"]
SPEED = {name: Case(*fields, plain="plain" in name) for name, fields in _CASES.items()}
