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
from experiments.bench import Table
from meshtrain.config import load
from meshtrain.plan import Plan, named, plan, shapes

MODELS: dict[str, dict[str, Any]] = {
    "8B": dict(
        layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab_size=128256
    ),
    "405B": dict(
        layers=126, d_model=16384, heads=128, kv_heads=8, d_ff=53248, vocab_size=128256
    ),
    "7B": dict(
        layers=32, d_model=4096, heads=32, kv_heads=32, d_ff=11008, vocab_size=32000
    ),
}
# T → data, context
TITAN = {32768: (8, 1), 65536: (4, 2), 131072: (2, 4), 262144: (1, 8)}
SPEEDS = {"8B": (3890, 2540, 1071, 548), "405B": (76, 47, 31, 16)}  # tokens/s a device
# T → (tensor, data, context), TFLOP/s a device
NEMO = {
    32768: ((2, 8, 2), 610),
    65536: ((4, 8, 2), 574),
    131072: ((4, 8, 4), 555),
    262144: ((4, 8, 8), 549),
    524288: ((8, 4, 16), 549),
    1048576: ((8, 4, 32), 536),
}


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
    given = {
        "model": MODELS[model],
        "mesh": mesh,
        "parallel": {"sequence_parallel": mesh.get("tensor", 1) > 1} | parallel,
        "precision": {"compute": "bfloat16", **products},
        "train": {"global_batch_size": rows, "sequence_length": length},
    }
    return plan(load(given), named("h100", load(given).mesh.devices))


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


def table() -> Iterator[tuple[str, int, str, float, float]]:
    """(source, T, layout, reported, planned): tokens/s a device, of NeMo and Llama 3 TFLOP/s a device."""
    for model, rows in (("8B", 1), ("405B", 8)):
        large = {"tensor": 8, "pipeline": 8} if model == "405B" else {}
        for (length, (data, context)), reported in zip(
            TITAN.items(), SPEEDS[model], strict=True
        ):
            mesh = {"data": data, "context": context, **large}
            # FSDP gathers a layer at use; with stages it holds what it gathered
            keys = {
                "zero_stage": 3,
                "remat": "full",
                "zero_hold": bool(large),
                "microbatches": rows if large else 1,
            }
            found = planned(
                model, mesh, rows * data if not large else 8 * data, length, **keys
            )
            by_plan = found.tokens_per_second / found.devices
            yield (
                f"torchtitan {model}",
                length,
                str(found.config.mesh),
                reported,
                by_plan,
            )
    for length, ((tensor, data, context), reported) in NEMO.items():
        rows = max(data, 4 * 2**20 // length)
        mesh = {"data": data, "context": context, "tensor": tensor}
        found = planned("7B", mesh, rows, length, microbatches=rows // data)
        yield (
            "NeMo 7B",
            length,
            str(found.config.mesh),
            reported,
            found.flops_per_device / 1e12,
        )
    for length, mesh, rows, reported in (
        (8192, {"data": 128, "tensor": 8, "pipeline": 16}, 2048, 400),
        (131072, {"data": 8, "context": 16, "tensor": 8, "pipeline": 16}, 128, 380),
    ):
        found = planned(
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
        yield (
            "Llama 3 405B",
            length,
            str(found.config.mesh),
            reported,
            half_teraflops(found),
        )


def main() -> None:
    """Prints the table, with each row's ratio to the first of its source."""
    bench.parser(__doc__).parse_args()
    heads = (
        "   tokens",
        "layout" + 46 * " ",
        "reported",
        "planned",
        "of the first",
        "of the first",
    )
    rows = Table("source          ", *heads)
    first: dict[str, tuple[float, float]] = {}
    for source, length, layout, reported, by_plan in table():
        base = first.setdefault(source, (reported, by_plan))
        shares = f"{reported / base[0]:.3f}", f"{by_plan / base[1]:.3f}"
        rows.row(
            source,
            f"{length:,}",
            layout,
            f"{reported:,.0f}",
            f"{by_plan:,.0f}",
            *shares,
        )


if __name__ == "__main__":
    main()
