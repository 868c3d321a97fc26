"""Each key of DeepSpeed's that is taken over: what it becomes here."""

import json

import pytest

from meshtrain.adopt.configs.deepspeed import TABLE
from meshtrain.errors import ConfigError

ADAM, LION = {"optimizer.type": "AdamW"}, {"optimizer.type": "Lion"}
WARMUP, COSINE = {"scheduler.type": "WarmupLR"}, {"scheduler.type": "WarmupCosineLR"}
FP16 = {"fp16.enabled": True}

# (key, value, other keys, {our path: value})
TAKEN = [
    (
        "train_batch_size",
        64,
        {},
        {"train.global_batch_size": 64, "mesh.data": 8, "parallel.microbatches": 1},
    ),
    (
        "train_micro_batch_size_per_gpu",
        4,
        {},
        {"train.global_batch_size": 32, "parallel.microbatches": 1},
    ),
    (
        "gradient_accumulation_steps",
        2,
        {"train_batch_size": 64},
        {"train.global_batch_size": 64, "parallel.microbatches": 2},
    ),
    ("gradient_clipping", 0.5, {}, {"optimizer.grad_clip": 0.5}),
    ("seed", 7, {}, {"run.seed": 7}),
    (
        "optimizer.type",
        "Lion",
        {},
        {
            "optimizer.name": "lion",
            "optimizer.learning_rate": 1e-3,
            "optimizer.weight_decay": 0.0,
        },
    ),
    (
        "optimizer.type",
        "Adam",
        {},
        {"optimizer.name": "adamw", "optimizer.beta2": 0.999},
    ),
    ("optimizer.params.lr", 3e-5, ADAM, {"optimizer.learning_rate": 3e-5}),
    (
        "optimizer.params.betas",
        [0.8, 0.95],
        ADAM,
        {"optimizer.beta1": 0.8, "optimizer.beta2": 0.95},
    ),
    ("optimizer.params.eps", 1e-6, ADAM, {"optimizer.eps": 1e-6}),
    ("optimizer.params.weight_decay", 3e-7, ADAM, {"optimizer.weight_decay": 3e-7}),
    ("optimizer.params.max_grad_norm", 0.7, ADAM, {"optimizer.grad_clip": 0.7}),
    (
        "optimizer.params.momentum",
        0.7,
        {"optimizer.type": "SGD"},
        {"optimizer.beta1": 0.7},
    ),
    # torch's has no momentum unless it is given, and Lion's second beta is another than Adam's
    ("optimizer.type", "SGD", {}, {"optimizer.name": "sgd", "optimizer.beta1": 0.0}),
    ("optimizer.type", "Lion", {}, {"optimizer.beta1": 0.9, "optimizer.beta2": 0.99}),
    ("optimizer.type", "Muon", {}, {"optimizer.beta1": 0.95}),
    # without a scheduler there is none
    (
        "optimizer.params.lr",
        3e-5,
        ADAM,
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
    ),
    ("optimizer.params.lr", 3e-5, ADAM | WARMUP, {"optimizer.learning_rate": 1e-3}),
    (
        "optimizer.params.lr",
        3e-5,
        ADAM | COSINE,
        {"optimizer.learning_rate": 3e-5, "optimizer.schedule": "cosine"},
    ),
    (
        "scheduler.type",
        "WarmupLR",
        {},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 1000},
    ),
    (
        "scheduler.type",
        "WarmupDecayLR",
        {},
        {"optimizer.schedule": "linear", "optimizer.final_ratio": 0.0},
    ),
    (
        "scheduler.type",
        "WarmupCosineLR",
        {},
        {"optimizer.schedule": "cosine", "optimizer.final_ratio": 0.0001},
    ),
    ("scheduler.params.cos_min_ratio", 0.1, COSINE, {"optimizer.final_ratio": 0.1}),
    ("scheduler.params.warmup_max_lr", 2e-4, WARMUP, {"optimizer.learning_rate": 2e-4}),
    ("scheduler.params.warmup_num_steps", 50, WARMUP, {"optimizer.warmup_steps": 50}),
    ("scheduler.params.total_num_steps", 500, COSINE, {"train.steps": 500}),
    ("bf16.enabled", True, {}, {"precision.compute": "bfloat16"}),
    ("bfloat16.enabled", True, {}, {"precision.compute": "bfloat16"}),
    ("fp16.enabled", True, {"bf16.enabled": False}, {"precision.compute": "float16"}),
    ("fp16.initial_scale_power", 10, FP16, {"precision.loss_scale": 1024.0}),
    ("fp16.loss_scale_window", 500, FP16, {"precision.loss_scale_window": 500}),
    ("fp16.loss_scale_window", 500, {}, {"precision.loss_scale_window": None}),
    ("fp16.hysteresis", 3, FP16, {"precision.loss_scale_hysteresis": 3}),
    ("communication_data_type", "bf16", {}, {"precision.reduce": "bfloat16"}),
    ("zero_optimization", True, {}, {"parallel.zero_stage": 1}),
    ("zero_optimization.stage", 3, {}, {"parallel.zero_stage": 3}),
    (
        "zero_optimization.offload_optimizer.device",
        "cpu",
        {},
        {"parallel.offload_optimizer": True},
    ),
    (
        "zero_optimization.offload_optimizer.device",
        "none",
        {},
        {"parallel.offload_optimizer": None},
    ),
    ("zero_optimization.cpu_offload", True, {}, {"parallel.offload_optimizer": True}),
    (
        "tensor_parallel.autotp_size",
        4,
        {"train_micro_batch_size_per_gpu": 3},
        {"mesh.tensor": 4, "mesh.data": 2, "train.global_batch_size": 6},
    ),
    (
        "activation_checkpointing.partition_activations",
        True,
        {},
        {"parallel.remat": "full"},
    ),
    ("tensorboard.enabled", True, {}, {"telemetry.trackers": ["tensorboard"]}),
    ("wandb.enabled", True, {}, {"telemetry.trackers": ["wandb"]}),
]


