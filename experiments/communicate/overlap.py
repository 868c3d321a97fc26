"""How much of what is sent over data travels under compute, in the program that XLA's CUDA compiler makes for described
H100s.

    python -m experiments.communicate.overlap                           all layouts, up to a minute each
    python -m experiments.communicate.overlap 8b --set parallel.zero_stage=2

Needs the compiler (pip install -e '.[compile]') and no GPU. Read from the order in which the program is issued
(`experiments.plan.timed`):

    GB           of the arrays that a device gathers, scatters or sums over data (and islands) in a step
    under        share of these bytes with a matrix product between start and done
    hidden       share of their seconds in which the device goes on, by the planner's rates
    waits        seconds of a step that the device waits for them
    step, MFU    of the whole program, and what the planner says of it
"""

from collections import defaultdict

import yaml

from experiments import bench
from experiments.bench import LLAMA_3, Table, config_of
from experiments.plan.timed import CollectiveTime, timed
from meshtrain.config import Config, load
from meshtrain.mesh import DATA, ISLAND, TENSOR
from meshtrain.plan import named, plan
from meshtrain.plan.compiled import Compiled, compile_step

# model, mesh, sequences in a batch, parallel's keys
LAYOUTS = yaml.safe_load("""
8b: [8B, {data: 8, tensor: 8}, 32, {microbatches: 4}]
8b one microbatch: [8B, {data: 8, tensor: 8}, 8, {}]
8b islands: [8B, {data: 16, tensor: 4, islands: 2}, 32, {microbatches: 2, remat: selective}]
8b ZeRO-0: [8B, {data: 8, tensor: 8}, 16, {microbatches: 2, zero_stage: 0}]
8b ZeRO-3: [8B, {data: 64}, 64, {zero_stage: 3, sequence_parallel: false, remat: selective}]
# the best that searches found
70b: [70B, {data: 32, tensor: 4, pipeline: 4}, 512, {microbatches: 16, schedule: interleaved, virtual_stages: 5, remat: selective}]
405b: [405B, {data: 128, tensor: 8, pipeline: 16}, 2048, {microbatches: 16, schedule: interleaved, virtual_stages: 8, remat: selective}]
""")


def layout_config(layout: str, changes: list[str]) -> Config:
    model, mesh, batch, parallel = LAYOUTS[layout]
    keys = {"sequence_parallel": True, "remat": "none"} | parallel
    if model == "405B":
        keys["layer_split"] = [0, *[1] * 126, 0]
    config = config_of(LLAMA_3[model], mesh, batch, 8192, keys)
    return load(config, changes) if changes else config


def sent_over(
    axis: str, config: Config, compiled: Compiled
) -> tuple[dict[str, CollectiveTime], float]:
    """Returns what is sent over an axis (over data: and islands), by kind, and the seconds of the whole program."""
    found = timed(
        compiled.module, compiled.mesh, config, named("h100", config.mesh.devices)
    )
    wanted = {DATA, ISLAND} if axis == DATA else {axis}
    kinds: dict[str, CollectiveTime] = defaultdict(CollectiveTime)
    for (axes, kind), sent in found.sent.items():
        if set(axes.split("+")) <= wanted:
            kinds[kind].add(sent)
            kinds["all"].add(sent)
    return kinds, found.seconds


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "layouts",
        nargs="*",
        metavar="LAYOUT",
        help=f"of {', '.join(LAYOUTS)}; all, if none is given",
    )
    parser.add_argument(
        "--over",
        choices=(DATA, TENSOR),
        default=DATA,
        help="the axis whose messages are looked at",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="changes a key of each config",
    )
    options = parser.parse_args()
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(
            f"there is no layout {', '.join(sorted(unknown))}; legal are {', '.join(LAYOUTS)}."
        )
    heads = (
        "    GB",
        "under",
        "hidden",
        "waits, s",
        "planned",
        "step, s",
        "planned",
        "  MFU",
        "planned",
        "temp GiB",
    )
    table = Table("layout           ", "kind              ", *heads)
    for layout in options.layouts or LAYOUTS:
        config = layout_config(layout, options.set)
        compiled = compile_step(config, f"h100x{config.mesh.devices}")
        kinds, seconds = sent_over(options.over, config, compiled)
        planned = plan(config, named("h100", config.mesh.devices))
        for kind, sent in sorted(
            kinds.items(), key=lambda item: (item[0] == "all", item[0])
        ):
            hidden = 1 - sent.waited / sent.seconds
            cells = [
                f"{sent.bytes / 1e9:.2f}",
                f"{sent.under / sent.bytes:.0%}",
                f"{hidden:.0%}",
                f"{sent.waited:.4f}",
            ]
            whole = [""] * 6
            if kind == "all":
                reached = planned.mfu * planned.seconds / seconds
                whole = [
                    f"{getattr(planned.time, options.over):.4f}",
                    f"{seconds:.4f}",
                    f"{planned.seconds:.4f}",
                ]
                whole += [
                    f"{reached:.1%}",
                    f"{planned.mfu:.1%}",
                    f"{compiled.temp_bytes / 2**30:.2f}",
                ]
            table.row(layout, kind, *cells, *whole)


if __name__ == "__main__":
    main()
