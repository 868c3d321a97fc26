"""The command: what it prints is a config of ours, which loads and plans."""

import json
import re
from pathlib import Path

import pytest
import yaml

import meshtrain as mt
from meshtrain.adopt.__main__ import main

HF = Path(__file__).parents[1] / "golden" / "qwen2"
LF = {
    "model_name_or_path": str(HF), "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4, "lora_target": "all",
    "dataset": "mine", "template": "qwen", "cutoff_len": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-4, "num_train_epochs": 2.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    "deepspeed": "examples/deepspeed/ds_z3_config.json", "output_dir": "saves/mine",
}  # fmt: skip
DS = {"train_batch_size": "auto", "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}


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
    assert config.model.family == "qwen2" and config.lora.rank == 4 and config.parallel.zero_stage == 3
    assert config.mesh.devices == 4 and config.train.global_batch_size == 8 and config.optimizer.warmup_steps == 10
    assert mt.plan(config).fits
    assert (
        printed.out.startswith(f"# From {theirs} (LLaMA-Factory) and ")
        and "(DeepSpeed), for 4 devices.\n" in printed.out
    )
    assert printed.err.splitlines() == [
        "meshtrain: dataset mine: which file it is does not stand in data/dataset_info.json here: data/mine.json is a guess."
    ]


def test_no_key_is_passed_over_in_silence(theirs, capsys):
    """Whichever is taken away, what is printed is another, but for those that say what their program does anyway."""

    def printed(keys):
        theirs.write_text(yaml.safe_dump(keys))
        assert main(["config", str(theirs)]) == 0
        return re.sub(r"line \d+", "", capsys.readouterr().out)

    whole = printed(LF)
    silent = {key for key in LF if printed({k: v for k, v in LF.items() if k != key}) == whole}
    assert silent == {"stage", "do_train", "finetuning_type", "lora_target"}


def test_a_file_that_deepspeed_names_and_that_is_not_there_is_said(theirs, write, capsys):
    theirs.write_text(yaml.safe_dump(LF | {"deepspeed": "nowhere.json"}))
    assert main(["config", str(theirs)]) == 0
    assert (
        "deepspeed nowhere.json" in (said := capsys.readouterr().err)
        and "is no file here: give it after this one" in said
    )
    # given, it is the one that is meant
    assert main(["config", str(theirs), str(write(DS, as_json=True))]) == 0
    assert "nowhere" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, says",
    [
        (["config", "/no/such.yaml"], "there is no config file /no/such.yaml"),
        (["config"], "the following arguments are required: FILE"),
        (["config", "x.yaml", "--devices", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_a_mistake_gets_one_sentence(capsys, words, says):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and says in said and len(said.strip().splitlines()) == 1