def nested(keys):
    """Mappings in mappings, of keys joined by dots."""
    found = {}
    for key, value in keys.items():
        *parents, last = key.split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return found


@pytest.mark.parametrize(
    "key, value, others, becomes", TAKEN, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_key_becomes_ours(converted, key, value, others, becomes):
    sections, _, _ = converted(ds=nested({"steps_per_print": 10, **others, key: value}))
    found = {
        path: sections.get(path.partition(".")[0], {}).get(path.partition(".")[2])
        for path in becomes
    }
    assert found == becomes


def test_the_table_has_no_key_that_is_neither_taken_nor_left_out():
    methods = {key for key, row in TABLE.items() if row.becomes} - {
        key for key, *_ in TAKEN
    }
    assert methods == {
        "optimizer.params.adam_w_mode",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_min_ratio",
        "scheduler.params.warmup_type",
        "fp16.loss_scale",
        "sequence_parallel_size",
    } | {key for key, row in TABLE.items() if row.becomes and row.why}


def test_every_key_that_is_left_out_is_named_with_its_value_and_line(converted):
    keys = [
        f"{key}inner" if key.endswith(".") else key
        for key, row in TABLE.items()
        if row.becomes is None
    ]
    keys = sorted(set(keys) - {"zero_optimization.zenflow.inner"})
    given = nested(
        {"optimizer.type": "Adam"} | {key: f"word{k}" for k, key in enumerate(keys)}
    )
    _, text, _ = converted(ds=given)
    text = " ".join(text.replace("\n#  ", "").split())
    lines = json.dumps(given, indent=2).splitlines()
    for k, key in enumerate(keys):
        line = next(n for n, line in enumerate(lines, 1) if f'"word{k}"' in line)
        assert f"{key} word{k} (line {line})" in text, key


@pytest.mark.parametrize(
    "key, value, others, says",
    [
        (
            "scheduler.params.warmup_type",
            "log",
            WARMUP,
            "warmup_type log (line 6): the warm-up is linear",
        ),
        (
            "scheduler.params.warmup_min_lr",
            1e-6,
            WARMUP,
            "begins at its first rung",
        ),
        ("fp16.loss_scale", 1024, FP16, "loss scale is always dynamic"),
        (
            "zero_optimization.offload_optimizer.device",
            "nvme",
            {},
            "goes to host memory",
        ),
        ("optimizer.type", "Lamb", {}, "changes what is learned: optimizer.type Lamb"),
        ("scheduler.type", "OneCycle", {}, "so cosine stands"),
        (
            "optimizer.params.adam_w_mode",
            False,
            ADAM,
            "weight decay is always decoupled here",
        ),
        ("_comment", "hello", {}, "it is a comment"),
        (
            "optimizer.params.momentum",
            0.9,
            ADAM,
            "momentum 0.9 (line 6): sgd and muon alone",
        ),
        ("train_batch_size", "auto", {}, "the trainer's file"),
    ],
)
def test_what_is_otherwise_here_is_named(converted, key, value, others, says):
    _, text, _ = converted(ds=nested({"steps_per_print": 10, **others, key: value}))
    assert says in " ".join(text.replace("\n#  ", "").split())


@pytest.mark.parametrize(
    "key, value, others, says",
    [
        ("scheduler.type", "WarmupLR", {}, "scheduler.type WarmupLR ("),
        (
            "scheduler.type",
            "WarmupCosineLR",
            ADAM,
            "theirs logarithmic unless warmup_type",
        ),
        ("scheduler.params.warmup_type", "log", WARMUP, "the warm-up is linear here"),
        (
            "scheduler.params.warmup_min_lr",
            1e-6,
            WARMUP,
            "begins at its first rung",
        ),
        ("fp16.loss_scale", 1024, FP16, "loss scale is always dynamic"),
        (
            "optimizer.params.bias_correction",
            False,
            ADAM,
            "optimizer.params.bias_correction false (",
        ),
        (
            "optimizer.params.nesterov",
            True,
            {"optimizer.type": "SGD"},
            "optimizer.params.nesterov true (",
        ),
        ("optimizer.type", "Muon", {}, "how large Muon's updates are"),
        *(
            (f"{key}.enabled", True, {}, f"{key}.enabled true (")
            for key in (
                "curriculum_learning",
                "data_efficiency",
                "progressive_layer_drop",
                "quantize_training",
                "elasticity",
                "amp",
                "torch_autocast",
            )
        ),
        (
            "compression_training.weight_quantization.shared_parameters.enabled",
            True,
            {},
            "compression_training.",
        ),
    ],
)
def test_what_changes_what_is_learned_is_said_at_once(
    converted, key, value, others, says
):
    given = nested({"steps_per_print": 10, **others, key: value})
    _, _, said = converted(ds=given)
    assert any(
        says in sentence and "which changes what is learned" in sentence
        for sentence in said
    ), said


@pytest.mark.parametrize(
    "key, value",
    [
        ("curriculum_learning.enabled", False),
        ("optimizer.params.bias_correction", True),
        ("optimizer.params.torch_adam", True),
        ("scheduler.params.warmup_type", "linear"),
        ("fp16.loss_scale", 0),
        ("scheduler.params.warmup_min_lr", 0),
    ],
)
def test_what_is_as_here_is_not(converted, key, value):
    linear = {"scheduler.type": "WarmupLR", "scheduler.params.warmup_type": "linear"}
    _, _, said = converted(
        ds=nested(ADAM | linear | {"steps_per_print": 10, key: value})
    )
    assert said == []


def test_a_rate_and_an_optimizer_that_only_a_script_can_know_are_said(converted):
    _, _, said = converted(ds={"steps_per_print": 10})
    assert (
        "no file has an optimizer" in said[0] and "so the rate is constant" in said[1]
    )


def test_ranks_for_which_there_is_no_axis_are_refused(converted):
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2"):
        converted(ds={"sequence_parallel_size": 2, "steps_per_print": 1})
