"""What a layer of Llama-3 8B leaves for its backward, in full fine-tuning and with LoRA: bytes a microbatch in the
pipeline's stash.

`tests/test_lora.py` holds it to full fine-tuning's. Shapes alone: nothing is allocated or compiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments.bench import LLAMA_3, config_of
from meshtrain.config import Config, replaced
from meshtrain.mesh import make_mesh
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.step import Program

MODEL = LLAMA_3["8B"] | {"layers": 8}
CASES: dict[str, dict[str, Any]] = {
    "full fine-tuning": {},
    "LoRA, rank 16, all projections": {"lora": {"rank": 16}},
    "LoRA, rank 64, all projections": {"lora": {"rank": 64}},
    "LoRA, rank 16, q and v": {"lora": {"rank": 16, "targets": ("q", "v")}},
    "LoRA, rank 16, with dropout": {"lora": {"rank": 16, "dropout": 0.05}},
    "norms alone": {"train": {"trainable": ("blocks.*_norm.scale",)}},
}


def config(case: dict[str, Any], remat: str = "none") -> Config:
    """A stage of 8B on tensor 2, a microbatch of one sequence of 4,096 tokens, bfloat16."""
    mesh = {"tensor": 2, "pipeline": 2}
    parallel = {"microbatches": 4, "schedule": "1f1b", "sequence_parallel": True}
    chosen = config_of(MODEL, mesh, 4, 4096, parallel | {"remat": remat})
    return replaced(chosen, **case)


def stashed(chosen: Config) -> int:
    """Bytes of a layer and a microbatch in the stash of one device."""
    program = Program(chosen, make_mesh(chosen))
    found: list[int] = []

    def local(masters: Any, batch: Any) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        weights = program.local.zero.gather_params(masters)
        key = jax.random.key(0) if chosen.lora.dropout else None
        stage = Stage(program.local.forward, 1, weights, batches, key)
        kept, _ = stage.stash_shapes(split=False)
        found.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)))
        return jnp.zeros(())

    specs = (program.layout.shards, PartitionSpec("data"))
    mapped = jax.shard_map(
        local, mesh=program.mesh, in_specs=specs, out_specs=PartitionSpec()
    )
    jax.eval_shape(mapped, program.layout.masters, program.batch_shapes())
    return found[0]
