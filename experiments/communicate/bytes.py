"""What a device sends for gradients in a step with each compression: in the compiled step, by the planner, and how much
less than float32.

    python -m experiments.communicate.bytes              ten compiled steps, some two minutes
    python -m experiments.communicate.bytes --seconds    what the planner says of Llama-3 8B's gradients on 512 H100

Read from the collectives in the HLO of whole train steps on 8 fake devices, ZeRO-1; nothing is run. Over data what
gathers weights is left out. `matrices` is the ratio of what is compressed alone; `all` has norms, which go as they are.
The planner's milliseconds are of all sums of gradients one after the other; in brackets those of encoding and decoding
among them.
"""

from collections import defaultdict

from experiments import bench
from experiments.bench import LLAMA_3, Table
from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.plan import gradient_traffic, named, pipeline
from meshtrain.step import Program

MODEL = {
    "layers": 4,
    "d_model": 512,
    "heads": 8,
    "kv_heads": 4,
    "d_ff": 1408,
    "vocab_size": 2048,
}
CASES = [
    *(
        (name, "data", 1)
        for name in ("none", "bfloat16", "float8", "int8", "int4", "topk", "powersgd")
    ),
    *(
        (name, over, 2)
        for name, over in (("none", "data"), ("int8", "data"), ("int8", "islands"))
    ),
]


def config_of(compression: str, over: str, islands: int) -> Config:
    return load(
        {
            "model": MODEL,
            "mesh": {"data": 8, "islands": islands},
            "parallel": {
                "zero_stage": 1,
                "reduce": {"compression": compression, "over": over},
            },
            "train": {"global_batch_size": 8, "sequence_length": 32},
        }
    )


def sent(config: Config) -> dict[tuple[str, bool], float]:
    """Bytes of gradients that a device sends in the compiled step, by axis, and whether they are compressed."""
    found: dict[tuple[str, bool], float] = defaultdict(float)
    axes = {
        flow.axis
        for flow in gradient_traffic.gradient_transfers(
            config, pipeline.iterations(config)
        )
    }
    least = 1024  # numbers for the norm and the loss are no gradients
    for c in Program(config, make_mesh(config)).collectives():
        if (
            c.axis in axes
            and (c.axis, c.kind) != ("data", "all-gather")
            and c.bytes >= least
        ):
            # Float32 that is summed over an axis over which gradients else are scattered: P and Q.
            thin = (
                c.kind == "all-reduce"
                and config.parallel.reduce.compression == "powersgd"
            )
            found[c.axis, c.dtype == "u8" or thin] += c.sent * c.times
    return found


def seconds() -> None:
    """Prints what the planner says, by how many islands there are and what is compressed."""
    names = ("none", "bfloat16", "int8", "int4", "powersgd")
    cluster = named("h100", 512)
    table = Table("islands", "over   ", *(name.ljust(8) for name in names))
    for islands, over in ((1, "data"), (64, "data"), (64, "islands")):
        row = []
        for name in names:
            config = load(
                {
                    "model": LLAMA_3["8B"],
                    "mesh": {"data": 512, "islands": islands},
                    "parallel": {
                        "zero_stage": 1,
                        "reduce": {"compression": name, "over": over},
                    },
                    "precision": {"compute": "bfloat16"},
                    "train": {"global_batch_size": 512, "sequence_length": 4096},
                }
            )
            spent, coding = gradient_traffic.seconds(config, cluster)
            row.append(f"{1000 * (spent + coding):.0f} ({1000 * coding:.0f})")
        table.row(islands, over, *row)


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--seconds",
        action="store_true",
        help="the planner's milliseconds, without compiling anything",
    )
    if parser.parse_args().seconds:
        seconds()
    else:
        compiled()


def compiled() -> None:
    """Prints what the compiled steps send."""
    heads = ("islands", " over data", "    across", "planner's", "    all", "matrices")
    table = Table("compression", "over   ", *heads)
    plain: dict[int, float] = {}
    for compression, over, islands in CASES:
        config = config_of(compression, over, islands)
        found = sent(config)
        total = sum(found.values())
        packed = sum(nbytes for (_, how), nbytes in found.items() if how)
        across = sum(nbytes for (axis, _), nbytes in found.items() if axis == "island")
        whole = plain.setdefault(islands, total)
        planned, _ = gradient_traffic.bytes_and_ratio(
            config, pipeline.iterations(config)
        )
        of_matrices = f"{(whole - total + packed) / packed:.2f} x" if packed else ""
        cells = [
            f"{total - across:,.0f}",
            f"{across:,.0f}",
            f"{planned / total - 1:+.3%}",
            f"{whole / total:.2f} x",
        ]
        table.row(compression, over if packed else "", islands, *cells, of_matrices)


if __name__ == "__main__":
    main()
