"""Muon's step beside AdamW's: what a device sends in the compiled step, and seconds on this machine.

    python -m experiments.muon              bytes, twelve compiled steps of 8 fake devices
    python -m experiments.muon --seconds    steps of both in turns, 16,384 tokens each
    python -m experiments.muon --planned    of Llama-3 8B on 64 H100s over data the plan, and the program compiled
                                            for them (pip install -e '.[compile]'), by the planner's rates

`shards` is what a device sends of its own shards in float32, twice, as the formula has it.
"""

import numpy as np

from experiments import bench
from experiments.bench import Stepping, Table, turns, typical
from experiments.plan.timed import timed
from meshtrain.config import Config, load
from meshtrain.mesh import fake_devices
from meshtrain.plan import named, plan
from meshtrain.plan.compiled import compile_step
from meshtrain.plan.orthogonal import orthogonal_transfers
from meshtrain.step import Program

MODEL = {
    "layers": 8,
    "d_model": 256,
    "heads": 8,
    "kv_heads": 8,
    "d_ff": 1024,
    "vocab_size": 512,
}
MESHES = (
    {"data": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 2, "pipeline": 2},
)


def config_of(
    name: str, mesh: dict[str, int], stage: int, length: int, rows: int = 16
) -> Config:
    """Returns the config of a case."""
    return load(
        {
            "model": MODEL,
            "mesh": mesh,
            "optimizer": {"name": name},
            "parallel": {"zero_stage": stage, "microbatches": mesh.get("pipeline", 1)},
            "train": {"global_batch_size": rows, "sequence_length": length},
        }
    )


def print_bytes(length: int) -> None:
    """Prints MiB that a device sends in a step."""
    table = Table(
        "mesh".ljust(40), "ZeRO", "adamw, MiB", "muon, MiB", "ratio", "shards, MiB"
    )
    for mesh in MESHES:
        for stage in (1, 3):
            configs = [
                config_of(name, mesh, stage, length) for name in ("adamw", "muon")
            ]
            adamw, muon = (
                sum(Program(c).collectives().traffic.values()) for c in configs
            )
            shards = sum(transfer.sent for transfer in orthogonal_transfers(configs[1]))
            cells = (f"{n / 2**20:.1f}" for n in (adamw, muon))
            table.row(
                mesh, stage, *cells, f"{muon / adamw:.3f}", f"{shards / 2**20:.1f}"
            )


def print_seconds(rounds: int) -> None:
    """Prints processor seconds of steps in turns."""
    table = Table("mesh".ljust(40), "adamw, s", "muon, s", "ratio")
    for mesh in MESHES[:2]:
        runs = {}
        for name in ("adamw", "muon"):
            program = Program(config_of(name, mesh, 1, 256, 64))
            tokens = np.zeros((64, 256), "int32")
            batch = program.place({"tokens": tokens, "labels": tokens})
            runs[name] = Stepping(program.train_step, program.init(), batch)
        found = {
            name: typical(spent).processor
            for name, spent in turns(runs, rounds).items()
        }
        cells = (f"{seconds:.2f}" for seconds in found.values())
        table.row(mesh, *cells, f"{found['muon'] / found['adamw']:.3f}")


def print_planned() -> None:
    """Prints planned seconds of a step beside those of the compiled program."""
    words = [
        "mesh.data=64",
        "mesh.tensor=1",
        "mesh.pipeline=1",
        "parallel.schedule=auto",
    ]
    words += [
        "parallel.virtual_stages=1",
        "parallel.microbatches=1",
        "parallel.remat=full",
    ]
    words += ["parallel.sequence_parallel=false"]
    table = Table(
        "optimizer", "planned, s", "compiled, s", "off by", "optimizer's part, s"
    )
    cluster = named("h100", 64)
    for name in ("adamw", "muon"):
        config = load("configs/llama3_8b.yaml", [*words, f"optimizer.name={name}"])
        planned = plan(config, cluster)
        found = compile_step(config, "h100x64")
        program = timed(found.module, found.mesh, config, cluster).seconds
        seconds = (f"{s:.3f}" for s in (planned.seconds, program))
        off = f"{planned.seconds / program - 1:+.1%}"
        table.row(name.ljust(9), *seconds, off, f"{planned.time.optimizer:.3f}")


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--seconds", action="store_true", help="time steps in the place of bytes"
    )
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of a row, for bytes"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns, for seconds")
    parser.add_argument(
        "--planned", action="store_true", help="8B on 64 described H100s"
    )
    options = parser.parse_args()
    if options.planned:
        return print_planned()
    fake_devices(8)
    if options.seconds:
        print_seconds(options.rounds)
    else:
        print_bytes(options.length)


if __name__ == "__main__":
    main()
