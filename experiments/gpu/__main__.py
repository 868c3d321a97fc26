"""What runs of meshtrain take on one real GPU, beside what the planner and the compiler said of them.

    python -m experiments.gpu speed [CASE ...]    layers of real models: seconds and bytes of a step, measured and planned
    python -m experiments.gpu trace CASE          the kernels of one step, by what they are for
    python -m experiments.gpu rates               what the GPU itself gives: products of many shapes, and a copy

Each case runs in a process of its own, which is this module called with `one`. `--out DIR` also writes JSON. `meshtrain check-gpu` compares losses with those of the CPU.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments import bench
from experiments.bench import Table
from experiments.gpu.cases import SPEED, Case
from meshtrain import xla

STEPS = 12
LIMIT = 120  # seconds of a case
# In the names of kernels: of cuBLASLt, of XLA's and our own in Triton; of cuDNN.
WORDS = {
    "products": ("nvjet", "gemm", "product_kernel", "weight_kernel"),
    "attention": ("sdpa", "fmha", "cudnn"),
    "copies": ("memcpy", "memset"),
}


def _batch(case: Case, random: Any) -> dict[str, Any]:
    tokens = random.integers(
        0, case.model["vocab_size"], (case.rows, case.tokens + 1)
    ).astype("int32")
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


class Run:
    """A case, compiled on the GPU with its state: by the program, or by plain JAX with cuDNN's attention and whole
    logits.
    """

    def __init__(self, case: Case) -> None:
        import jax
        import numpy as np

        from meshtrain.config import load
        from meshtrain.step import Program

        self.config = load(case.config())
        batch = _batch(case, np.random.default_rng(0))
        if case.plain:
            from experiments import plain_jax

            step, self.state = plain_jax.make_step(self.config, "cudnn")
            self.batch: tuple[Any, ...] = tuple(map(jax.device_put, batch.values()))
        else:
            program = Program(self.config)
            step, self.state, self.batch = (
                program.train_step,
                program.init(),
                (program.place(batch),),
            )
        began = time.perf_counter()
        self.step = step.lower(self.state, *self.batch).compile()
        self.compile_seconds = time.perf_counter() - began
        self.device = jax.devices()[0]

    def __call__(self) -> float:
        """Takes a step and returns its seconds."""
        import jax

        began = time.perf_counter()
        self.state, measured = jax.block_until_ready(self.step(self.state, *self.batch))
        self.loss = float(measured["loss"] if isinstance(measured, dict) else measured)
        return time.perf_counter() - began

    def kernels(self) -> list[tuple[str, str, int, float]]:
        """Takes a step and returns its kernels by name, and that of their instruction or command buffer: how many, and
        milliseconds.
        """
        import jax

        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                self()
            [file] = Path(directory).rglob("*.xplane.pb")
            data, found = (
                jax.profiler.ProfileData.from_file(str(file)),
                defaultdict[tuple[str, str], list[float]](list),
            )
            for plane in data.planes:
                for stream in (
                    plane.lines if plane.name.startswith("/device:GPU") else ()
                ):
                    for event in (
                        stream.events if stream.name.startswith("Stream") else ()
                    ):
                        found[
                            event.name, str(dict(event.stats).get("hlo_op", ""))
                        ].append(event.duration_ns / 1e6)
        return sorted(
            ((*key, len(ms), sum(ms)) for key, ms in found.items()),
            key=lambda kernel: -kernel[-1],
        )


def by_kind(kernels: Sequence[tuple[str, str, int, float]]) -> dict[str, float]:
    """Returns milliseconds in products, attention, copies, and passes over memory."""
    found = dict.fromkeys(WORDS, 0.0) | {"memory": 0.0}
    for name, _, _, ms in kernels:
        kind = next(
            (
                kind
                for kind, words in WORDS.items()
                if any(word in name.lower() for word in words)
            ),
            "memory",
        )
        found[kind] += ms
    return found


def speed(name: str) -> dict[str, Any]:
    """Returns what a step of a case takes and holds, and what was planned."""
    from meshtrain.plan import shapes
    from meshtrain.plan.estimate import plan

    run = Run(SPEED[name])
    run()
    seconds = [run() for _ in range(STEPS)]
    planned = plan(run.config, "h100")
    held = run.step.memory_analysis()
    flops = shapes.model_flops(run.config)
    return {
        "case": name,
        "card": run.device.device_kind,
        "seconds": median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "planned": planned.seconds,
        "parts": dict(planned.time.parts()),
        "mfu": flops / median(seconds) / planned.cluster.accelerator.flops("bfloat16"),
        "planned_mfu": flops
        / planned.seconds
        / planned.cluster.accelerator.flops("bfloat16"),
        "tokens_per_second": SPEED[name].rows * SPEED[name].tokens / median(seconds),
        "bytes": held.argument_size_in_bytes
        + held.temp_size_in_bytes
        + held.output_size_in_bytes
        - held.alias_size_in_bytes,
        "peak": run.device.memory_stats()["peak_bytes_in_use"],
        "planned_bytes": planned.bytes,
        "compile_seconds": run.compile_seconds,
        "loss": run.loss,
        "kernels": by_kind(run.kernels()),
    }


def line(r: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a case."""
    seconds = (f"{1e3 * r[name]:.1f}" for name in ("seconds", "planned"))
    held = (f"{r[name] / 2**30:.1f}" for name in ("bytes", "peak", "planned_bytes"))
    reached = f"{r['planned'] / r['seconds']:.3f}", f"{100 * r['mfu']:.1f}"
    speed = f"{r['tokens_per_second']:.0f}"
    return (*seconds, *reached, speed, *held, f"{r['compile_seconds']:.1f}")


