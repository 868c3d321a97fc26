"""Attention across context ranks is that of one device, balanced, and travels while devices compute."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from train_in_processes import train_in_processes

from meshtrain.config import ConfigError, load, replaced
from meshtrain.mesh import CONTEXT
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import NO_DROPOUT, Dropout
from meshtrain.parallel.context import (
    attend_by_heads,
    column_order,
    positions,
    zigzag_attention,
)
from meshtrain.step import Program

ROWS, WIDTH = 2, 8


class OnContext(Collectives):
    def __init__(self, ranks: int, strategy: str) -> None:
        self.context, self.by_heads, self.rings = (
            ranks,
            strategy == "ulysses",
            strategy == "ring",
        )

    def positions(self, length: int) -> jax.Array:
        return positions(length, self.context, self.by_heads)

    def attend_in_zigzag(self, kernel, scoring, *arrays):
        return zigzag_attention(kernel, scoring, self.rings, *arrays)

    def attend_by_heads(self, attend, heads, segments, dropout, sinks):
        return attend_by_heads(attend, heads, segments, self, dropout, sinks)


def plain(q, k, v, segments, window: int, cap: float, keep):
    """Causal attention from its definition, in float64, of the whole row; `keep` [B, H, T, T] is what dropout
    multiplies weights with.
    """
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    back = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = ((back >= 0) & (back < window if window else True))[None, None]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) * keep
    return jnp.einsum("bhts,bshk->bthk", weights, v)


CASES = {
    "ring": (4, "ring", 4, 2, 40, {}),
    "ring-documents-dropout": (2, "ring", 6, 1, 20, {"documents": 5, "rate": 0.3}),
    "ring-of-8-capped": (8, "ring", 2, 2, 48, {"cap": 2.0}),
    "gather-window": (4, "all_gather", 4, 4, 24, {"window": 7}),
    "gather-window-documents-dropout": (
        2,
        "all_gather",
        6,
        3,
        36,
        {"window": 11, "documents": 3, "rate": 0.3},
    ),
    "heads": (2, "ulysses", 6, 2, 18, {"window": 5, "documents": 4, "rate": 0.3}),
    "heads-that-share-keys": (4, "ulysses", 8, 2, 12, {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradients_are_those_of_the_whole_row(case):
    ranks, strategy, heads, groups, length, more = CASES[case]
    window, cap, rate = (
        more.get("window", 0),
        more.get("cap", 0.0),
        more.get("rate", 0.0),
    )
    draw = np.random.default_rng(0)
    q, k, v, g = (
        draw.standard_normal((ROWS, length, n, WIDTH), np.float32)
        for n in (heads, groups, groups, heads)
    )
    segments = None
    if "documents" in more:
        segments = np.sort(
            draw.integers(0, more["documents"], (ROWS, length)), axis=1
        ).astype(np.int32)
    dropout = Dropout(rate, jax.random.key(3), jnp.arange(ROWS)) if rate else NO_DROPOUT
    keep = np.asarray(dropout.attention(jnp.ones((ROWS, heads, length, length)), 0))
    with jax.enable_x64(True):
        exact = [np.float64(x) for x in (q, k, v)]
        want, vjp = jax.vjp(
            lambda *qkv: plain(*qkv, segments, window, cap, keep), *exact
        )
        want = [np.asarray(x) for x in (want, *vjp(np.float64(g)))]
    assert want[0].dtype == np.float64

    order = column_order(length, ranks, strategy == "ulysses")
    split = PartitionSpec(None, CONTEXT)
    mesh = Mesh(np.array(jax.devices()[:ranks]), (CONTEXT,))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split,) * 4 + (None if segments is None else split,),
        out_specs=split,
    )
    def run(q, k, v, g, segments):
        collectives = OnContext(ranks, strategy)
        out, vjp = jax.vjp(
            lambda q, k, v: attend(
                q, k, v, segments, collectives, dropout, window=window, cap=cap
            ).reshape(q.shape),
            q,
            k,
            v,
        )
        return out, *vjp(g)

    cut = [None if x is None else x[:, order] for x in (q, k, v, g, segments)]
    for name, seen, right in zip(
        ("out", "q", "k", "v"), jax.jit(run)(*cut), want, strict=True
    ):
        error = (
            np.abs(np.asarray(seen)[:, np.argsort(order)] - right).max()
            / np.abs(right).max()
        )
        assert error < 2e-6, (name, error)


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk_and_all_the_same_work():
    order = column_order(24, 3, by_heads=False).reshape(3, 8)
    assert order[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    # Keys that a rank's queries see
    assert len({int((rank + 1).sum()) for rank in order}) == 1
    assert np.array_equal(column_order(24, 3, by_heads=True), np.arange(24))


MODEL = {
    "family": "llama",
    "layers": 2,
    "d_model": 16,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 16,
    "vocab_size": 31,
}


def config(mesh, length=32, model=None, data=None, **parallel):
    train = {"global_batch_size": 4} | ({"sequence_length": length} if length else {})
    sections = {
        "model": MODEL | (model or {}),
        "mesh": mesh,
        "train": train,
        "parallel": parallel,
    }
    return load(sections | ({"data": data} if data else {}))


@pytest.mark.parametrize(
    ("given", "parallel", "sentence"),
    [
        (
            ({"context": 4}, 20),
            {"context_strategy": "ring"},
            r"multiple of 8 tokens, .* 20",
        ),
        (
            ({"context": 3}, 21),
            {"context_strategy": "ulysses"},
            r"legal are 1, 2, 4, or .* all_gather and ring",
        ),
        (
            ({"context": 2}, 32, {"window": 8}),
            {"context_strategy": "ring"},
            r"legal are all_gather and ulysses",
        ),
        (
            ({"context": 2, "tensor": 4}, 20, {"kv_heads": 4}),
            {"sequence_parallel": True},
            r"the 10 tokens",
        ),
        (
            ({"context": 2}, None, {"family": "vit"}, {"source": "synthetic"}),
            {},
            r"mesh\.context.* images, .*; leave it out",
        ),
        (
            ({"context": 4}, 32, {}, {"batching": "grouped", "length_multiple": 12}),
            {"context_strategy": "ring"},
            r"grouped .* multiple of .*: mesh\.context 4.*, .* 12",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence_that_names_what_can(
    given, parallel, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        config(*given, **parallel)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ({"context": 8}, {"context_strategy": "ring"}),
        (
            {"context": 4, "data": 2},
            {"context_strategy": "all_gather", "zero_stage": 2, "microbatches": 2},
        ),
        (
            {"context": 2, "tensor": 2},
            {"context_strategy": "ulysses", "sequence_parallel": True},
        ),
        (
            {"context": 2, "data": 2, "pipeline": 2},
            {"context_strategy": "ring", "zero_stage": 3, "remat": "full"},
        ),
    ],
)
def test_first_loss_and_gradients_are_those_of_one_device_to_a_millionth(
    mesh, parallel
):
    tokens, labels = np.random.default_rng(0).integers(0, 31, (2, 4, 48), np.int32)
    found = []
    for program in (Program(config({}, 48)), Program(config(mesh, 48, **parallel))):
        batch = program.place({"tokens": tokens, "labels": labels})
        loss, gradient = jax.jit(program.gradients)(
            program.init().params, batch, jnp.int32(0), jnp.float32(1)
        )
        found.append(
            (float(loss), program.layout.canonical(jax.tree.map(np.asarray, gradient)))
        )
    (loss, gradient), (seen_loss, seen) = found
    assert seen_loss == pytest.approx(loss, rel=1e-6)
    errors = jax.tree.map(
        lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), seen, gradient
    )
    assert max(jax.tree.leaves(errors)) < 1e-6, errors


@pytest.mark.thorough
@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_logits_come_in_the_order_of_the_tokens_whose_positions_scaled_rotations_take(
    scaling,
):
    tokens = np.random.default_rng(0).integers(0, 31, (4, 32), np.int32)
    model = {"rope_scaling": scaling, "rope_factor": 4.0, "rope_original": 16}
    one, split = (
        Program(config(mesh, model=model, context_strategy="ring"))
        for mesh in ({"data": 1}, {"data": 2, "context": 4})
    )
    seen = [
        np.asarray(program.logits(program.init().params, tokens))
        for program in (one, split)
    ]
    np.testing.assert_allclose(seen[1], seen[0], atol=2e-5)


def test_each_device_is_given_its_own_tokens_of_its_own_rows():
    program = Program(config({"data": 2, "context": 2}, context_strategy="ring"))
    tokens = np.arange(4 * 32, dtype=np.int32).reshape(4, 32) % 31
    placed = program.place({"tokens": tokens, "labels": tokens})["tokens"]
    parts = {
        shard.device.id: np.asarray(shard.data) for shard in placed.addressable_shards
    }
    early, late = np.arange(0, 8), np.arange(24, 32)
    assert np.array_equal(parts[0], tokens[:2, np.r_[early, late]])
    assert np.array_equal(parts[3], tokens[2:, 8:24])


COUNT_READS = """
import atexit, os, pathlib
from meshtrain.data.shards import Descriptor
read, sizes, out = Descriptor.read, [], os.environ.get("COUNT_READS")
Descriptor.read = lambda file, size, at: sizes.append(size) or read(file, size, at)
atexit.register(lambda: out and pathlib.Path(f"{out}-{os.environ['JAX_PROCESS_ID']}").write_text(str(sum(sizes))))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_each_of_two_processes_reads_its_half_of_each_row_and_both_train_as_one_does(
    strategy, tmp_path, monkeypatch
):
    (tmp_path / "count_reads.py").write_text(COUNT_READS)
    (tmp_path / "text.txt").write_text("".join(map(str, range(9999))))
    rows, read = {}, {}
    mesh = {
        "context": 4,
        "data": 2,
        "order": ["context", "island", "pipeline", "data", "tensor"],
    }
    for name, processes in (("one", 1), ("two", 2)):
        training = replaced(
            config(mesh, 64, {"vocab_size": 257}, context_strategy=strategy),
            run={
                "directory": str(tmp_path / name),
                "imports": (str(tmp_path / "count_reads.py"),),
            },
            data={
                "source": str(tmp_path / "text.txt"),
                "validation_source": str(tmp_path / "text.txt"),
            },
            train={"steps": 3},
            eval={"every": 3, "batches": 2},
        )
        monkeypatch.setenv("COUNT_READS", str(tmp_path / name))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        train_in_processes(training, processes, tmp_path / f"{name}.yaml")
        rows[name] = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        read[name] = [
            int((tmp_path / f"{name}-{rank}").read_text()) for rank in range(processes)
        ]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [row[key] for row in rows["two"]],
            [row[key] for row in rows["one"]],
            rtol=1e-5,
        )
    assert rows["two"][-1]["eval_loss"] == pytest.approx(
        rows["one"][-1]["eval_loss"], rel=1e-5
    )
    # A token before each of the chunks that follow one another, of 16 tokens, is read with them.
    assert all(0.5 < each / read["one"][0] < 0.55 for each in read["two"]), read


@pytest.mark.thorough
def test_a_ring_is_passed_on_without_a_conditional_and_gathers_nothing_of_the_row():
    program = Program(config({"context": 4}, zero_stage=0, context_strategy="ring"))
    text = program.lower().as_text()
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    assert len(re.findall("stablehlo.collective_permute", text)) >= 3 * 2
    assert "stablehlo.all_gather" not in text
