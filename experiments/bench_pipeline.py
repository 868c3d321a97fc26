"""The pipeline executor, measured. (`tests/parallel/pipeline/test_execute.py` holds its memory and its program's size.)

    python experiments/bench_pipeline.py time         step time over plain single-device JAX on the same global batch, interleaved
    python experiments/bench_pipeline.py large        a 62-billion-parameter model on 8 x 8 x 8 devices, compiled and never allocated
    python experiments/bench_pipeline.py vocabulary   Llama-3 8B on 4 stages: compiled matrix products per stage, spread and edge

`vocabulary` compiles for described GPUs (pip install -e '.[compile]', no GPU needed), `large` for fake CPU devices
and, where that is installed, for GPUs.
"""

import dataclasses
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from experiments import bench, plain_jax
from experiments.bench import (
    HEADER,
    LLAMA_3,
    Stepping,
    Table,
    compare,
    config_of,
    spent,
)
from experiments.plan.work import Work
from meshtrain.config import Config, load
from meshtrain.hlo import Module
from meshtrain.mesh import fake_cpu_devices, make_mesh
from meshtrain.plan.compiled import described_devices
from meshtrain.schedule.generators import SCHEDULES, legal_chunks
from meshtrain.schedule.phases import ops_per_clock, phases
from meshtrain.step import Program

MEDIUM = {"layers": 8, "d_model": 256, "heads": 8, "d_ff": 1024, "vocab_size": 2048}
LARGE = {
    "layers": 80,
    "d_model": 8192,
    "heads": 64,
    "kv_heads": 8,
    "d_ff": 24576,
    "vocab_size": 128256,
}


def configuration(
    schedule: str,
    microbatches: int,
    model: dict[str, Any],
    mesh: tuple[int, int, int] = (1, 1, 4),
    length: int = 256,
    compute: str = "float32",
    **parallel: Any,
) -> Config:
    axes = dict(zip(("data", "tensor", "pipeline"), mesh, strict=True))
    chosen = {"schedule": schedule, "microbatches": microbatches}
    chosen["virtual_stages"] = legal_chunks(schedule) or 2
    rows = mesh[0] * microbatches
    return config_of(model, axes, rows, length, chosen | parallel, compute)


def batch_of(program: Program) -> dict[str, jax.Array]:
    config = program.config
    shape = (config.train.global_batch_size, config.train.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, shape, np.int32
    )
    return jax.device_put(
        {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, program.batch_sharding
    )


def step_time(schedules: list[str], rounds: int) -> None:
    microbatches, length = 16, 256
    single = dataclasses.replace(
        configuration("1f1b", microbatches, MEDIUM), mesh=load({}).mesh
    )
    reference, reference_state = plain_jax.make_step(single)
    plain: Stepping | None = None
    print(
        f"4 stages, {microbatches} microbatches of 1 x {length}; step over one device, median of {rounds} rounds"
    )
    print(f"{'schedule':16} {HEADER}")
    for schedule in schedules:
        program = Program(configuration(schedule, microbatches, MEDIUM))
        state, batch = program.init(), batch_of(program)
        if plain is None:
            tokens, labels = (np.asarray(batch[name]) for name in ("tokens", "labels"))
            compiled = reference.lower(reference_state, tokens, labels).compile()
            plain = Stepping(compiled, reference_state, tokens, labels)
        step = program.train_step.lower(state, batch).compile()
        print(
            f"{schedule:16} {compare(plain, Stepping(step, state, batch), rounds)}",
            flush=True,
        )


def large() -> None:
    given = {"virtual_stages": 1, "sequence_parallel": True, "remat": "full"}
    config = configuration("1f1b", 32, LARGE, (8, 8, 8), 4096, "bfloat16", **given)
    kinds = {"fake CPU devices": None}
    if find_spec("jax_cuda12_plugin"):
        kinds["described GPUs"] = described_devices("h100", 512)
    title = "1f1b on 512 devices: processor seconds to lower and to compile, GiB of state and temporaries on a device"
    table = Table(
        "devices         ",
        "parameters",
        "lower",
        "compile",
        "state",
        " temp",
        title=title,
    )
    for kind, devices in kinds.items():
        program = Program(config, make_mesh(config, devices))
        made: list[Any] = []
        lower = spent(lambda: made.append(program.lower())).processor  # noqa: B023
        compile = spent(lambda: made.append(made[0].compile())).processor  # noqa: B023
        held = made[1].memory_analysis()
        sizes = [
            f"{size / 2**30:.1f}"
            for size in (held.argument_size_in_bytes, held.temp_size_in_bytes)
        ]
        table.row(
            kind,
            f"{program.layout.parameters / 1e9:.1f}e9",
            f"{lower:.1f}",
            f"{compile:.1f}",
            *sizes,
        )


def vocabulary(schedules: list[str]) -> None:
    title = "Llama-3 8B, 4 stages, 16 microbatches of 1 x 8192: TFLOP of matrix products in a GPU's compiled step"
    table = Table(
        "schedule      ",
        " edge",
        "spread",
        " gain",
        "clocks with the head",
        title=title,
    )
    for schedule in schedules:
        flops = {}
        for vocab in ("edge", "spread"):
            config = configuration(
                schedule, 16, LLAMA_3["8B"], (1, 1, 4), 8192, "bfloat16", vocab=vocab
            )
            program = Program(config, make_mesh(config, described_devices("h100", 4)))
            module = Module(program.lower().compile().as_text() or "")
            flops[vocab] = Work(module).products(module.entry) / 1e12
        assert program.layout.table is not None
        head = int(ops_per_clock(phases(program.layout.table))[:, 1].sum())
        gain = 1 - flops["spread"] / flops["edge"]
        table.row(
            schedule,
            f"{flops['edge']:.0f}",
            f"{flops['spread']:.0f}",
            f"{gain:.1%}",
            head,
        )


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("what", choices=["time", "large", "vocabulary"])
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES)
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.what != "vocabulary":
        fake_cpu_devices(512 if options.what == "large" else 8)
    if options.what == "time":
        step_time(options.schedules, options.rounds)
    elif options.what == "large":
        large()
    else:
        vocabulary(options.schedules)


if __name__ == "__main__":
    main()
