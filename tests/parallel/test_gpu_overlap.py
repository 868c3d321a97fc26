"""The program that XLA's CUDA compiler makes for 8 described GPUs: gradients, and weights in a pipeline, travel over
data under matrix products.
"""

import json
import re

import jax
import pytest
from described_gpus import compiled_step, needs_compiler, printed

from experiments.plan.timed import timed
from meshtrain.config import load
from meshtrain.hlo import Module
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import parameters
from meshtrain.plan import named

pytestmark = [pytest.mark.thorough, needs_compiler]


def sent_over_data(given):
    """(config, what is sent over data by kind) of this program."""
    config, cluster = load(given), named("h100", 8)
    found = timed(
        Module(compiled_step(given)),
        make_mesh(config, jax.devices()[:8]),
        config,
        cluster,
    )
    return config, {
        kind: sent for (axis, kind), sent in found.sent.items() if axis == "data"
    }


MODEL = {"layers": 16, "d_model": 4096, "heads": 32, "d_ff": 8192, "vocab_size": 8192}


def test_all_gradients_but_the_first_buckets_and_the_vocabularys_travel_under_matrix_products():
    given = {
        "model": MODEL,
        "mesh": {"data": 4, "tensor": 2},
        "parallel": {"remat": "none", "sequence_parallel": True},
        "precision": {"compute": "bfloat16"},
        "train": {"global_batch_size": 4, "sequence_length": 4096},
    }
    config, sent = sent_over_data(given)
    scattered = sent["reduce-scatter"]
    assert scattered.bytes == pytest.approx(4 * parameters(config.model) / 2, rel=0.01)
    vocabulary = 2 * 4 * 8192 * 4096 / 2
    first = (scattered.bytes - vocabulary) / 8
    assert scattered.under == pytest.approx(
        scattered.bytes - vocabulary - first, rel=0.02
    )


def test_what_zero_3_sends_at_the_layers_travels_under_matrix_products_but_for_what_the_first_of_them_reads():
    given = {
        "model": MODEL,
        "mesh": {"data": 8},
        "parallel": {"remat": "selective", "zero_stage": 3},
        "precision": {"compute": "bfloat16"},
        "train": {"global_batch_size": 8, "sequence_length": 4096},
    }
    config, sent = sent_over_data(given)
    gathered, scattered = sent["all-gather"], sent["reduce-scatter"]
    outer, size = 2 * 8192 * 4096, parameters(config.model)
    assert gathered.bytes == pytest.approx(2 * (2 * (size - outer) + outer), rel=0.02)
    assert scattered.bytes == pytest.approx(4 * size, rel=0.02)
    # bytes: projections into attention, in the backward the largest weight
    first = 2 * 16 * (3 * 4096 * 4096 + 4096 * 8192)
    assert gathered.under >= gathered.bytes - 2 * outer - first
    assert scattered.under >= scattered.bytes - 4 * (
        outer + (size - outer) / 16
    )  # nothing hides the last layer


def planned_and_timed(given, path):
    """The plan of a config on 8 H100s, with the program that XLA makes of it, its bytes and what it sends (see
    `experiments.plan.timed`).
    """
    path.write_text(json.dumps(given))
    return json.loads(
        printed("-m", "experiments.plan.timed", str(path), "h100x8").splitlines()[-1]
    )


def test_the_halves_of_a_pair_hide_each_others_messages(tmp_path):
    """Over tensor a pair hides all but its first message.

    Of nine microbatches on one stage eight are in pairs, which auto takes here.
    """
    shares, seconds = {}, {}
    for schedule in ("1f1b", "auto"):
        given = {
            "model": MODEL | {"layers": 2},
            "mesh": {"data": 2, "tensor": 4},
            "parallel": {
                "remat": "none",
                "sequence_parallel": True,
                "microbatches": 9,
                "schedule": schedule,
            },
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": 18, "sequence_length": 4096},
        }
        found = planned_and_timed(given, tmp_path / f"{schedule}.yaml")
        sent = [
            spent
            for name, spent in found["program_sent"].items()
            if name.endswith("over tensor")
        ]
        shares[schedule] = sum(s["under"] for s in sent) / sum(s["bytes"] for s in sent)
        seconds[schedule] = found["program_seconds"]
        if schedule == "auto":
            assert found["per_device_bytes"]["total"] == pytest.approx(
                found["compiled"]["total_bytes"], rel=0.05
            )
    # In the order as traced it is 0.78: see `pipeline.paired`.
    assert shares["1f1b"] < 0.4 and shares["auto"] > 0.795
    assert seconds["auto"] < 0.93 * seconds["1f1b"]


def test_under_a_pipeline_chunks_travel_over_data_under_matrix_products_but_for_the_first_weights_and_the_last_gradient():
    given = {
        "model": {**MODEL, "kv_heads": 8},
        "mesh": {"data": 2, "pipeline": 4},
        "parallel": {
            "remat": "selective",
            "schedule": "interleaved",
            "virtual_stages": 4,
            "microbatches": 4,
        },
        "precision": {"compute": "bfloat16"},
        "train": {"global_batch_size": 8, "sequence_length": 4096},
    }
    config, sent = sent_over_data(given)
    edge = 8192 * 4096 / 4  # embedding, and as many of the head
    chunk = (parameters(config.model) - 8 * edge) / 16
    # the second chunk's weights, of so small a model, are there before a product is
    for kind, size, chunks in (("all-gather", 2, 2), ("reduce-scatter", 4, 3)):
        assert sent[kind].bytes == pytest.approx(
            size * (4 * chunk + 2 * edge), rel=0.01
        )
        assert sent[kind].under >= 0.99 * size * chunks * chunk
        assert sent[kind].waited < 0.3 * sent[kind].seconds


MESSAGE = re.compile(
    r"%(\S+) = .*? (collective-permute-start|collective-permute-done)\((?:.*%(\S+?)\))?"
)


def test_each_message_of_a_ring_travels_behind_attention_and_no_rank_is_asked_for():
    given = {
        "model": {
            "layers": 2,
            "d_model": 1024,
            "heads": 8,
            "kv_heads": 2,
            "d_ff": 2048,
            "vocab_size": 1024,
        },
        "mesh": {"data": 2, "context": 4},
        "parallel": {"context_strategy": "ring"},
        "precision": {"compute": "bfloat16"},
        "train": {"global_batch_size": 2, "sequence_length": 16384},
    }
    text = compiled_step(given)
    assert " conditional(" not in text
    kernels, started, behind = 0, {}, []
    for line in text.splitlines():
        kernels += " custom-call(" in line and "fmha" in line.lower()
        if message := MESSAGE.search(line):
            name, kind, of = message.groups()
            if kind.endswith("start"):
                started[name] = kernels
            else:
                behind.append(kernels - started.pop(of))
    assert (
        not started and len(behind) >= 3 + 4
    )  # of a layer, forward and backward, with those of keys and values together
    assert min(behind) >= 1
