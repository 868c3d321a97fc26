"""Each key of LLaMA-Factory's that is taken over, in a file of its own beside a few others: what it becomes here."""

import pytest
from refusals import tells

from meshtrain.adopt.configs.llama_factory import TABLE
from meshtrain.errors import ConfigError

EVAL = {"val_size": 0.1, "eval_strategy": "steps"}
FREEZE = {"finetuning_type": "freeze", "freeze_trainable_modules": "mlp"}

# (key, value, other keys, {our path: value})
TAKEN = [
    ("stage", "pt", {}, {"data.format": "text", "data.batching": "window"}),
    ("stage", "sft", {}, {"data.format": "chat", "data.batching": "grouped"}),
    ("stage", "dpo", {}, {"data.format": "pairs", "train.objective": "dpo"}),
    ("finetuning_type", "full", {}, {"lora.rank": None}),
    ("finetuning_type", "lora", {}, {"lora.rank": 8}),
    ("lora_rank", 64, {}, {"lora.rank": 64}),
    ("lora_alpha", 32, {}, {"lora.alpha": 32}),
    (
        "lora_target",
        "q_proj,v_proj,gate_up_proj",
        {},
        {"lora.targets": ["q", "v", "gate", "up"]},
    ),
    ("lora_target", "all", {}, {"lora.targets": None}),
    ("lora_dropout", 0.05, {}, {"lora.dropout": 0.05}),
    ("use_rslora", True, {}, {"lora.rslora": True}),
    (
        "additional_target",
        "embed_tokens,lm_head",
        {},
        {"train.trainable": ["embedding.tokens", "head.weight"]},
    ),
    (
        "freeze_trainable_modules",
        "mlp,self_attn",
        FREEZE,
        {"train.trainable": ["blocks.mlp.*", "blocks.attention.*"]},
    ),
    (
        "freeze_extra_modules",
        "norm",
        FREEZE,
        {"train.trainable": ["blocks.mlp.*", "head.norm*"]},
    ),
    ("pref_beta", 0.3, {"stage": "dpo"}, {"train.dpo_beta": 0.3}),
    ("dataset", "one", {"dataset_dir": "there"}, {"data.source": "there/one.json"}),
    (
        "dataset",
        "one, two",
        {},
        {"data.source": "mixture", "data.mixture": ["data/one.json", "data/two.json"]},
    ),
    (
        "interleave_probs",
        "0.3,0.7",
        {"dataset": "one,two"},
        {"data.weights": [0.3, 0.7]},
    ),
    ("dataset_dir", "there", {"dataset": "one"}, {"data.source": "there/one.json"}),
    (
        "eval_dataset",
        "held",
        {"eval_strategy": "steps"},
        {"data.validation_source": "data/held.json", "eval.every": 500},
    ),
    ("cutoff_len", 4096, {}, {"train.sequence_length": 4096}),
    ("packing", True, {}, {"data.batching": "packed"}),
    ("neat_packing", True, {}, {"data.batching": "packed"}),
    ("val_size", 0.1, {}, {"data.validation": 0.1, "eval.every": None}),
    (
        "eval_strategy",
        "steps",
        {"val_size": 0.1, "logging_steps": 7},
        {"eval.every": 7},
    ),
    ("evaluation_strategy", "steps", {"val_size": 0.1}, {"eval.every": 500}),
    ("eval_steps", 50, EVAL, {"eval.every": 50}),
    ("early_stopping_steps", 3, EVAL, {"eval.patience": 3}),
    (
        "model_name_or_path",
        "some/model",
        {},
        {"model.weights": "some/model", "data.tokenizer": "some/model/tokenizer.json"},
    ),
    ("pure_bf16", True, {}, {"precision.compute": "bfloat16"}),
    ("bf16", True, {"pure_bf16": False}, {"precision.compute": "bfloat16"}),
    ("fp16", True, {"bf16": False}, {"precision.compute": "float16"}),
    ("disable_gradient_checkpointing", True, {}, {"parallel.remat": "none"}),
    ("gradient_checkpointing", True, {}, {"parallel.remat": "full"}),
    ("output_dir", "saves/x", {}, {"run.directory": "saves/x"}),
    ("seed", 7, {}, {"run.seed": 7}),
    (
        "per_device_train_batch_size",
        2,
        {},
        {"train.global_batch_size": 16, "parallel.microbatches": 1},
    ),
    (
        "gradient_accumulation_steps",
        4,
        {"per_device_train_batch_size": 2},
        {"train.global_batch_size": 64, "parallel.microbatches": 4},
    ),
    ("num_train_epochs", 2, {}, {"train.epochs": 2}),
    (
        "max_steps",
        300,
        {"warmup_ratio": 0.1},
        {"train.steps": 300, "train.epochs": None, "optimizer.warmup_steps": 30},
    ),
    ("learning_rate", "1e-4", {}, {"optimizer.learning_rate": 1e-4}),
    (
        "lr_scheduler_type",
        "cosine",
        {},
        {"optimizer.schedule": "cosine", "optimizer.final_ratio": 0},
    ),
    (
        "lr_scheduler_type",
        "constant",
        {"warmup_steps": 9},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
    ),
    (
        "lr_scheduler_kwargs",
        '{"min_lr": 1e-6}',
        {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5},
        {"optimizer.final_ratio": 0.1},
    ),
    (
        "lr_scheduler_kwargs",
        {"min_lr": 1e-6},
        {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5},
        {"optimizer.final_ratio": 0.1},
    ),
    (
        "lr_scheduler_kwargs",
        {"min_lr_rate": 0.2},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"optimizer.final_ratio": 0.2},
    ),
    (
        "lr_scheduler_type",
        "warmup_stable_decay",
        {"max_steps": 320, "warmup_steps": 20},
        {
            "optimizer.schedule": "wsd",
            "optimizer.final_ratio": 0,
            "optimizer.decay_ratio": 0.625,
        },
    ),
    (
        "lr_scheduler_kwargs",
        '{"num_stable_steps": 250, "num_decay_steps": 50, "min_lr_ratio": 0.1, "decay_type": "linear"}',
        {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 300},
        {
            "optimizer.schedule": "wsd",
            "optimizer.final_ratio": 0.1,
            "optimizer.decay_ratio": 0.166667,
        },
    ),
    (
        "lr_scheduler_kwargs",
        {"num_stable_steps": 80, "num_decay_steps": 20},
        {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 100},
        {"optimizer.decay_ratio": 0.2},
    ),
    ("warmup_ratio", 0.1, {"steps": 205}, {"optimizer.warmup_steps": 21}),
    ("warmup_steps", 20, {"warmup_ratio": 0.5}, {"optimizer.warmup_steps": 20}),
    ("warmup_steps", 0.1, {"steps": 200}, {"optimizer.warmup_steps": 20}),
    ("optim", "paged_adamw_8bit", {}, {"optimizer.name": "adamw"}),
    ("optim", "adafactor", {}, {"optimizer.name": "adafactor"}),
    # torch's has no momentum
    ("optim", "sgd", {}, {"optimizer.name": "sgd", "optimizer.beta1": 0.0}),
    ("optim", "sgd", {"adam_beta1": 0.9}, {"optimizer.beta1": 0.0}),
    ("use_muon", True, {}, {"optimizer.name": "muon", "optimizer.beta1": 0.95}),
    ("weight_decay", 0.01, {}, {"optimizer.weight_decay": 0.01}),
    ("adam_beta1", 0.8, {}, {"optimizer.beta1": 0.8}),
    ("adam_beta2", 0.9, {}, {"optimizer.beta2": 0.9}),
    ("adam_epsilon", 1e-6, {}, {"optimizer.eps": 1e-6}),
    ("max_grad_norm", 0.3, {}, {"optimizer.grad_clip": 0.3}),
    ("label_smoothing_factor", 0.1, {}, {"train.label_smoothing": 0.1}),
    (
        "fsdp",
        "full_shard auto_wrap offload",
        {},
        {"parallel.zero_stage": 3, "parallel.offload_optimizer": True},
    ),
    ("logging_steps", 10, {}, {"log.every": 10}),
    ("save_steps", 50, {}, {"checkpoint.every": 50}),
    ("save_strategy", "no", {"save_steps": 50}, {"checkpoint.every": None}),
    ("save_total_limit", 5, {}, {"checkpoint.keep": 5}),
    (
        "report_to",
        ["wandb", "tensorboard"],
        {},
        {"telemetry.trackers": ["wandb", "tensorboard"]},
    ),
]


