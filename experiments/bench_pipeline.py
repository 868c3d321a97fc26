"""The pipeline executor, measured: memory and compile time against the number of microbatches, step time against one device.

    python experiments/bench_pipeline.py memory       temp bytes per device at 64 microbatches over those at 8; entries held; remat
    python experiments/bench_pipeline.py compile      CPU seconds to trace and compile at 256 microbatches over those at 8
    python experiments/bench_pipeline.py time         step time over plain single-device JAX on the same global batch, interleaved
    python experiments/bench_pipeline.py large        a 62-billion-parameter model on 8 x 8 x 8 devices, compiled and never allocated
    python experiments/bench_pipeline.py vocabulary   Llama-3 8B on 4 stages: compiled matrix products per stage, spread and edge

`vocabulary` compiles for described GPUs (pip install 'meshtrain[compile]', no GPU needed), `large` for fake CPU devices and, where that
is installed, for GPUs; the others run on fake CPU devices, in both ways that the executor has: idle slots skipped (CPU), and masked
(accelerators).
"""

import argparse
import dataclasses
import math
import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
from interleave import HEADER, Stepping, compare
from jax.sharding import PartitionSpec

from meshtrain.config import Config, load
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
LLAMA_8B = {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab_size": 128256}
LARGE = {"layers": 80, "d_model": 8192, "heads": 64, "kv_heads": 8, "d_ff": 24576, "vocab_size": 128256}


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
            "parallel": {"schedule": schedule, "virtual_stages": chunks, "microbatches": microbatches, **parallel},
            "precision": {"compute": compute},
            "train": {"global_batch_size": mesh[0] * microbatches, "sequence_length": length},
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
    return jax.jit(program.gradients).lower(program.layout.masters, program.batch_shapes(), *scalars).compile()


def temp_bytes(program: Program) -> int:
    analysis = compiled(program).memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def batch_of(program: Program) -> dict[str, jax.Array]:
    config = program.config
    shape = (config.train.global_batch_size, config.train.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    return jax.device_put({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, program.batch_sharding)


def entries_held(program: Program) -> list[int]:
    """Places of each stage's stash that one step has written: each holds a layer's input, which is not zero."""
    executor = program.local.executor
    assert executor is not None

    def local(masters: Any, batch: Any) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        weights = program.local.zero.gather_params(masters)
        stage = Stage(executor.forward, executor.table.chunks, weights, batches, None)
        execution = Execution(executor.table, executor.buffers, stage, jnp.float32(1))
        ((inputs, _),) = execution.run(executor.phases, execution.start()).stash
        return jnp.any(inputs != 0, axis=tuple(range(1, inputs.ndim)))[None]

    specs = (program.layout.shards, PartitionSpec("data"))
    out = PartitionSpec(("data", "pipeline"))
    mapped = jax.shard_map(local, mesh=program.mesh, in_specs=specs, out_specs=out)
    return np.asarray(jax.jit(mapped)(program.init().params, batch_of(program))).sum(axis=1).tolist()


def memory(schedules: list[str]) -> None:
    print("4 stages; temp kB per device with 8 and with 64 microbatches of the same size; entries held with 8")
    print(f"{'schedule':16}{'idle':>8}{'8':>9}{'64':>9}{'ratio':>7}   entries by stage: measured, simulated")
    for schedule in schedules:
        for masked in (False, True):
            programs = [program_of(configuration(schedule, m, SMALL), masked) for m in (8, 64)]
            few, many = map(temp_bytes, programs)
            table = programs[0].layout.table
            assert table is not None
            simulated = simulate(table, Durations()).peak_in_flight.tolist()
            # Masked, idle slots write into places that are free.
            held = "" if masked else f"{entries_held(programs[0])} {simulated}"
            print(
                f"{schedule:16}{'masked' if masked else 'skipped':>8}{few / 1e3:9.0f}{many / 1e3:9.0f}{many / few:7.3f}   {held}",
                flush=True,
            )
    print("\n1f1b, 16 microbatches: temp kB by parallel.remat")
    for remat in ("none", "dots", "full"):
        print(
            f"{remat:8}{temp_bytes(program_of(configuration('1f1b', 16, MEDIUM, remat=remat))) / 1e3:9.0f}", flush=True
        )


def compile_time(schedules: list[str]) -> None:
    print("4 stages; CPU seconds to trace, lower and compile with 8 and with 256 microbatches")
    print(f"{'schedule':16}{'idle':>8}{'8':>8}{'256':>8}{'ratio':>7}")
    for schedule in schedules:
        for masked in (False, True):
            seconds: dict[int, list[float]] = {8: [], 256: []}
            for _ in range(2):
                for m, found in seconds.items():
                    jax.clear_caches()
                    program = program_of(configuration(schedule, m, SMALL), masked)
                    found.append(cpu_seconds(lambda program=program: compiled(program))[0])
            few, many = min(seconds[8]), min(seconds[256])
            print(
                f"{schedule:16}{'masked' if masked else 'skipped':>8}{few:8.2f}{many:8.2f}{many / few:7.2f}", flush=True
            )


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = function()
    return time.process_time() - began, result


def step_time(schedules: list[str], rounds: int) -> None:
    microbatches, length = 16, 256
    single = dataclasses.replace(configuration("1f1b", microbatches, MEDIUM, length=length), mesh=load({}).mesh)
    reference, reference_state = plain_jax.make_step(single)
    plain: Stepping | None = None
    print(f"4 stages, {microbatches} microbatches of 1 x {length}; step over one device, median of {rounds} rounds")
    print(f"{'schedule':16} {HEADER}")
    for schedule in schedules:
        program = program_of(configuration(schedule, microbatches, MEDIUM, length=length))
        state, batch = program.init(), batch_of(program)
        if plain is None:
            tokens, labels = (np.asarray(batch[name]) for name in ("tokens", "labels"))
            compiled = reference.lower(reference_state, tokens, labels).compile()
            plain = Stepping(compiled, reference_state, tokens, labels)
        step = program.train_step.lower(state, batch).compile()
        print(f"{schedule:16} {compare(plain, Stepping(step, state, batch), rounds)}", flush=True)


def large() -> None:
    config = configuration(
        "1f1b", 32, LARGE, (8, 8, 8), 4096, "bfloat16", virtual_stages=1, sequence_parallel=True, remat="full"
    )
    kinds = {"fake CPU devices": None}
    if find_spec("jax_cuda12_plugin"):
        kinds["described GPUs"] = described_devices("h100", 512)
    for kind, devices in kinds.items():
        program = Program(config, make_mesh(config, devices))
        lower, lowered = cpu_seconds(program.lower)
        seconds, executable = cpu_seconds(lowered.compile)
        analysis = executable.memory_analysis()
        print(
            f"{program.layout.parameters / 1e9:.1f} billion parameters on 512 {kind}: {lower:.1f} s to lower, {seconds:.1f} s to compile "
            f"(CPU seconds); {analysis.argument_size_in_bytes / 2**30:.1f} GiB of state and {analysis.temp_size_in_bytes / 2**30:.1f} GiB "
            "temp per device",
            flush=True,
        )


def vocabulary(schedules: list[str]) -> None:
    print(
        "Llama-3 8B, 4 stages, 16 microbatches of 1 x 8192: matrix products in the compiled program of each GPU, TFLOP a step"
    )
    print(f"{'schedule':16}{'edge':>9}{'spread':>9}{'gain':>7}   clocks with the head")
    for schedule in schedules:
        flops = {}
        for vocab in ("edge", "spread"):
            config = configuration(schedule, 16, LLAMA_8B, (1, 1, 4), 8192, "bfloat16", vocab=vocab)
            program = Program(config, make_mesh(config, described_devices("h100", 4)))
            text = program.lower().compile().as_text()
            assert text is not None
            flops[vocab] = product_flops(text) / 1e12
        assert program.layout.table is not None
        head = int(ops_per_clock(phases(program.layout.table))[:, 1].sum())
        gain = 1 - flops["spread"] / flops["edge"]
        print(f"{schedule:16}{flops['edge']:9.0f}{flops['spread']:9.0f}{gain:7.1%}   {head}", flush=True)


def product_flops(text: str) -> float:
    """Floating-point operations of the `dot`s of an HLO module, each as often as its loops turn (attention's own kernels apart)."""
    own: dict[str, float] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    shapes: dict[str, list[int]] = {}
    current = entry = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line):
            current, shapes = header[2], {}
            own[current], calls[current] = 0.0, []
            entry = current if header[1] else entry
        elif named := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", line):
            shapes[named[1]] = [int(n) for n in named[2].split(",") if n]
        if product := re.search(r" dot\(%?([\w.\-]+), .*lhs_contracting_dims=\{([\d,]+)\}", line):
            left, result = shapes[product[1]], shapes[line.split(" = ")[0].split("%")[-1].strip()]
            own[current] += 2.0 * math.prod(result) * math.prod(left[int(d)] for d in product[2].split(","))
        turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        for name in re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", line):
            calls[current].append((name, int(turns[1]) if turns else 1))

    def total(name: str) -> float:
        return own[name] + sum(times * total(inner) for inner, times in calls[name])

    return total(entry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "compile", "time", "large", "vocabulary"])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.what != "vocabulary":
        fake_cpu_devices(512 if options.what == "large" else 8)
    if options.what == "memory":
        memory(options.schedules)
    elif options.what == "compile":
        compile_time(options.schedules)
    elif options.what == "time":
        step_time(options.schedules, options.rounds)
    elif options.what == "large":
        large()
    else:
        vocabulary(options.schedules)


if __name__ == "__main__":
    main()
