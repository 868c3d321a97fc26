"""What the saves of a LoRA run cost: python -m experiments.adopt.saves [--megabytes 200] [--saves 5] [--directory DIR]

A llama of so many MB whose projections have adapters of rank 8, on one CPU device. The base is written by the first two saves, so that
a flipped bit costs one of two copies, and linked by the others. Prints each save's bytes and seconds; what all steps take on the disk,
each file counted once; and what they would take if each were copied elsewhere.
"""

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import jax

from meshtrain.checkpoint import Checkpointer, digests, steps
from meshtrain.config import Config, load
from meshtrain.step import Program

WIDTH, D_FF, VOCABULARY = 512, 1536, 8192


def config(directory: Path, megabytes: int, saves: int) -> Config:
    layer = 4 * WIDTH**2 + 3 * WIDTH * D_FF
    layers = max(1, round((megabytes * 1e6 / 4 - 2 * VOCABULARY * WIDTH) / layer))
    return load(
        {
            "run": {"directory": str(directory)},
            "model": {"layers": layers, "d_model": WIDTH, "heads": 8, "d_ff": D_FF, "vocab_size": VOCABULARY},
            "lora": {"rank": 8},
            "data": {"source": "synthetic"},
            "checkpoint": {"keep": saves},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="of the base, in float32")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: a temporary directory")
    options = parser.parse_args()
    root = options.directory or Path(tempfile.mkdtemp(prefix="saves-"))
    try:
        measure(root, options.megabytes, options.saves)
    finally:
        if options.directory is None:
            shutil.rmtree(root)


def measure(root: Path, megabytes: int, saves: int) -> None:
    program = Program(config(root, megabytes, saves))
    sizes = {True: 0, False: 0}
    for weight in program.layout.flat:
        sizes[weight.trained] += program.layout.dtype(weight).itemsize * math.prod(weight.shape)
    print(f"base {sizes[False] / 1e6:.0f} MB, adapters {sizes[True] / 1e6:.1f} MB and two moments of each\n")
    checkpointer = Checkpointer(program.config, program)
    state = jax.block_until_ready(checkpointer.restore_or_init()[0])
    print(f"{'save':>4} {'MB written':>11} {'seconds':>8} {'of it blocked':>14}")
    for step in range(1, saves + 1):
        checkpointer.save(step, state, 1.0)
        checkpointer.wait()
        found = checkpointer.metrics()
        spent = f"{found['checkpoint_seconds']:8.2f} {found['checkpoint_blocked_seconds']:14.3f}"
        print(f"{step:>4} {found['checkpoint_bytes'] / 1e6:>11.1f} {spent}")
    checkpointer.close()
    directories = steps.numbered(root / "checkpoints")
    once = {p.stat().st_ino: p.stat().st_size for d in directories for p in d.rglob("*") if p.is_file()}
    apart = sum(digests.total_bytes(d) for d in directories)
    print(
        f"\n{len(directories)} steps: {sum(once.values()) / 1e6:.0f} MB on the disk, {apart / 1e6:.0f} MB if each is copied"
    )


if __name__ == "__main__":
    main()
