"""What the planner says of the sums of Llama-3 8B's gradients on 512 H100s, by compression: milliseconds of all of them
one after the other; in brackets those of encoding and decoding among them.

    python -m experiments.communicate.bytes
"""

from experiments import bench
from experiments.bench import LLAMA_3, Table, config_of
from meshtrain.plan import gradient_traffic, named

NAMES = ("none", "bfloat16", "int8", "int4", "powersgd")


def main() -> None:
    """Prints a row for each number of islands and what is compressed over."""
    bench.parser(__doc__).parse_args()
    cluster = named("h100", 512)
    table = Table("islands", "over   ", *(name.ljust(8) for name in NAMES))
    for islands, over in ((1, "data"), (64, "data"), (64, "islands")):
        row = []
        for name in NAMES:
            mesh = {"data": 512, "islands": islands}
            reduce = {"compression": name, "over": over}
            parallel = {"zero_stage": 1, "reduce": reduce}
            config = config_of(LLAMA_3["8B"], mesh, 512, 4096, parallel)
            spent, coding = gradient_traffic.seconds(config, cluster)
            row.append(f"{1000 * (spent + coding):.0f} ({1000 * coding:.0f})")
        table.row(islands, over, *row)


if __name__ == "__main__":
    main()
