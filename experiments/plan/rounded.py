"""What rounding weights once a step saves a planned step with products in float8.

python -m experiments.plan.rounded     three layouts of our program (no GPU needed)
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments import bench
from experiments.bench import LLAMA_3, Table, config_of
from meshtrain.cluster.cluster import named
from meshtrain.config import replaced
from meshtrain.plan.compute import DEFAULT_PROFILE
from meshtrain.plan.estimate import estimate

EVERY_LAYER = {"matmul": "float8", "float8_skip": (0, 0)}
# model, batch, mesh, keys of `parallel`: those that a search picks in bfloat16, in more microbatches
LAYOUTS: tuple[tuple[str, int, dict[str, int], dict[str, Any]], ...] = (
    ("8B", 512, {"data": 64}, {"zero_stage": 2, "microbatches": 4}),
    (
        "70B",
        1024,
        {"data": 256, "tensor": 2},
        {"zero_stage": 3, "microbatches": 4, "sequence_parallel": True},
    ),
    (
        "405B",
        2048,
        {"data": 128, "tensor": 8, "pipeline": 16},
        {
            "microbatches": 16,
            "sequence_parallel": True,
            "schedule": "paired",
            "virtual_stages": 8,
            "layer_split": [0, *[1] * 126, 0],
        },
    ),
)


def planned() -> Iterator[tuple[str, float, float, float]]:
    """(model and mesh, seconds in bfloat16, in float8 rounded in each microbatch, and once) of our program on H100s."""
    for model, batch, mesh, parallel in LAYOUTS:
        parallel = {"remat": "selective", **parallel}
        config = config_of(LLAMA_3[model], mesh, batch, 8192, parallel)
        rounded = replaced(config, precision=EVERY_LAYER)
        cluster = named("h100", config.mesh.devices)
        each = replace(DEFAULT_PROFILE, rounds_weights_once=False)
        yield (
            f"{model}, {config.mesh}",
            estimate(config, cluster).seconds,
            estimate(rounded, cluster, each).seconds,
            estimate(rounded, cluster).seconds,
        )


def main() -> None:
    bench.parser(__doc__).parse_args()
    heads = "bfloat16, s", "each microbatch, s", "once, s"
    table = Table("float8, rounded" + 45 * " ", *heads)
    for name, *seconds in planned():
        table.row(name, *(f"{s:.2f}" for s in seconds))


if __name__ == "__main__":
    main()
