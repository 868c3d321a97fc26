"""Files are read, merged, and written as one of our configs."""

import json
import re
from pathlib import Path

import pytest
import yaml
from refusals import tells

import meshtrain as mt
from meshtrain.adopt.__main__ import main
from meshtrain.adopt.configs import convert
from meshtrain.errors import ConfigError


@pytest.mark.parametrize(
    "name, content, says",
    [
        (
            "x.yaml",
            "stage: sft\nlearning_rat: 1\n",
            "x.yaml, line 2: ... learning_rat; did you mean learning_rate?",
        ),
        (
            "x.json",
            '{"zero_optimization": {"stag": 3}, "seed": 1}',
            "did you mean zero_optimization.stage?",
        ),
        (
            "x.yaml",
            "stage: sft\nseed: 1\nseed: 1\n",
            "seed ... twice, in lines 2 and 3",
        ),
        (
            "x.json",
            '{"seed": 1,\n "bf16": {"enabled": true,\n "enabled": true}}',
            "bf16.enabled stands there twice, in lines 2 and 3",
        ),
        ("x.yaml", "stage: [sft\n", "is not valid YAML"),
        ("x.json", '{"seed": 1,\n}', "x.json, line 2 is not valid JSON"),
        (
            "x.yaml",
            "train: {steps: 3}\n",
            "has no key of LLaMA-Factory or of DeepSpeed",
        ),
        ("x.yaml", "stage: " + "[" * 3000, "x.yaml"),
        ("x.yaml", "- stage\n", "holds no keys with values"),
        ("x.yaml", "", "holds no keys with values"),
        ("x.yaml", "stage: !!python/object:os.system x\n", "there is a tag"),
    ],
)
def test_a_file_that_is_none_of_theirs_is_refused(write, name, content, says):
    with pytest.raises(ConfigError) as refused:
        convert([write(content, name)])
    assert tells(str(refused.value), says)


def test_an_unknown_key_is_named(converted):
    _, text, said = converted(
        {"stage": "sft", "my_own": {"inner": 3}, "use_axft_loss": True}
    )
    assert "my_own.inner 3" in said[0] and "changes what is learned" in said[0]
    # a loss that is not here is none that an unknown one is taken for
    assert "use_axft_loss true" in said[1]
    assert (
        "# Left out: my_own.inner 3 (line 2): no key of LLaMA-Factory's that is known here."
        in text
    )


def test_a_misspelt_key_that_would_be_left_out_anyway_refuses_nothing(converted):
    _, text, _ = converted(
        ds={"zero_optimization": {"stage3_param_persitance_threshold": 1e5}, "seed": 1}
    )
    text = text.replace("\n#   ", " ")
    assert (
        "(like zero_optimization.stage3_param_persistence_threshold, which is left out too)"
        in text
    )


def test_tabs_exponents_and_quotes_are_read_as_they_are_meant(write):
    file = write(
        '{\n\t"optimizer":\t{"type": "AdamW", "params": {"lr": 3e-5}},\n\t"seed": 7\n}',
        "x.json",
    )
    assert "learning_rate: 3.0e-05" in convert([file])[0]
    file = write(
        "learning_rate: 1e-4\nstage: sft\noutput_dir: '1e-4'\nmodel_name_or_path: \"07\"\n",
        "x.yaml",
    )
    ours = yaml.safe_load(convert([file])[0])
    assert ours["optimizer"]["learning_rate"] == 1e-4
    assert (ours["run"]["directory"], ours["model"]["weights"]) == ("1e-4", "07")


LORA = {"stage": "sft", "output_dir": "x"}


