"""Values that contradict each other, in a file or between two: refused, with both and where they stand."""

import pytest

from meshtrain.adopt.configs import convert
from meshtrain.errors import ConfigError

LORA = {"stage": "sft", "output_dir": "x"}


@pytest.mark.parametrize(
    "lf, ds, says",
    [
        (
            {"gradient_accumulation_steps": 32},
            {"gradient_accumulation_steps": 64},
            ["gradient_accumulation_steps is 32 (", "lf.yaml, line 1)", "gradient_accumulation_steps is 64 (", "ds.json, line 2)"],
        ),
        (
            {"learning_rate": 1e-4},
            {"optimizer": {"params": {"lr": 5e-5}}},
            ["learning_rate is 0.0001 (", "optimizer.params.lr is 5e-05 (", "ds.json, line 4)", "both are optimizer.learning_rate here"],
        ),
        ({"bf16": True}, {"fp16": {"enabled": True}}, ["fp16.enabled is true", "ds.json, line 3", "bf16 is true", "lf.yaml, line 1"]),
        ({"bf16": True, "fp16": True}, None, ["fp16 is true", "lf.yaml, line 2", "bf16 is true", "lf.yaml, line 1"]),
        (None, {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["ds.json, line 3", "ds.json, line 6"]),
        ({"bf16": True}, {"bf16": {"enabled": False}}, ["bf16 is true", "bf16.enabled is false"]),
        (
            None,
            {"optimizer": {"params": {"lr": 1e-3}}, "scheduler": {"params": {"warmup_max_lr": 1e-4}}},
            ["optimizer.params.lr is 0.001", "scheduler.params.warmup_max_lr is 0.0001"],
        ),
        ({"gradient_checkpointing": True, "disable_gradient_checkpointing": True}, None, ["parallel.remat"]),
        ({"warmup_steps": 10}, {"scheduler": {"params": {"warmup_num_steps": 20}}}, ["warmup_steps is 10", "warmup_num_steps is 20"]),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            {"train_batch_size": 100},
            ["train_batch_size 100 (", "per_device_train_batch_size 2 (", "gradient_accumulation_steps 4 (", "8 data ranks is 64; let"],
        ),
        (None, {"train_batch_size": 100}, ["train_batch_size 100 (", "is no multiple of 8 data ranks, 8"]),
        (None, {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 5}, ["is no multiple of", "x 8 data ranks, 40"]),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_with_both_values_and_lines(converted, lf, ds, says):
    with pytest.raises(ConfigError) as refused:
        converted(lf, ds)
    assert [part for part in says if part not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_auto_and_defaults_contradict_nothing(converted):
    """auto is as the trainer has it; and a default of the one gives way to what the other says."""
    ds = {
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.3,
        "bf16": {"enabled": "auto"},
    }
    sections, text, _ = converted({**LORA, "per_device_train_batch_size": 3, "bf16": True}, ds)
    assert sections["train"]["global_batch_size"] == 3 * 4 * 8 and sections["parallel"]["microbatches"] == 4
    assert sections["precision"]["compute"] == "bfloat16" and sections["optimizer"]["grad_clip"] == 0.3
    assert "train_micro_batch_size_per_gpu auto" in text and "as the trainer's file has it" in text


def test_two_files_of_one_kind_are_merged_too(write):
    one, two = write({"stage": "sft", "seed": 1}, "one.yaml"), write({"seed": 2, "bf16": True}, "two.yaml")
    with pytest.raises(ConfigError, match=r"seed is 1 .*one.yaml, line 1\), but seed is 2 .*two.yaml, line 2"):
        convert([one, two])