def ours(sections, path):
    section, _, key = path.partition(".")
    return sections.get(section, {}).get(key)


@pytest.mark.parametrize(
    "key, value, others, becomes", TAKEN, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_key_becomes_ours(converted, key, value, others, becomes):
    others = dict(others)
    steps = others.pop("steps", None)
    sections, _, _ = converted({"do_train": True, **others, key: value}, steps=steps)
    assert {path: ours(sections, path) for path in becomes} == becomes


def test_the_table_has_no_key_that_is_neither_taken_nor_left_out():
    """What refuses or names alone has a test below; all others stand above."""
    taken = {key for key, *_ in TAKEN}
    methods = {
        key
        for key, row in TABLE.items()
        if row.becomes and not row.why and key not in taken
    }
    assert methods == {
        "pref_loss",
        "do_train",
        "task",
        "export_dir",
        "sequence_parallel_size",
        "deepspeed",
        "lr_scheduler_kwargs.min_lr",
        "lr_scheduler_kwargs.min_lr_rate",
        "lr_scheduler_kwargs.min_lr_ratio",
        "lr_scheduler_kwargs.num_stable_steps",
        "lr_scheduler_kwargs.num_decay_steps",
        "lr_scheduler_kwargs.decay_type",
    }


@pytest.mark.parametrize(
    "key", [key for key, row in TABLE.items() if row.becomes and row.why]
)
def test_a_method_that_is_not_here_is_said_at_once_to_change_what_is_learned(
    converted, key
):
    value = {
        "enable_thinking": False,
        "ignore_pad_token_for_loss": False,
        "average_tokens_across_devices": False,
        "ld_alpha": 0.5,
        "mix_strategy": "interleave_over",
        "train_sampling_strategy": "sequential",
        "resume_from_checkpoint": "saves/x",
    }.get(key, True)
    _, _, said = converted({"stage": "sft", key: value})
    lost = [
        sentence
        for sentence in said
        if "is left out, which changes what is learned" in sentence
    ]
    assert any(sentence.startswith(f"{key} ") for sentence in lost)


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"optim": "adafactor"}, "optim adafactor"),
        ({"optim": "adamw_8bit"}, "moments are float32 here"),
        ({"use_muon": True}, "Muon"),
        ({"packing": True}, "as with neat_packing"),
        ({"pure_bf16": True}, "stays float32"),
        ({"val_size": 100}, "val_size 100"),
        (FREEZE, "in theirs in the last 2"),
        ({"lr_scheduler_kwargs": '{"num_cycles": 2}'}, "lr_scheduler_kwargs"),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 9},
            "along a line here, theirs by cosine",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "max_steps": 90,
                "lr_scheduler_kwargs": {"num_decay_steps": 10},
            },
            "theirs after 30 at the peak",
        ),
    ],
)
def test_what_is_not_quite_the_same_is_said_at_once(converted, keys, says):
    _, _, said = converted({"stage": "sft"} | keys)
    assert [
        sentence
        for sentence in said
        if says in sentence and "which changes what is learned" in sentence
    ], said


