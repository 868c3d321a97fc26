import pytest
import yaml

from meshtrain.adopt.configs import convert
from meshtrain.errors import ConfigError


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("x.yaml", "stage: sft\nlearning_rat: 1\n", "x.yaml, line 2: LLaMA-Factory has no key learning_rat; did you mean learning_rate?"),
        ("x.json", '{"zero_optimization": {"stag": 3}, "seed": 1}', "did you mean zero_optimization.stage?"),
        ("x.yaml", "stage: sft\nseed: 1\nseed: 1\n", "seed stands there twice, in lines 2 and 3"),
        ("x.json", '{"seed": 1,\n "bf16": {"enabled": true,\n "enabled": true}}', "bf16.enabled stands there twice, in lines 2 and 3"),
        ("x.yaml", "stage: [sft\n", "is not valid YAML"),
        ("x.json", '{"seed": 1,\n}', "x.json, line 2 is not valid JSON"),
        ("x.yaml", "train: {steps: 3}\n", "has no key of LLaMA-Factory or of DeepSpeed"),
        ("x.yaml", "- stage\n", "holds no keys with values"),
        ("x.yaml", "", "holds no keys with values"),
        ("x.yaml", "stage: !!python/object:os.system x\n", "there is a tag"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_theirs_is_refused(write, name, content, says):
    with pytest.raises(ConfigError) as refused:
        convert([write(content, name)])
    assert says in str(refused.value)


def test_an_unknown_key_is_named(converted):
    _, text, _ = converted({"stage": "sft", "my_own": {"inner": 3}})
    assert "# Left out: my_own.inner 3 (line 2): no key of LLaMA-Factory's that is known here." in text


def test_a_misspelt_key_that_would_be_left_out_anyway_refuses_nothing(converted):
    _, text, _ = converted(ds={"zero_optimization": {"stage3_param_persitance_threshold": 1e5}, "seed": 1})
    assert "(like zero_optimization.stage3_param_persistence_threshold, which is left out too)" in text.replace(
        "\n#   ", " "
    )


def test_tabs_exponents_and_quotes_are_read_as_they_are_meant(write):
    text, _ = convert(
        [write('{\n\t"optimizer":\t{"type": "AdamW", "params": {"lr": 3e-5}},\n\t"seed": 7\n}', "x.json")]
    )
    assert "learning_rate: 3.0e-05" in text
    text, _ = convert(
        [write("learning_rate: 1e-4\nstage: sft\noutput_dir: '1e-4'\nmodel_name_or_path: \"07\"\n", "x.yaml")]
    )
    ours = yaml.safe_load(text)
    assert (
        ours["optimizer"]["learning_rate"] == 1e-4
        and ours["run"]["directory"] == "1e-4"
        and ours["model"]["weights"] == "07"
    )
