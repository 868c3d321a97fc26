"""The pipeline executor, measured: memory and compile time against the number of microbatches, step time against one
device.

    python experiments/bench_pipeline.py memory       temp bytes per device at 64 microbatches over those at 8; entries held; remat
    python experiments/bench_pipeline.py compile      CPU seconds to trace and compile at 256 microbatches over those at 8
    python experiments/bench_pipeline.py time         step time over plain single-device JAX on the same global batch, interleaved
    python experiments/bench_pipeline.py large        a 62-billion-parameter model on 8 x 8 x 8 devices, compiled and never allocated
    python experiments/bench_pipeline.py vocabulary   Llama-3 8B on 4 stages: compiled matrix products per stage, spread and edge

`vocabulary` compiles for described GPUs (pip install -e '.[compile]', no GPU needed), `large` for fake CPU devices
and, where that is installed, for GPUs; the others run on fake CPU devices, in both ways that the executor has: idle
slots skipped (CPU), and masked (accelerators).
"""

import dataclasses
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments import bench, plain_jax
from experiments.bench import HEADER, LLAMA_3, Stepping, Table, compare, spent
from experiments.plan.work import Work
from meshtrain.config import Config, load
from meshtrain.hlo import Module
from meshtrain.mesh import fake_cpu_devices, make_mesh
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.parallel.pipeline.clock import Execution
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.plan.compiled import described_devices
from meshtrain.schedule.generators import SCHEDULES, legal_chunks
from meshtrain.schedule.phases import ops_per_clock, phases
from meshtrain.schedule.simulation import Durations, simulate
from meshtrain.step import Program

SMALL = {"layers": 8, "d_model": 64, "heads": 4, "d_ff": 128, "vocab_size": 512}
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
    length: int = 32,
    compute: str = "float32",
    **parallel: Any,
) -> Config:
    chunks = legal_chunks(schedule) or 2
    return load(
        {
            "model": model,
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {
                "schedule": schedule,
                "virtual_stages": chunks,
                "microbatches": microbatches,
                **parallel,
            },
            "precision": {"compute": compute},
            "train": {
                "global_batch_size": mesh[0] * microbatches,
                "sequence_length": length,
            },
        }
    )


def program_of(config: Config, masked: bool = False) -> Program:
    """A program on fake CPU devices, with idle slots masked as where devices are not CPUs."""
    program = Program(config, make_mesh(config))
    if masked:
        assert program.layout.table is not None
        program.local = LocalStep(program.layout, "accelerator", program.hooks)
    return program


def compiled(program: Program) -> jax.stages.Compiled:
    scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    return (
        jax.jit(program.gradients)
        .lower(program.layout.masters, program.batch_shapes(), *scalars)
        .compile()
    )


def temp_bytes(program: Program) -> int:
    analysis = compiled(program).memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def batch_of(program: Program) -> dict[str, jax.Array]:
    config = program.config
    shape = (config.train.global_batch_size, config.train.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, shape, np.int32
    )
    return jax.device_put(
        {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, program.batch_sharding
    )


def entries_held(program: Program) -> list[int]:
    """Places of each stage's stash that one step has written: each holds a layer's input, which is not zero."""
    executor = program.local.executor
    assert executor is not None

    def local(masters: Any, batch: Any) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        weights = program.local.zero.gather_params(masters)
        stage = Stage(executor.forward, executor.table.chunks, weights, batches, None)
        execution = Execution(executor.compiled, stage, jnp.float32(1))
        ((inputs, _),) = execution.run(
            executor.compiled.phases, execution.start()
        ).stash
        return jnp.any(inputs != 0, axis=tuple(range(1, inputs.ndim)))[None]

    specs = (program.layout.shards, PartitionSpec("data"))
    out = PartitionSpec(("data", "pipeline"))
    mapped = jax.shard_map(local, mesh=program.mesh, in_specs=specs, out_specs=out)
    return (
        np.asarray(jax.jit(mapped)(program.init().params, batch_of(program)))
        .sum(axis=1)
        .tolist()
    )


def memory(schedules: list[str]) -> None:
    title = (
        "4 stages; temp kB of a device with 8 and with 64 microbatches of one size; entries held on each stage "
        "with 8"
    )
    table = Table(
        "schedule      ",
        "idle   ",
        "    8",
        "   64",
        "ratio",
        "entries",
        "simulated",
        title=title,
    )
    for schedule in schedules:
        for idle in ("skipped", "masked"):
            programs = [
                program_of(configuration(schedule, m, SMALL), idle == "masked")
                for m in (8, 64)
            ]
            few, many = map(temp_bytes, programs)
            pipeline = programs[0].layout.table
            assert pipeline is not None
            held: list[Any] = ["", ""]
            # Masked, idle slots write into places that are free.
            if idle == "skipped":
                held = [
                    entries_held(programs[0]),
                    simulate(pipeline, Durations()).peak_in_flight.tolist(),
                ]
            table.row(
                schedule,
                idle,
                f"{few / 1e3:.0f}",
                f"{many / 1e3:.0f}",
                f"{many / few:.3f}",
                *held,
            )
    table = Table("parallel.remat", "temp kB", title="1f1b, 16 microbatches")
    for remat in ("none", "dots", "full"):
        found = temp_bytes(program_of(configuration("1f1b", 16, MEDIUM, remat=remat)))
        table.row(remat, f"{found / 1e3:.0f}")


def compile_time(schedules: list[str]) -> None:
    title = "4 stages; processor seconds to trace, lower and compile with 8 and with 256 microbatches"
    table = Table("schedule      ", "idle   ", "    8", "  256", "ratio", title=title)

    def compiling(schedule: str, microbatches: int, masked: bool) -> None:
        jax.clear_caches()
        compiled(program_of(configuration(schedule, microbatches, SMALL), masked))

    for schedule in schedules:
        for idle in ("skipped", "masked"):
            masked = idle == "masked"
            runs = {str(m): partial(compiling, schedule, m, masked) for m in (8, 256)}
            found = {
                m: min(one.processor for one in times)
                for m, times in bench.turns(runs, 2, warm=0).items()
            }
            table.row(
                schedule,
                idle,
                f"{found['8']:.2f}",
                f"{found['256']:.2f}",
                f"{found['256'] / found['8']:.2f}",
            )


def step_time(schedules: list[str], rounds: int) -> None:
    microbatches, length = 16, 256
    single = dataclasses.replace(
        configuration("1f1b", microbatches, MEDIUM, length=length), mesh=load({}).mesh
    )
    reference, reference_state = plain_jax.make_step(single)
    plain: Stepping | None = None
    print(
        f"4 stages, {microbatches} microbatches of 1 x {length}; step over one device, median of {rounds} rounds"
    )
    print(f"{'schedule':16} {HEADER}")
    for schedule in schedules:
        program = program_of(
            configuration(schedule, microbatches, MEDIUM, length=length)
        )
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
    parser.add_argument(
        "what", choices=["memory", "compile", "time", "large", "vocabulary"]
    )
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
        {"memory": memory, "compile": compile_time, "vocabulary": vocabulary}[
            options.what
        ](options.schedules)


if __name__ == "__main__":
    main()
