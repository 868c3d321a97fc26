"""Step time of layouts over that of plain single-device JAX on the same global batch, interleaved in one run.

    python experiments/bench_layouts.py                     every factorisation of 8 devices at ZeRO-1 and ZeRO-3
    python experiments/bench_layouts.py --by-hand           beside plain JAX that is sharded by hand too (`sharded_jax.py`)
    python experiments/bench_layouts.py --layouts '2,2,2 schedule=1f1b microbatches=8; 2,1,1,4 context_strategy=ring'

Eight fake devices share the machine's cores, so a ratio measures total work, not parallel speed: 1.0 means that the
layout adds none. `ratio` is of wall-clock, `CPU` of processor seconds, which tell the same and bear a busy machine
better; the rest is what a step took. By hand the first step has our loss, or the script ends; `speed` is the time that
a step takes by hand over ours: above 1 ours is faster.
"""

from statistics import median

import jax
import numpy as np

from experiments import bench, plain_jax, sharded_jax
from experiments.bench import HEADER, Stepping, compare, config_of
from meshtrain.config import Config
from meshtrain.mesh import fake_cpu_devices, make_mesh
from meshtrain.step import Program

MODEL = {
    "family": "llama",
    "layers": 8,
    "d_model": 256,
    "heads": 8,
    "d_ff": 1024,
    "vocab_size": 2048,
}
MESHES = [
    (8, 1, 1),
    (1, 8, 1),
    (1, 1, 8),
    (4, 2, 1),
    (4, 1, 2),
    (2, 4, 1),
    (1, 4, 2),
    (2, 1, 4),
    (1, 2, 4),
    (2, 2, 2),
]


def config(mesh: tuple[int, ...], parallel: dict, batch: int, length: int) -> Config:
    axes = ("data", "tensor", "pipeline", "context")
    degrees = dict(zip(axes, (*mesh, 1)[:4], strict=True))
    keys = {"schedule": "1f1b"} | parallel
    return config_of(MODEL, degrees, batch, length, keys, "float32")


def default_microbatches(mesh: tuple[int, ...], batch: int) -> int:
    """Twice the stages, as far as the batch goes; two sequences at a time without a pipeline."""
    mine = batch // mesh[0]
    return min(mine, 2 * mesh[2]) if mesh[2] > 1 else max(1, mine // 2)


def parse(text: str, batch: int) -> list[tuple[tuple[int, ...], dict]]:
    layouts = []
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        mesh_text, *options = entry.split()
        mesh = tuple(int(n) for n in mesh_text.split(","))
        parallel = dict(option.split("=", 1) for option in options)
        layouts.append(
            (mesh, {"microbatches": default_microbatches(mesh, batch), **parallel})
        )
    return layouts


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--layouts",
        help="'data,tensor,pipeline[,context] key=value ...; ...' with keys of parallel",
    )
    parser.add_argument(
        "--by-hand",
        action="store_true",
        help="beside each layout in plain JAX, sharded by hand",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    fake_cpu_devices(8)
    if options.layouts:
        layouts = parse(options.layouts, options.batch)
    else:
        layouts = [
            (
                mesh,
                {
                    "zero_stage": zero,
                    "microbatches": default_microbatches(mesh, options.batch),
                },
            )
            for zero in (1, 3)
            for mesh in MESHES
        ]
    random = np.random.default_rng(0)
    tokens = random.integers(
        0, MODEL["vocab_size"], (options.batch, options.length + 1)
    ).astype(np.int32)
    tokens, labels = tokens[:, :-1], tokens[:, 1:]

    reference, reference_state = plain_jax.make_step(
        config((1, 1, 1), {}, options.batch, options.length)
    )
    compiled = reference.lower(reference_state, tokens, labels).compile()
    plain = Stepping(compiled, reference_state, tokens, labels)
    print(f"reference temp {megabytes(compiled):.0f} MB", flush=True)
    columns = " | by hand: temp MB, speed, of processor" if options.by_hand else ""
    print(
        f"{'data,tensor,pipeline':22} {'options':44} {'temp MB':>8} {HEADER}{columns}"
    )
    for mesh, parallel in layouts:
        program = Program(
            c := config(mesh, parallel, options.batch, options.length), make_mesh(c)
        )
        state = program.init()
        batch = program.place({"tokens": tokens, "labels": labels})
        step = program.train_step.lower(state, batch).compile()
        ours, beside = Stepping(step, state, batch), ""
        if options.by_hand:
            canonical = jax.tree.map(np.asarray, program.layout.canonical(state.params))
            compiled, *inputs = sharded_jax.compiled(c, canonical, tokens, labels)
            by_hand = Stepping(compiled, inputs[0], *inputs[1])
            losses = float(ours()["loss"]), float(by_hand())
            if abs(losses[0] - losses[1]) > 1e-4:
                raise SystemExit(
                    f"the loss of the first step is {losses[0]}, and by hand {losses[1]}"
                )
            found = compare(by_hand, ours, options.rounds)
            beside = f" | {megabytes(compiled):5.0f} {1 / median(found.walls):6.2f} {1 / found.processor:6.2f}"
        text = " ".join(f"{k}={v}" for k, v in parallel.items())
        found = compare(plain, ours, options.rounds)
        print(
            f"{','.join(map(str, mesh)):22} {text:44} {megabytes(step):8.0f} {found}{beside}",
            flush=True,
        )


def megabytes(step: jax.stages.Compiled) -> float:
    """Temporary memory of a device."""
    return step.memory_analysis().temp_size_in_bytes / 1e6


if __name__ == "__main__":
    main()
