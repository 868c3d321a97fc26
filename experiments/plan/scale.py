"""How planned and published steps grow with devices that each have as much to do: `python -m experiments.plan.scale`.

Rows of data parallelism over many GPUs and of a small model whose loss is fused, held out of every fit:

    fms-fsdp     foundation-model-stack/fms-fsdp, README.md: Llama-2 on 128 A100s and 96 H100s, rows of 4,096, two a device, compiled, FSDP
                 (7B in each node alone, planned over all); the share of blocks that are computed again is what its HFU
                 is above its MFU, of a third of the products
    TinyLlama    jzhang38/TinyLlama, README.md and pretrain/tinyllama.py: 1.1B on 16 A100s of 40 GB, 8 rows of 2,048, FSDP; norms, rotation,
                 gate and loss fused (flash-attention: logits of 16 bits read, and their gradient put in their place)
"""

import collections
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments import bench
from experiments.bench import Table, config_of

from . import sources
from .published import COMPILED, EAGER_A100, FUSED, Run

# layers, d_model, heads, kv_heads, d_ff
SHAPES = {
    "1.1B": (22, 2048, 32, 4, 5632),
    "7B": (32, 4096, 32, 32, 11008),
    "13B": (40, 5120, 40, 40, 13824),
    "34B": (48, 8192, 64, 8, 22016),
    "70B": (80, 8192, 64, 8, 28672),
}
COMPILED_A100 = replace(EAGER_A100, **FUSED, loss_passes=3)
# GPU, how many, model, HFU / MFU, tokens/s a GPU
FMS = (
    ("a100-80", 128, "7B", 0.68 / 0.68, 4550),
    ("a100-80", 128, "13B", 0.69 / 0.61, 2150),
    ("a100-80", 128, "34B", 0.74 / 0.55, 820),
    ("a100-80", 128, "70B", 0.74 / 0.55, 410),
    ("h100", 96, "7B", 0.46 / 0.46, 9600),
    ("h100", 96, "13B", 0.46 / 0.43, 4850),
    ("h100", 96, "34B", 0.49 / 0.38, 1830),
    ("h100", 96, "70B", 0.47 / 0.38, 890),
)


def runs() -> Iterator[Run]:
    """Yields the rows that are held out."""
    for accelerator, devices, model, counted, reported in FMS:
        again = min(1.0, 3 * (counted - 1))
        profile = COMPILED_A100 if accelerator == "a100-80" else COMPILED
        # the last product is not computed again, a quarter of a block's
        recomputes = 0.75 * again, again, again
        profile = replace(profile, recomputes=recomputes, gradient_bytes=2)
        sizes = devices, 2 * devices, 4096, 1
        yield _run("fms-fsdp", model, accelerator, profile, sizes, reported)
    fused = replace(COMPILED_A100, loss_passes=1.5, recomputes=(0, 0, 0))
    sizes = 16, 1024, 2048, 8
    yield _run("TinyLlama", "1.1B", "a100-40", fused, sizes, 24000)


def _run(
    source: str,
    model: str,
    accelerator: str,
    profile: Any,
    sizes: tuple[int, int, int, int],
    reported: float,
) -> Run:
    """`sizes`: devices, sequences a step and their length, microbatches."""
    devices, batch, length, microbatches = sizes
    names = "layers", "d_model", "heads", "kv_heads", "d_ff"
    shape = dict(zip(names, SHAPES[model], strict=True)) | {"vocab_size": 32000}
    parallel = {"zero_stage": 3, "zero_hold": False, "remat": "full"}
    parallel["microbatches"] = microbatches
    config = config_of(shape, {"data": devices}, batch, length, parallel)
    seconds = batch * length / devices / reported
    name = f"{model} on {devices}"
    words = f"{reported:,.0f} tokens/s"
    return Run(source, name, config, accelerator, profile, seconds, words)


def series() -> list[list[Run]]:
    """Returns runs that differ in the devices alone, and in how many sequences all have, by devices."""
    found: dict[tuple, list[Run]] = collections.defaultdict(list)
    for run in sources.every():
        c = run.config
        same = (
            replace(c.mesh, data=1),
            replace(c.parallel, experts=None),
            replace(c.train, global_batch_size=1),
            c.train.global_batch_size / c.mesh.devices,
            c.model,
            run.profile,
        )
        found[(run.source, run.accelerator, repr(same))].append(run)
    rows = [
        sorted(runs, key=lambda r: r.config.mesh.devices) for runs in found.values()
    ]
    return [
        row for row in rows if row[0].config.mesh.devices < row[-1].config.mesh.devices
    ]


def unplanned(runs: list[Run]) -> float:
    """Returns by which share more than planned a step grows with each doubling of the devices."""
    first, *_, last = runs
    devices = last.config.mesh.devices / first.config.mesh.devices
    measured, planned = (
        last.seconds / first.seconds,
        last.predicted() / first.predicted(),
    )
    return math.log(measured / planned) / math.log2(devices)


def growth() -> dict[tuple[str, str], list[float]]:
    """Returns `unplanned` of each series by source and GPU."""
    found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for runs in series():
        found[runs[0].source, runs[0].accelerator].append(unplanned(runs))
    return found


def main() -> None:
    bench.parser(__doc__).parse_args()
    table = Table("source       ", "run          ", "GPU    ", "planned", "off by")
    for run in runs():
        planned = run.predicted()
        error = f"{planned / run.seconds - 1:+.1%}"
        table.row(run.source, run.name, run.accelerator, f"{planned:.2f} s", error)
    heads = ("GPU    ", "devices     ", "measured", "planned", "unplanned a doubling")
    table = Table("source       ", "first run                     ", *heads)
    for found in series():
        first, *_, last = found
        devices = f"{first.config.mesh.devices:,} to {last.config.mesh.devices:,}"
        measured = f"{last.seconds / first.seconds - 1:+.1%}"
        planned = f"{last.predicted() / first.predicted() - 1:+.1%}"
        more = f"{unplanned(found):+.2%}"
        named = first.source, first.name, first.accelerator
        table.row(*named, devices, measured, planned, more)
    for (source, accelerator), shares in growth().items():
        middle = f"{statistics.median(shares):+.2%}"
        print(f"{source}, {accelerator}: {len(shares)} series, {middle} in the median")


if __name__ == "__main__":
    main()
