"""Hybrids of transformers have its logits where documents are packed, over context ranks and on 2 x 2 x 2."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN
from jax.sharding import PartitionSpec

from meshtrain.config import load
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import TensorFiles
from meshtrain.hf_families import CONFIG, model_section, read_json
from meshtrain.parallel.logits import logits
from meshtrain.step import Program

LENGTH = 48
ENDS = ([19, 37, LENGTH], [LENGTH])  # of documents; no piece of a row ends there
WITHIN = 2e-5  # of the largest logit


def program_of(directory: Path, mesh: dict[str, int], strategy: str) -> Program:
    model = model_section(read_json(directory / CONFIG), CONFIG)
    sections = {
        # chunks that divide no piece
        "model": model | {"linear": model["linear"] | {"chunk": 4}},
        "mesh": mesh,
        "parallel": {"context_strategy": strategy}
        | {"microbatches": mesh.get("pipeline", 1)},
        "train": {"global_batch_size": 4, "sequence_length": LENGTH},
    }
    return Program(load(sections))


def packed_batch() -> tuple[dict[str, np.ndarray], list[tuple[slice, int, slice]]]:
    """Rows of documents, each the beginning of a row of transformers' tokens; and of each document its place, the row
    that it begins, and how far.
    """
    texts = np.random.default_rng(0).integers(0, 45, (2, LENGTH)).astype(np.int32)
    tokens, segments, positions = (
        np.zeros((len(ENDS), LENGTH), np.int32) for _ in range(3)
    )
    places = []
    for row, ends in enumerate(ENDS):
        for document, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            of = (row + document) % 2
            tokens[row, start:end] = texts[of, : end - start]
            segments[row, start:end] = 1 + document  # 0 is padding
            positions[row, start:end] = np.arange(end - start)
            places.append(((row, slice(start, end)), of, slice(end - start)))
    batch = {
        "tokens": tokens,
        "labels": tokens,
        "segments": segments,
        "positions": positions,
    }
    return {name: np.tile(x, (2, 1)) for name, x in batch.items()}, places


def logits_of(
    program: Program, params: object, batch: dict[str, np.ndarray]
) -> np.ndarray:
    """The program's logits of a batch, documents and all, in the order of the tokens."""
    forward, zero = program.local.forward, program.local.zero

    def local(masters: object, batch: dict[str, jax.Array]) -> jax.Array:
        rows = jnp.arange(len(batch["tokens"]))
        return logits(forward, zero.gather_params(masters), {**batch, "rows": rows})

    rows, parts = (*program.rows, None)[:2]
    out = PartitionSpec(rows, parts, forward.collectives.vocabulary)
    mapped = jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(program.layout.shards, program.rows),
        out_specs=out,
    )
    found = np.asarray(jax.jit(mapped)(params, program.place(batch)))
    order = program.column_order(LENGTH)
    found = found if order is None else found[:, np.argsort(order)]
    return found[..., : program.config.model.vocab_size]


CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
MIXED = {"context": 2, "tensor": 2, "pipeline": 2}
CASES = [
    ("qwen3_next", {"context": 2}, "ring"),
    ("qwen3_next", {"context": 4}, "all_gather"),
    ("qwen3_next", CUBE, "ring"),
    ("qwen3_5", {"context": 2}, "all_gather"),
    ("qwen3_5", {"context": 4}, "ring"),
    ("qwen3_5", CUBE, "ring"),
    ("qwen3_5_moe", MIXED, "ulysses"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "mesh", "strategy"), CASES)
def test_packed_documents_have_transformers_logits_on_every_mesh(
    family, mesh, strategy
):
    program = program_of(GOLDEN / family, mesh, strategy)
    params = loading.load(program.layout, TensorFiles(GOLDEN / family))
    expected = np.load(GOLDEN / family / "logits.npy")
    batch, places = packed_batch()
    found = logits_of(program, params, batch)
    apart = [
        np.abs(found[here] - expected[of, upto]).max() for here, of, upto in places
    ]
    assert max(apart) < WITHIN * np.abs(expected).max(), apart
