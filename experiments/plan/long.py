"""Long rows: published runs with context parallelism beside the plan, `python -m experiments.plan.long`.

    torchtitan   docs: llama3_h100_202412_torchtitan.md, table 4: H100 of 96 GB at 500 W, one row of T tokens on 8, 8B; 8 on 512, 405B
    NeMo         Performance of long sequences: Llama-2 7B, H100 (24.03), 4 M tokens a step, T / 1024 GPUs
    Llama 3      Grattafiori et al. 2024, table 4: 405B on 16,384 H100s, bfloat16

The first two compute products in float8, and are planned so (tensorwise, all layers, weight gradients too). NeMo counts
the FLOPs of all scores, as `plan` does: its release 24.07 prints 46.1 and 42.9 GFLOP a token of Llama-2 7B. Llama 3
counts the half that is not masked.
"""

from collections.abc import Iterator
from typing import Any

from experiments import bench
from experiments.bench import Table, config_of
from meshtrain.config import replaced
from meshtrain.plan import Plan, named, plan, shapes

from . import PUBLISHED

MODELS = bench.LLAMA_3 | bench.MODELS["Llama 2"]
FLOAT8 = {"matmul": "float8", "float8_recipe": "tensorwise", "float8_wgrad": "float8"}
FLOAT8 |= {"float8_skip": [0, 0], "float8_gather": True}


def planned(
    model: str,
    mesh: dict[str, int],
    rows: int,
    length: int,
    products: dict[str, Any] = FLOAT8,
    **parallel: Any,
) -> Plan:
    """A plan in bfloat16, but for the `products` of the layers."""
    split = {"sequence_parallel": mesh.get("tensor", 1) > 1}
    config = config_of(MODELS[model], mesh, rows, length, split | parallel)
    config = replaced(config, precision=products) if products else config
    return plan(config, named("h100", config.mesh.devices))


def half_teraflops(found: Plan) -> float:
    """TFLOP/s a device, by the half of the scores that is seen."""
    model, train = found.config.model, found.config.train
    scores = (
        12 * model.layers * model.heads * model.head_dim * train.sequence_length / 2
    )
    every = shapes.model_flops(found.config) / (
        train.global_batch_size * train.sequence_length
    )
    return found.flops_per_device / 1e12 * (1 - scores / every)


def table() -> Iterator[tuple[str, int, Plan, float, float]]:
    """(source, T, plan, reported, planned): tokens/s a device, of NeMo and Llama 3 TFLOP/s a device."""
    for at, (model, rows) in enumerate((("8B", 1), ("405B", 8)), start=1):
        large = {"tensor": 8, "pipeline": 8} if model == "405B" else {}
        for length, found in PUBLISHED["long torchtitan"].items():
            data, context = found[0]
            mesh = {"data": data, "context": context, **large}
            # FSDP gathers a layer at use; with stages it holds what it gathered
            keys = {"zero_stage": 3, "remat": "full", "zero_hold": bool(large)}
            keys["microbatches"] = rows
            ours = planned(model, mesh, rows * data, length, **keys)
            speed = ours.tokens_per_second / ours.devices
            yield f"torchtitan {model}", length, ours, found[at], speed
    for length, ((tensor, data, context), reported) in PUBLISHED["long nemo"].items():
        rows = max(data, 4 * 2**20 // length)
        mesh = {"data": data, "context": context, "tensor": tensor}
        ours = planned("7B", mesh, rows, length, microbatches=rows // data)
        yield "NeMo 7B", length, ours, reported, ours.flops_per_device / 1e12
    for length, mesh, rows, reported in (
        (8192, {"data": 128, "tensor": 8, "pipeline": 16}, 2048, 400),
        (131072, {"data": 8, "context": 16, "tensor": 8, "pipeline": 16}, 128, 380),
    ):
        ours = planned(
            "405B",
            mesh,
            rows,
            length,
            {},
            microbatches=16,
            remat="selective",
            schedule="interleaved",
            virtual_stages=8,
            layer_split=(0, *[1] * 126, 0),
        )
        yield "Llama 3 405B", length, ours, reported, half_teraflops(ours)


def main() -> None:
    """Prints the table, with each row's ratio to the first of its source."""
    bench.parser(__doc__).parse_args()
    both = "reported", "planned", "of the first", "of the first"
    rows = Table("source          ", "   tokens", "layout" + 46 * " ", *both)
    first: dict[str, list[float]] = {}
    for source, length, ours, *speeds in table():
        base = first.setdefault(source, speeds)
        shares = [f"{speed / old:.3f}" for speed, old in zip(speeds, base, strict=True)]
        told = [f"{speed:,.0f}" for speed in speeds]
        rows.row(source, f"{length:,}", ours.config.mesh, *told, *shares)


if __name__ == "__main__":
    main()
