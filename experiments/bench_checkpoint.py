"""What a checkpoint costs: python experiments/bench_checkpoint.py [--megabytes 300] [--directory DIR] [--orbax]

For a state on 8 fake CPU devices it prints how long a step is blocked and how long the whole save takes, on a mesh
whose weights lie as they are saved and on one where they must be rearranged, and its processor time; how fast a
checkpoint is verified, and the same bytes only read; how long it takes to restore onto several meshes, each in a
process of its own, and the peak of host memory meanwhile, beyond what the process had before, over the state that it
holds afterwards.

--orbax: saves and restores in turns with Orbax alone, which has neither digests nor retention, as it comes and with the
options that a checkpoint has. The state is noise, as one that was trained is: zeros would be compressed to nothing. The
medians, and the quickest, bear a machine that others use.
"""

import argparse
import gc
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from experiments import bench
from experiments.bench import Table, config_of, least, spent
from meshtrain.checkpoint import Checkpointer, arrays, digests
from meshtrain.config import replaced
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

WIDTH, D_FF, VOCABULARY = 512, 1024, 4096
LAYOUTS = {  # name -> (mesh, parallel)
    "2 x 2 x 2, ZeRO-1": ((2, 2, 2), {}),
    "8 x 1 x 1, ZeRO-3": ((8, 1, 1), {"zero_stage": 3}),
    "1 x 1 x 1": ((1, 1, 1), {}),
    "1 x 2 x 4, ZeRO-0": ((1, 2, 4), {"zero_stage": 0}),
    "2 x 2 x 2, interleaved": (
        (2, 2, 2),
        {"schedule": "interleaved", "virtual_stages": 2},
    ),
}
AS_IT_LIES, *_, REARRANGED = LAYOUTS


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument(
        "--directory", type=Path, help="where to write; default: a temporary directory"
    )
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--orbax", action="store_true", help="beside Orbax alone")
    parser.add_argument("--restore", metavar="LAYOUT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.restore:
        print(
            json.dumps(restore(options.directory, options.megabytes, options.restore))
        )
        return
    with bench.directory(options.directory) as root:
        if options.orbax:
            beside_orbax(root, options.megabytes, options.saves)
            return
        for layout in (REARRANGED, AS_IT_LIES):
            save(root / layout, options.megabytes, layout, options.saves)
        last = root / AS_IT_LIES / "checkpoints" / str(options.saves)
        verify(last)
        table = Table(
            "restored onto         ", "seconds", "state MB", "peak MB", "peak / state"
        )
        for layout in LAYOUTS:
            words = [
                "--restore",
                layout,
                "--directory",
                root / AS_IT_LIES,
                "--megabytes",
                options.megabytes,
            ]
            found = bench.in_process("experiments.bench_checkpoint", *words)
            sizes = [f"{found[name] / 1e6:.0f}" for name in ("state", "peak")]
            table.row(
                layout,
                f"{found['seconds']:.2f}",
                *sizes,
                f"{found['peak'] / found['state']:.2f}",
            )


def program(directory: Path, megabytes: int, layout: str) -> Program:
    """Returns a llama with `megabytes` of float32 masters and Adam moments."""
    mesh, parallel = LAYOUTS[layout]
    a_layer = 4 * WIDTH**2 + 3 * WIDTH * D_FF
    numbers = megabytes * 1e6 / 12
    model = {"layers": max(8, round((numbers - 2 * VOCABULARY * WIDTH) / a_layer))}
    model |= {"d_model": WIDTH, "heads": 8, "d_ff": D_FF, "vocab_size": VOCABULARY}
    axes = dict(zip(("data", "tensor", "pipeline"), mesh, strict=True))
    config = config_of(model, axes, 8, 64, {"microbatches": 1} | parallel, "float32")
    run = {"directory": str(directory), "fake_devices": 8}
    config = replaced(config, run=run, checkpoint={"keep": 1})
    return Program(config, make_mesh(config))


def save(root: Path, megabytes: int, layout: str, saves: int) -> None:
    built = program(root, megabytes, layout)
    checkpointer = Checkpointer(built.config, built)
    state = jax.block_until_ready(checkpointer.restore_or_init()[0])
    gc.collect()  # the states of the layout before
    shares = []
    table = Table(
        "save",
        "blocked ms",
        "whole ms",
        "blocked / whole",
        "CPU ms",
        title=f"saved from {layout}",
    )

    def saved(step: int) -> None:
        checkpointer.save(step, state, loss=1.0)
        checkpointer.wait()

    for step in range(1, saves + 1):
        took = spent(lambda step=step: saved(step))
        found = checkpointer.metrics()
        blocked = found["checkpoint_blocked_seconds"]
        whole = found["checkpoint_seconds"]
        shares.append(blocked / whole)
        times = (
            f"{1e3 * blocked:.1f}",
            f"{1e3 * whole:.0f}",
            f"{shares[-1]:.1%}",
            f"{1e3 * took.processor:.0f}",
        )
        table.row(step, *times)
    copying = least(
        lambda: jax.block_until_ready(jax.tree.map(lambda x: x.copy(), state))
    )
    asking = least(lambda: bool(built.is_finite(state)))
    told = f"a plain copy of the state: {1e3 * copying:.0f} ms; asking whether it is finite: {1e3 * asking:.0f} ms"
    print(f"median share blocked {statistics.median(shares):.1%} ({told})\n")
    checkpointer.close()


def beside_orbax(root: Path, megabytes: int, rounds: int) -> None:
    """Prints what saves and restores on 8 x ZeRO-3 take over those of Orbax alone."""
    built = program(root, megabytes, "8 x 1 x 1, ZeRO-3")
    checkpointer = Checkpointer(built.config, built)
    state = jax.block_until_ready(noise(checkpointer.restore_or_init()[0]))
    values = dict(checkpointer.converter.prepare(state, frozen=True))
    targets = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values
    )
    names = ("meshtrain", "Orbax as it comes", "Orbax, these options")
    blocked: dict[str, list[float]] = {name: [] for name in names}
    whole: dict[str, list[float]] = {name: [] for name in names}
    restored: dict[str, list[float]] = {name: [] for name in names}
    for step in range(1, rounds + 1):
        checkpointer.save(step, state, loss=1.0)
        checkpointer.wait()
        found = checkpointer.metrics()
        blocked[names[0]].append(found["checkpoint_blocked_seconds"])
        whole[names[0]].append(found["checkpoint_seconds"])
        for name, write in zip(names[1:], (ocp.save_async, arrays.write), strict=True):
            shutil.rmtree(root / name, ignore_errors=True)
            began = time.perf_counter()
            response = write(root / name, values)
            blocked[name].append(time.perf_counter() - began)
            response.result()
            whole[name].append(time.perf_counter() - began)
    checkpointer.close()
    del state, values
    loads: dict[str, Callable[[], Any]] = {
        names[1]: lambda: ocp.load(root / names[1], targets),
        names[2]: lambda: arrays.read(root / names[2], targets),
    }
    for _ in range(rounds):
        checkpointer = Checkpointer(built.config, built)
        loads[names[0]] = lambda opened=checkpointer: opened.restore_or_init()[0]
        for name in names:
            gc.collect()
            took = spent(lambda name=name: jax.block_until_ready(loads[name]()))
            restored[name].append(took.wall)
        checkpointer.close()
    table = Table(
        "ms, median (least)".ljust(22), "blocked", "whole save  ", "restore     "
    )
    for name in names:
        found_of = (blocked[name], whole[name], restored[name])
        table.row(
            name,
            *(
                f"{1e3 * statistics.median(x):.0f} ({1e3 * min(x):.0f})"
                for x in found_of
            ),
        )
    for name in names[1:]:
        words = []
        for what, times in (("whole save", whole), ("restore", restored)):
            median = statistics.median(times[names[0]]) / statistics.median(times[name])
            words.append(
                f"{what} {median:.2f} x (least {min(times[names[0]]) / min(times[name]):.2f})"
            )
        print(f"over {name}: {', '.join(words)}")


