"""Muon's step beside AdamW's: processor seconds on this machine, of steps of 16,384 tokens that take turns.

python -m experiments.muon
"""

import numpy as np

from experiments import bench
from experiments.bench import Stepping, Table, config_of, turns, typical
from meshtrain.config import Config, replaced
from meshtrain.mesh import fake_devices
from meshtrain.step import Program

MODEL = {
    "layers": 8,
    "d_model": 256,
    "heads": 8,
    "kv_heads": 8,
    "d_ff": 1024,
    "vocab_size": 512,
}
MESHES = ({"data": 8}, {"data": 4, "tensor": 2})


def config_named(name: str, mesh: dict[str, int]) -> Config:
    """Returns the config of a case."""
    parallel = {"zero_stage": 1, "microbatches": 1}
    config = config_of(MODEL, mesh, 64, 256, parallel, "float32")
    return replaced(config, optimizer={"name": name})


def print_seconds(rounds: int) -> None:
    """Prints processor seconds of steps in turns."""
    table = Table("mesh".ljust(40), "adamw, s", "muon, s", "ratio")
    for mesh in MESHES:
        runs = {}
        for name in ("adamw", "muon"):
            program = Program(config_named(name, mesh))
            tokens = np.zeros((64, 256), "int32")
            batch = program.place({"tokens": tokens, "labels": tokens})
            runs[name] = Stepping(program.train_step, program.init(), batch)
        found = {
            name: typical(spent).processor
            for name, spent in turns(runs, rounds).items()
        }
        cells = (f"{seconds:.2f}" for seconds in found.values())
        table.row(mesh, *cells, f"{found['muon'] / found['adamw']:.3f}")


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns")
    options = parser.parse_args()
    fake_devices(8)
    print_seconds(options.rounds)


if __name__ == "__main__":
    main()
