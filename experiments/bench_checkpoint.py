"""What a checkpoint costs: python experiments/bench_checkpoint.py [--megabytes 300] [--directory DIR]

Prints, for a state on 8 fake CPU devices: how long a step is blocked and how long the whole save takes, on a mesh whose weights lie
as they are saved and on one where they must be rearranged, and what processor time it takes; how fast a checkpoint is verified, and how fast the same bytes are only
read; how long it takes to restore onto several meshes, and the peak of host memory meanwhile, beyond what the process had before,
over the state that it holds afterwards. Each restore is a process of its own.
"""

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from meshtrain.checkpoint import Checkpointer, digests
from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

WIDTH, D_FF, VOCABULARY = 512, 1024, 4096
LAYOUTS = {  # name -> (mesh, parallel)
    "2 x 2 x 2, ZeRO-1": ((2, 2, 2), {}),
    "8 x 1 x 1, ZeRO-3": ((8, 1, 1), {"zero_stage": 3}),
    "1 x 1 x 1": ((1, 1, 1), {}),
    "1 x 2 x 4, ZeRO-0": ((1, 2, 4), {"zero_stage": 0}),
    "2 x 2 x 2, interleaved": ((2, 2, 2), {"schedule": "interleaved", "virtual_stages": 2}),
}
AS_IT_LIES, *_, REARRANGED = LAYOUTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: a temporary directory")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--restore", default=None, metavar="LAYOUT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.restore:
        print(json.dumps(restore(options.directory, options.megabytes, options.restore)))
        return
    root = options.directory or Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
    try:
        for layout in (REARRANGED, AS_IT_LIES):
            shutil.rmtree(root / "checkpoints", ignore_errors=True)
            save(root, options.megabytes, layout, options.saves)
        verify(root / "checkpoints" / str(options.saves))
        print(f"\n{'restored onto':<24} {'seconds':>8} {'state MB':>9} {'peak MB':>8} {'peak / state':>13}")
        for layout in LAYOUTS:
            command = [
                sys.executable,
                __file__,
                "--restore",
                layout,
                "--directory",
                str(root),
                "--megabytes",
                str(options.megabytes),
            ]
            found = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            print(
                f"{layout:<24} {found['seconds']:8.2f} {found['state'] / 1e6:9.0f} {found['peak'] / 1e6:8.0f} "
                f"{found['peak'] / found['state']:13.2f}"
            )
    finally:
        if options.directory is None:
            shutil.rmtree(root)


def program(directory: Path, megabytes: int, layout: str) -> tuple[Config, Program]:
    """A llama with `megabytes` of float32 masters and Adam moments."""
    mesh, parallel = LAYOUTS[layout]
    per_layer = 4 * WIDTH**2 + 3 * WIDTH * D_FF
    layers = max(8, round((megabytes * 1e6 / 12 - 2 * VOCABULARY * WIDTH) / per_layer))
    config = load(
        {
            "run": {"directory": str(directory), "fake_devices": 8},
            "model": {"layers": layers, "d_model": WIDTH, "heads": 8, "d_ff": D_FF, "vocab_size": VOCABULARY},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {"microbatches": 1} | parallel,
            "train": {"global_batch_size": 8, "sequence_length": 64},
            "checkpoint": {"keep": 1},
        }
    )
    return config, Program(config, make_mesh(config))


def save(root: Path, megabytes: int, layout: str, saves: int) -> None:
    config, built = program(root, megabytes, layout)
    checkpointer = Checkpointer(config, built)
    state, _ = checkpointer.restore_or_init()
    jax.block_until_ready(state)
    gc.collect()  # the states of the layout before
    shares = []
    print(f"saved from {layout}")
    print(f"{'save':<8} {'blocked ms':>10} {'whole ms':>9} {'blocked / whole':>16} {'CPU ms':>7} {'MB':>7}")
    for step in range(1, saves + 1):
        began = time.process_time()
        checkpointer.save(step, state, loss=1.0)
        checkpointer.wait()
        spent = time.process_time() - began
        found = checkpointer.metrics()
        blocked, whole = found["checkpoint_blocked_seconds"], found["checkpoint_seconds"]
        shares.append(blocked / whole)
        print(
            f"{step:<8} {1e3 * blocked:10.1f} {1e3 * whole:9.0f} {blocked / whole:16.1%} {1e3 * spent:7.0f} "
            f"{found['checkpoint_bytes'] / 1e6:7.0f}"
        )
    copying = min(timed(lambda: jax.block_until_ready(jax.tree.map(lambda x: x.copy(), state))) for _ in range(3))
    asking = min(timed(lambda: bool(built.is_finite(state))) for _ in range(3))
    print(
        f"{'median':<8} {statistics.median(shares):37.1%}   (a plain copy of the state: {1e3 * copying:.0f} ms; "
        f"asking whether it is finite: {1e3 * asking:.0f} ms)\n"
    )
    checkpointer.close()


def verify(directory: Path) -> None:
    files = [p for p in directory.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    reading = min(timed(lambda: [p.read_bytes() for p in files]) for _ in range(3))
    verifying = min(timed(lambda: digests.problems(directory)) for _ in range(3))
    print(
        f"verified {size / 1e6:.0f} MB at {size / verifying / 1e9:.2f} GB/s (only reading them: {size / reading / 1e9:.2f} GB/s)"
    )


def timed(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def restore(root: Path, megabytes: int, layout: str) -> dict[str, float]:
    config, built = program(root, megabytes, layout)
    checkpointer = Checkpointer(config, built)
    warm = jax.device_put(jax.numpy.ones((16, 16)), jax.NamedSharding(built.mesh, jax.P()))
    jax.block_until_ready(
        jax.jit(lambda x: jax.numpy.tanh(x @ x))(warm)
    )  # the compiler's own memory, which the step needs anyway
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    began = time.perf_counter()
    state, _ = checkpointer.restore_or_init()
    jax.block_until_ready(state)
    seconds, peak = time.perf_counter() - began, memory("VmHWM")
    held = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards)
    checkpointer.close()
    return {"seconds": seconds, "state": held, "peak": peak - before}


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    main()