def test_what_is_as_here_is_not_said(converted):
    same = {
        "enable_thinking": True, "ignore_pad_token_for_loss": True, "average_tokens_across_devices": True, "mix_strategy": "concat",
        "use_asft_loss": False, "adapter_name_or_path": None, "fp8": False, "resume_from_checkpoint": None, "optim": "adamw_torch",
        "neat_packing": True,
    }  # fmt: skip
    assert converted({"stage": "sft"} | same)[2] == []


def test_every_key_that_is_left_out_is_named_with_its_value_and_line(converted):
    keys = [
        f"{key}inner" if key.endswith(".") else key
        for key, row in TABLE.items()
        if row.becomes is None
    ]
    _, text, _ = converted(
        "stage: sft\n" + "".join(f"{key}: word{k}\n" for k, key in enumerate(keys))
    )
    text = " ".join(text.replace("\n#  ", "").split())
    missing = [
        key for k, key in enumerate(keys) if f"{key} word{k} (line {k + 2})" not in text
    ]
    assert len(keys) > 150 and not missing


def test_what_changes_what_is_learned_is_said_at_once(converted):
    _, text, said = converted(
        {
            "neftune_noise_alpha": 5,
            "use_dora": True,
            "train_on_prompt": False,
            "optim": "lomo",
        }
    )
    told = [sentence.partition(" (")[0] for sentence in said]
    assert told == ["neftune_noise_alpha 5", "optim lomo", "use_dora true"]
    assert text.count("# Left out, which changes what is learned") == 3


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"stage": "kto"}, "stage is kto; there are pt, sft, dpo"),
        (
            {"stage": "dpo", "finetuning_type": "full"},
            "so finetuning_type must be lora",
        ),
        ({"stage": "dpo", "pref_loss": "orpo"}, "pref_loss is orpo"),
        ({"lora_target": "q_proj,in_proj"}, "adapters stand beside q_proj, k_proj"),
        (
            {"finetuning_type": "freeze"},
            "finetuning_type is freeze",
        ),
        (
            {"finetuning_type": "freeze", "freeze_trainable_modules": "all"},
            "trains all of some layers",
        ),
        ({"do_train": False}, "this file does not train"),
        ({"do_predict": True}, "do_predict is true; without do_train"),
        ({"do_eval": True}, "do_eval is true; without do_train"),
        ({"learning_rate": "high"}, "learning_rate is high ... number"),
        ({"bf16": "perhaps"}, "it must be true or false"),
        ({"per_device_train_batch_size": 0}, "it must be at least 1"),
        ({"cutoff_len": 10.5}, "it must be a whole number"),
        ({"cutoff_len": -1}, "sequence_length is -1"),
        ({"gradient_accumulation_steps": [2]}, "gradient_accumulation_steps"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_key_and_line(converted, keys, says):
    with pytest.raises(ConfigError) as refused:
        converted({"output_dir": "x", **keys})
    assert tells(str(refused.value), says)


def test_what_a_file_leaves_out_is_as_llama_factory_has_it(converted):
    sections, _, _ = converted({"stage": "sft"}, devices=2)
    assert sections["optimizer"] == {
        "learning_rate": 5e-5,
        "schedule": "linear",
        "warmup_steps": 0,
        "final_ratio": 0.0,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
    }
    assert sections["train"] == {
        "global_batch_size": 16,
        "sequence_length": 2048,
        "epochs": 3.0,
    }
    assert (sections["lora"], sections["checkpoint"], sections["run"]) == (
        {"rank": 8},
        {"every": 500},
        {"seed": 42},
    )
    assert (
        sections["parallel"] == {"remat": "full", "microbatches": 1}
        and sections["data"]["validation"] == 0.0
    )