def noise(state: Any) -> Any:
    """Returns a state whose matrices, moments among them, are random."""
    key = jax.random.key(0)
    return jax.tree.map(
        lambda x: (
            jax.device_put(jax.random.normal(key, x.shape, x.dtype), x.sharding)
            if x.ndim > 1
            else x
        ),
        state,
    )


def verify(directory: Path) -> None:
    files = [p for p in directory.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files) / 1e9
    reading = size / least(lambda: [p.read_bytes() for p in files])
    verifying = size / least(lambda: digests.problems(directory))
    print(
        f"verified {1e3 * size:.0f} MB at {verifying:.2f} GB/s (only reading them: {reading:.2f} GB/s)"
    )


def restore(root: Path, megabytes: int, layout: str) -> dict[str, float]:
    built = program(root, megabytes, layout)
    checkpointer = Checkpointer(built.config, built)
    warm = jax.device_put(
        jax.numpy.ones((16, 16)), jax.NamedSharding(built.mesh, jax.P())
    )
    # The compiler's own memory is one that the step needs anyway.
    jax.block_until_ready(jax.jit(lambda x: jax.numpy.tanh(x @ x))(warm))
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    found: list[Any] = []
    took = spent(
        lambda: found.append(jax.block_until_ready(checkpointer.restore_or_init()[0]))
    )
    peak = memory("VmHWM")
    held = sum(
        shard.data.nbytes
        for x in jax.tree.leaves(found)
        for shard in x.addressable_shards
    )
    checkpointer.close()
    return {"seconds": took.wall, "state": held, "peak": peak - before}


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(
        next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    )


if __name__ == "__main__":
    main()
