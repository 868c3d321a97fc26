"""How much of what is sent over data travels under compute, in the program that XLA's CUDA compiler makes for described H100s.

    python -m experiments.communicate.overlap                           all layouts, up to a minute each
    python -m experiments.communicate.overlap 8b --set parallel.zero_stage=2

Needs the compiler (pip install 'meshtrain[compile]') and no GPU. Read from the order in which the program is issued (`experiments.plan.timed`):

    GB           of the arrays that a device gathers, scatters or sums over data (and islands) in a step
    under        share of these bytes with a matrix product between start and done
    hidden       share of their seconds in which the device goes on, by the planner's rates
    waits        seconds of a step that the device waits for them
    step, MFU    of the whole program, and what the planner says of it
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.bench_program import LLAMA, compiled
from experiments.plan.timed import CollectiveTime, timed
from meshtrain.config import Config, load
from meshtrain.hlo.module import Module
from meshtrain.mesh import DATA, ISLAND, TENSOR, make_mesh
from meshtrain.plan import named, plan
from meshtrain.plan.compiled import described_devices
from meshtrain.step import Program

SMALL = {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 14336}
MIDDLE = {"layers": 80, "d_model": 8192, "heads": 64, "d_ff": 28672}
# model, (data, tensor, pipeline), islands, sequences in a batch, parallel's keys
LAYOUTS: dict[str, tuple[dict[str, int], tuple[int, int, int], int, int, dict[str, Any]]] = {
    "8b": (SMALL, (8, 8, 1), 1, 32, {"microbatches": 4}),
    "8b one microbatch": (SMALL, (8, 8, 1), 1, 8, {}),
    "8b islands": (SMALL, (16, 4, 1), 2, 32, {"microbatches": 2, "remat": "selective"}),
    "8b ZeRO-0": (SMALL, (8, 8, 1), 1, 16, {"microbatches": 2, "zero_stage": 0}),
    "8b ZeRO-3": (SMALL, (64, 1, 1), 1, 64, {"zero_stage": 3, "sequence_parallel": False, "remat": "selective"}),
    # the best that searches found
    "70b": (
        MIDDLE, (32, 4, 4), 1, 512,
        {"microbatches": 16, "schedule": "interleaved", "virtual_stages": 5, "remat": "selective"},
    ),
    "405b": (
        {"layers": 126, "d_model": 16384, "heads": 128, "d_ff": 53248}, (128, 8, 16), 1, 2048,
        {"microbatches": 16, "schedule": "interleaved", "virtual_stages": 8, "remat": "selective",
         "layer_split": [0, *[1] * 126, 0]},
    ),
}  # fmt: skip


def config_of(layout: str, changes: list[str]) -> Config:
    model, (data, tensor, pipeline), islands, batch, parallel = LAYOUTS[layout]
    given = {
        "model": LLAMA | model,
        "mesh": {"data": data, "tensor": tensor, "pipeline": pipeline, "islands": islands},
        "parallel": {"sequence_parallel": True, "remat": "none"} | parallel,
        "precision": {"compute": "bfloat16"},
        "train": {"global_batch_size": batch, "sequence_length": 8192},
    }
    return load(given, changes)


def sent_over(axis: str, config: Config, module: Module, program: Program) -> tuple[dict[str, CollectiveTime], float]:
    """What is sent over an axis (over data: and islands), by kind, and the seconds of the whole program."""
    found = timed(module, program.mesh, config, named("h100", config.mesh.devices))
    kinds: dict[str, CollectiveTime] = defaultdict(CollectiveTime)
    for (axes, kind), sent in found.sent.items():
        if set(axes.split("+")) <= ({DATA, ISLAND} if axis == DATA else {axis}):
            kinds[kind].add(sent)
            kinds["all"].add(sent)
    return kinds, found.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}; all, if none is given")
    parser.add_argument("--over", choices=(DATA, TENSOR), default=DATA, help="the axis whose messages are looked at")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes a key of each config")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keeps the compiled programs, and takes what lies there"
    )
    options = parser.parse_args()
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"there is no layout {', '.join(sorted(unknown))}; legal are {', '.join(LAYOUTS)}.")
    print(
        "layout            kind                GB   under  hidden  waits, s   planned   step, s  planned   MFU  planned   temp GiB"
    )
    for layout in options.layouts or LAYOUTS:
        config = config_of(layout, options.set)
        program = Program(config, make_mesh(config, described_devices("h100", config.mesh.devices)))
        text, facts = compiled(layout, program, options.keep)
        kinds, seconds = sent_over(options.over, config, Module(text), program)
        planned = plan(config, named("h100", config.mesh.devices))
        for kind, sent in sorted(kinds.items(), key=lambda item: (item[0] == "all", item[0])):
            hidden = 1 - sent.waited / sent.seconds
            line = f"{layout:17} {kind:15} {sent.bytes / 1e9:6.2f}  {sent.under / sent.bytes:5.0%}  {hidden:5.0%}  {sent.waited:8.4f}"
            if kind == "all":
                line += f"  {getattr(planned.time, options.over):8.4f}  {seconds:8.4f} {planned.seconds:8.4f} {planned.mfu * planned.seconds / seconds:5.1%}    {planned.mfu:5.1%}   {facts['temp'] / 2**30:8.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
