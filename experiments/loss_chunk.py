"""What a loss by chunks (train.loss_chunk) spares and costs: bytes of head and loss compiled for described H100s, seconds on this CPU.

python -m experiments.loss_chunk bytes       # needs pip install 'meshtrain[compile]', no GPU
python -m experiments.loss_chunk seconds
"""

import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.compat import vary, varying
from meshtrain.config import Config, load
from meshtrain.mesh import AXES, DATA, TENSOR, fake_cpu_devices, make_mesh
from meshtrain.plan.compiled import described_devices
from meshtrain.step import Program

WHOLE = 2**31 - 1
LLAMA_8B = {"layers": 1, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab_size": 128256}
SMALL = {"layers": 2, "d_model": 256, "heads": 8, "kv_heads": 4, "d_ff": 704, "vocab_size": 8192}


def long_row(chunk: int | str, sequence_parallel: bool, length: int = 131072) -> Config:
    """Llama-3 8B, of which the layers do not matter here, with a row on 8 tensor ranks."""
    return load(
        {
            "model": LLAMA_8B,
            "mesh": {"tensor": 8},
            "parallel": {"sequence_parallel": sequence_parallel},
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": 1, "sequence_length": length, "loss_chunk": chunk},
        }
    )


def head_and_loss(program: Program) -> jax.stages.Compiled:
    """Compiles the loss of a stream and its gradients, of the stream and of the head's weights."""
    config, local = program.config, program.local
    split = TENSOR if config.parallel.sequence_parallel else None
    rows, stream = PartitionSpec(DATA), PartitionSpec(DATA, split)

    def run(masters: Any, x: jax.Array, labels: jax.Array) -> Any:
        weights = local.zero.gather_params(masters)
        x = vary(x, local.forward.stream_axes)

        def loss(head: Any, x: jax.Array) -> jax.Array:
            used = weights._replace(differentiated={**weights.differentiated, "head": head})
            return local.forward.loss(used, x, {"labels": labels}, jnp.array(True), jnp.ones(()))[0]

        total, vjp = jax.vjp(loss, weights.differentiated["head"], x)
        head, gx = vjp(vary(jnp.ones(()), varying(total)))
        return jax.tree.map(lambda g: vary(g, AXES)[None], head), vary(gx, AXES)[None]

    shape = (config.train.global_batch_size, config.train.sequence_length)
    specs = (program.layout.shards, stream, rows)
    mapped = jax.shard_map(run, mesh=program.mesh, in_specs=specs, out_specs=PartitionSpec(AXES))

    def of(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(program.mesh, spec))

    x = of((*shape, config.model.d_model), config.precision.compute, stream)
    return jax.jit(mapped).lower(program.layout.masters, x, of(shape, jnp.int32, rows)).compile()


def temporaries(chunk: int | str, sequence_parallel: bool, devices: Any) -> int:
    """Bytes that the compiled head and loss need on a device beside arguments and results."""
    config = long_row(chunk, sequence_parallel)
    memory = head_and_loss(Program(config, make_mesh(config, devices))).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def in_bytes() -> None:
    """Prints the temporaries of head and loss by chunk."""
    devices = described_devices("h100", 8)
    print("Llama-3 8B, 131,072 tokens, tensor 8: head and loss, temporaries in GB, compiled for H100s")
    print(f"{'chunk':>8} {'sequence parallel':>18} {'not':>6}")
    for chunk in (WHOLE, 512, 2048, 8192, "auto"):
        cells = [temporaries(chunk, split, devices) / 1e9 for split in (True, False)]
        print(f"{'whole' if chunk == WHOLE else chunk:>8} {cells[0]:18.2f} {cells[1]:6.2f}", flush=True)


def in_seconds() -> None:
    """Prints the median seconds of a step on the CPU by chunk, of runs that take turns."""
    fake_cpu_devices(2)
    programs = {}
    for chunk in (WHOLE, 128, 512, "auto"):
        train = {"global_batch_size": 4, "sequence_length": 512, "loss_chunk": chunk}
        program = Program(load({"model": SMALL, "mesh": {"tensor": 2}, "train": train}))
        programs[chunk] = program, program.init(), []
    tokens = jax.random.randint(jax.random.key(0), (4, 513), 0, SMALL["vocab_size"])
    for _ in range(6):
        for chunk, (program, state, seconds) in programs.items():
            batch = program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
            start = time.perf_counter()
            state, metrics = program.train_step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
            programs[chunk] = program, state, seconds
    whole = statistics.median(programs[WHOLE][2][1:])
    print(
        f"{SMALL['vocab_size']:,} ids, {SMALL['layers']} layers of {SMALL['d_model']}, 2,048 tokens, tensor 2 on the CPU"
    )
    for chunk, (_, _, seconds) in programs.items():
        median = statistics.median(seconds[1:])
        print(f"{'whole' if chunk == WHOLE else chunk:>8} {median:8.3f} s {median / whole:6.2f}")


if __name__ == "__main__":
    {"bytes": in_bytes, "seconds": in_seconds}[sys.argv[1]]()
