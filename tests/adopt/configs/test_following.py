"""What follows from several keys together: devices and batches, the warm-up, evaluation, and where the data lies."""

import json

import pytest

from meshtrain.adopt.configs import convert
from meshtrain.errors import ConfigError


@pytest.mark.parametrize(
    "batch, devices, data, rows, microbatches",
    [
        # rows a step, a device, accumulation: two of them say the third
        ((64, 2, None), 8, 8, 64, 4),
        ((64, None, 4), 8, 8, 64, 4),
        ((None, 2, 4), 8, 8, 64, 4),
        ((64, None, None), 8, 8, 64, 1),
        ((64, 2, 4), 8, 8, 64, 4),
        # and all three the devices
        ((64, 2, 4), None, 8, 64, 4),
        ((None, 2, 4), None, 1, 8, 4),
    ],
)
def test_batch_and_microbatches_follow_from_the_devices(
    converted, batch, devices, data, rows, microbatches
):
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    sections, _, said = converted(
        ds={name: n for name, n in zip(names, batch, strict=True) if n}, devices=devices
    )
    assert (
        sections["mesh"]["data"] == data
        and sections["train"]["global_batch_size"] == rows
    )
    assert sections["parallel"]["microbatches"] == microbatches
    assert any("--devices is not given" in sentence for sentence in said) == (
        devices is None and data == 1
    )


def test_devices_that_tensor_ranks_do_not_divide_are_refused(converted):
    with pytest.raises(
        ConfigError, match=r"--devices 6 .*autotp_size 4 \(.*ds.json, line 3\)"
    ):
        converted(ds={"tensor_parallel": {"autotp_size": 4}}, devices=6)


def test_a_warm_up_that_is_a_share_of_unknown_steps_is_said(converted):
    sections, text, said = converted({"stage": "sft", "warmup_ratio": 0.1})
    assert sections["optimizer"]["warmup_steps"] == 0
    assert (
        "warmup_ratio 0.1" in said[0]
        and "set optimizer.warmup_steps, or give --steps" in said[0]
    )
    assert "# To do: warmup_ratio" in text


def test_what_was_never_evaluated_is_not_evaluated_here(converted):
    sections, text, _ = converted({"stage": "sft", "val_size": 0.1, "eval_steps": 50})
    assert "eval" not in sections and sections["data"]["validation"] == 0.1
    assert "eval_steps 50 (line 1): eval_strategy is not given" in text


def test_a_dataset_is_the_file_that_their_list_names(write, tmp_path):
    one = {
        "file_name": "first.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk"},
    }
    write(
        json.dumps({"one": one, "two": {"file_name": "second.json"}}),
        "data/dataset_info.json",
    )
    write("x" * 300, "data/first.json")
    write("x" * 100, "data/second.json")
    file = write({"stage": "sft", "dataset": "one,two"}, "examples/train_lora/x.yaml")
    text, said = convert([file], 1)
    assert f"mixture: [{tmp_path}/data/first.json, {tmp_path}/data/second.json]" in text
    assert "weights: [300.0, 100.0]" in text
    assert said == ["dataset one: its columns talk are to be renamed."]


@pytest.mark.parametrize("media", ["images", "videos"])
def test_a_dataset_of_pictures_is_refused(write, media):
    mine = {"file_name": "x.json", "columns": {"messages": "messages", media: media}}
    write(json.dumps({"mine": mine}), "data/dataset_info.json")
    file = write({"stage": "sft", "dataset": "mine"}, "examples/x.yaml")
    with pytest.raises(
        ConfigError,
        match=f"dataset mine has {media} beside its text, which are not read here",
    ):
        convert([file], 1)


def test_what_counts_with_lora_alone_is_left_out_of_full_fine_tuning(converted):
    sections, text, _ = converted(
        {"finetuning_type": "full", "lora_rank": 16, "lora_target": "all"}
    )
    assert (
        "lora" not in sections
        and "lora_rank 16 (line 2)" in text
        and "finetuning_type is full" in text
    )
