"""Published runs, and the efficiency numbers that are fitted on them.

A data sheet says what a device could do. What training reaches of it is six numbers a family of accelerators, fitted on
step times that others have published for GPUs:

    published: runs as configs ──► the planner's seconds ──► calibrate: numbers that bring the two together

- `published`: the runs, with their sources, and what these leave open; `published.yaml` has their rows.
- `foundry`, `kempner`: two hundred more, none of which is fitted.
- `tpu`: MaxText's on TPU v5p, three of which are fitted.
- `experts`: mixtures of experts, none of which is fitted; `long`: long rows.
- `kernels`: what kernels of attention reach by sequence length, from tables of kernels that were timed alone.
- `memory`: published gigabytes of other frameworks, by how they hold what they train.
- `timed`, `work`: seconds of a compiled program, by what its instructions move and multiply.
- `calibrate`: the fit, and how well it predicts runs that it has not seen.

The numbers themselves stand with their devices, in `meshtrain.cluster.accelerators`; how good they are is printed by
`python -m experiments.plan`.
"""

from pathlib import Path
from typing import Any

import yaml


def read(name: str) -> Any:
    """Returns what stands in one of the tables here."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


PUBLISHED = read("published")