def each(names: Sequence[str], out: Path | None) -> int:
    """Runs each case in a process of its own; returns how many failed."""
    failed = 0
    heads = "step ms", "planned", "ratio", "MFU %", "tokens/s", "   GiB", "  peak"
    table = Table("case".ljust(22), *heads, "planned", "compiled in s")
    for name in names:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "experiments.gpu", "one", name],
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            said, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired:
            code, done = 1, None
        if code:
            failed += 1
            print(
                f"{name:22} failed: {done.stderr[-1500:] if done else f'more than {LIMIT} s'}",
                flush=True,
            )
            continue
        row = json.loads(said.splitlines()[-1])
        table.row(row["case"], *line(row))
        if out:
            with (out / "speed.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    return failed


def trace(name: str) -> None:
    """Prints the kernels of a step that take longest."""
    run = Run(SPEED[name])
    run()
    seconds, kernels = run(), run.kernels()
    print(
        f"{name}: {1e3 * seconds:.1f} ms, kernels {sum(ms for *_, ms in kernels):.1f}"
    )
    for kernel, operation, count, ms in kernels[:40]:
        print(f"{ms:8.2f} ms {count:4}  {kernel[:70]:70} {operation}")


def rates() -> None:
    """Prints TFLOP/s of products in bfloat16 and float8 by shape, and what a copy moves."""
    import jax
    import jax.numpy as jnp

    def timed(function: Any, *arrays: Any) -> float:
        run = jax.jit(function)
        jax.block_until_ready(run(*arrays))
        found = []
        for _ in range(5):
            began = time.perf_counter()
            results = [run(*arrays) for _ in range(10)]
            jax.block_until_ready(results[-1])
            found.append((time.perf_counter() - began) / 10)
            del results
        return median(found)

    for m, k, n in (
        (8192, 8192, 8192),
        (16384, 4096, 6144),
        (16384, 4096, 14336),
        (16384, 14336, 4096),
        (16384, 4096, 4096),
        (4096, 16384, 14336),
        (16384, 2048, 2048),
        (16384, 768, 3072),
        (2048, 4096, 14336),
        (1024, 4096, 4096),
        (16384, 2048, 768),
    ):
        a = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
        b = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
        a8, b8 = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
        wide = timed(lambda a, b: a @ b, a, b)
        narrow = timed(
            lambda a, b: jax.lax.dot_general(
                a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16
            ),
            a8,
            b8,
        )
        work = 2e-12 * m * k * n
        speeds = f"bfloat16 {work / wide:6.0f}  float8 {work / narrow:6.0f} TFLOP/s"
        print(f"{m:6} {k:6} {n:6}  {speeds}", flush=True)
    x = jnp.ones(2**30, jnp.float32)
    moved = 2 * x.nbytes / timed(lambda x: x + 1, x)
    print(f"copy {moved / 1e12:.2f} TB/s")


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument("verb", choices=["speed", "trace", "rates", "one"])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args()
    xla.ask_for_pool()
    if unknown := set(options.cases) - SPEED.keys():
        parser.error(f"no case {sorted(unknown)}; there are {', '.join(SPEED)}.")
    if options.verb != "one" and not shutil.which("nvidia-smi"):
        parser.error(
            f"{options.verb} needs an NVIDIA GPU, and there is none on this machine."
        )
    names = options.cases or list(SPEED)
    if options.verb == "one":
        print(json.dumps(speed(names[0])))
    elif options.verb == "speed":
        return each(names, options.out)
    elif options.verb == "trace":
        trace(names[0])
    else:
        rates()
    return 0


if __name__ == "__main__":
    sys.exit(main())