@pytest.mark.parametrize(
    "lf, ds, says",
    [
        (
            {"gradient_accumulation_steps": 32},
            {"gradient_accumulation_steps": 64},
            [
                "gradient_accumulation_steps is 32 (",
                "lf.yaml, line 1)",
                "gradient_accumulation_steps is 64 (",
                "ds.json, line 2)",
            ],
        ),
        (
            {"learning_rate": 1e-4},
            {"optimizer": {"params": {"lr": 5e-5}}},
            [
                "learning_rate is 0.0001 (",
                "optimizer.params.lr is 5e-05 (",
                "ds.json, line 4)",
                "both are optimizer.learning_rate here",
            ],
        ),
        (
            {"bf16": True},
            {"fp16": {"enabled": True}},
            [
                "fp16.enabled is true",
                "ds.json, line 3",
                "bf16 is true",
                "lf.yaml, line 1",
            ],
        ),
        (
            {"bf16": True, "fp16": True},
            None,
            ["fp16 is true", "lf.yaml, line 2", "bf16 is true", "lf.yaml, line 1"],
        ),
        (
            None,
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            ["ds.json, line 3", "ds.json, line 6"],
        ),
        (
            {"bf16": True},
            {"bf16": {"enabled": False}},
            ["bf16 is true", "bf16.enabled is false"],
        ),
        (
            None,
            {
                "optimizer": {"params": {"lr": 1e-3}},
                "scheduler": {"params": {"warmup_max_lr": 1e-4}},
            },
            [
                "optimizer.params.lr is 0.001",
                "scheduler.params.warmup_max_lr is 0.0001",
            ],
        ),
        (
            {"gradient_checkpointing": True, "disable_gradient_checkpointing": True},
            None,
            ["parallel.remat"],
        ),
        (
            {"warmup_steps": 10},
            {"scheduler": {"params": {"warmup_num_steps": 20}}},
            ["warmup_steps is 10", "warmup_num_steps is 20"],
        ),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            {"train_batch_size": 100},
            [
                "train_batch_size 100 (",
                "per_device_train_batch_size 2 (",
                "gradient_accumulation_steps 4 (",
                "8 data ranks is 64; let",
            ],
        ),
        (
            None,
            {"train_batch_size": 100},
            ["train_batch_size 100 (", "is not a multiple of 8 data ranks, 8"],
        ),
        (
            None,
            {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 5},
            ["is not a multiple of", "x 8 data ranks, 40"],
        ),
    ],
)
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
    }
    ds["bf16"] = {"enabled": "auto"}
    sections, text, _ = converted(
        {**LORA, "per_device_train_batch_size": 3, "bf16": True}, ds
    )
    assert (
        sections["train"]["global_batch_size"] == 3 * 4 * 8
        and sections["parallel"]["microbatches"] == 4
    )
    assert (
        sections["precision"]["compute"] == "bfloat16"
        and sections["optimizer"]["grad_clip"] == 0.3
    )
    assert (
        "train_micro_batch_size_per_gpu auto" in text
        and "as the trainer's file has it" in text
    )


def test_a_section_of_deepspeeds_has_its_own_defaults_beside_the_trainers_file(
    converted,
):
    sections, _, said = converted(LORA, {"scheduler": {"type": "WarmupLR"}})
    assert (
        sections["optimizer"]["learning_rate"] == 1e-3
        and sections["optimizer"]["warmup_steps"] == 1000
    )
    assert any("theirs logarithmic" in sentence for sentence in said)
    auto = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    sections, _, said = converted(LORA | {"warmup_ratio": 0.1}, auto, steps=100)
    assert sections["optimizer"]["warmup_steps"] == 10 and any(
        "theirs logarithmic" in sentence for sentence in said
    )


HF = Path(__file__).parents[1] / "golden" / "qwen2"
LF = {
    "model_name_or_path": str(HF),
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "all",
    "dataset": "mine",
    "template": "qwen",
    "cutoff_len": 64,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-4,
    "num_train_epochs": 2.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "deepspeed": "examples/deepspeed/ds_z3_config.json",
    "output_dir": "saves/mine",
}
DS = {
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": "auto"},
}


@pytest.fixture
def theirs(write):
    """Their two files, as they lie in their repository: the YAML names the JSON from its root."""
    write(json.dumps(DS), "examples/deepspeed/ds_z3_config.json")
    return write(LF, "examples/train_lora/mine.yaml")


def test_what_is_printed_loads_and_plans(theirs, capsys, tmp_path):
    assert main(["config", str(theirs), "--devices", "4", "--steps", "100"]) == 0
    printed = capsys.readouterr()
    (tmp_path / "ours.yaml").write_text(printed.out)
    config = mt.load(tmp_path / "ours.yaml")
    assert (
        config.model.family == "qwen2"
        and config.lora.rank == 4
        and config.parallel.zero_stage == 3
    )
    assert (
        config.mesh.devices == 4
        and config.train.global_batch_size == 8
        and config.optimizer.warmup_steps == 10
    )
    assert mt.plan(config).fits
    assert re.match(
        rf"# From {theirs} \(LLaMA-Factory\) and .*\(DeepSpeed\), for 4 devices\.\n",
        printed.out,
    )
    assert re.fullmatch(
        r"meshtrain: dataset mine: .*dataset_info\.json.*: data/mine\.json is a guess\.\n",
        printed.err,
    )


@pytest.mark.thorough
def test_no_key_is_passed_over_in_silence(theirs, capsys):
    """Whichever is taken away, what is printed is another, but for those that say what their program does anyway."""

    def printed(keys):
        theirs.write_text(yaml.safe_dump(keys))
        assert main(["config", str(theirs)]) == 0
        return re.sub(r"line \d+", "", capsys.readouterr().out)

    whole = printed(LF)
    silent = {
        key for key in LF if printed({k: v for k, v in LF.items() if k != key}) == whole
    }
    assert silent == {"stage", "do_train", "finetuning_type", "lora_target"}


def test_a_file_that_deepspeed_names_and_that_is_not_there_is_said(
    theirs, write, capsys
):
    theirs.write_text(yaml.safe_dump(LF | {"deepspeed": "nowhere.json"}))
    assert main(["config", str(theirs)]) == 0
    said = capsys.readouterr().err
    assert "deepspeed nowhere.json" in said and "give it after this one" in said
    # given, it is the one that is meant
    assert main(["config", str(theirs), str(write(DS, as_json=True))]) == 0
    assert "nowhere" not in capsys.readouterr().err
