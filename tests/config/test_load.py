"""YAML is read by the declared types, strictly, and comes back out as it went in."""

import dataclasses
import datetime
import fractions
import functools
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import yaml
from refusals import pattern_of

from meshtrain.config import Config, ConfigError, load, to_yaml
from meshtrain.config.key import keys
from meshtrain.schedule.generators import make_table


@pytest.fixture
def read(tmp_path):
    def write_and_load(text: str, *overrides: str) -> Config:
        (tmp_path / "c.yaml").write_text(text)
        return load(tmp_path / "c.yaml", overrides)

    return write_and_load


def test_keys_left_out_keep_their_defaults(read):
    assert read("mesh: {data: 2}") == load({"mesh": {"data": 2}})
    assert read("mesh:").mesh == Config().mesh, "a section may stand there without keys"


def test_sections_of_sections_are_read_overridden_and_printed(read):
    config = read(
        "parallel:\n  zero_stage: 2\n  reduce:\n    ratio: 1e-3\n",
        "parallel.reduce.block=32",
    )
    assert (
        config.parallel.reduce.ratio,
        config.parallel.reduce.block,
        config.parallel.zero_stage,
    ) == (0.001, 32, 2)
    assert config == load(
        {"parallel": {"zero_stage": 2, "reduce": {"ratio": 0.001, "block": 32}}}
    )
    assert read(to_yaml(config)) == config
    assert read("parallel: {reduce: }").parallel.reduce == load(None).parallel.reduce
    assert yaml.safe_load(to_yaml(config))["parallel"]["reduce"]["block"] == 32


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.0e-3", 0.001),
        (".5", 0.5),
        ("3", 3.0),
        ("'0.25'", 0.25),
        ("1_000", 1000.0),
        ("+2", 2.0),
    ],
)
def test_numbers_are_decoded_by_the_declared_type_whatever_yaml_thinks_they_are(
    text, value, read
):
    rate = read(f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate
    assert rate == value and isinstance(rate, float)


@pytest.mark.parametrize("text", ["true", "True", "yes", "on", "false", "no", "Off"])
def test_switches_understand_every_yes_and_no(text, read):
    switch = read(f"parallel: {{sequence_parallel: {text}}}").parallel.sequence_parallel
    assert switch is (text.lower() in ("true", "yes", "on"))


def test_texts_that_yaml_takes_for_something_else_stay_texts(read):
    config = read(
        "run: {directory: 2024-01-01}\ndata: {source: 'no', tokenizer: 010}\ncheckpoint: {resume: 1:30}"
    )
    assert (config.run.directory, config.data.source) == ("2024-01-01", "no")
    assert (config.data.tokenizer, config.checkpoint.resume) == ("010", "1:30")
    assert read(to_yaml(config)) == config


def test_null_stands_for_what_follows_from_other_keys(read):
    model = read(
        "model: {family: llama, d_model: 96, heads: 6, kv_heads: null, d_ff: ~, head_dim:}"
    ).model
    assert (model.kv_heads, model.head_dim, model.d_ff, model.tied_head) == (
        6,
        16,
        256,
        False,
    )
    model = read(
        "model: {family: gpt2, d_model: 96, heads: 6}\ntrain: {sequence_length: 40}"
    ).model
    assert (model.d_ff, model.tied_head, model.max_positions) == (384, True, 40)
    config = read(
        "parallel: {virtual_stages: 1, microbatches: 2, schedule: v_1f1b}\ndata: {rows_multiple: ~}"
    )
    assert (config.parallel.virtual_stages, config.data.rows_multiple) == (2, 16)


def test_overrides_are_read_like_values_of_the_file_come_after_it_and_the_last_one_wins(
    read,
):
    config = read(
        "model: {layers: 5}",
        "parallel.layer_split=[2, 3]",
        "mesh.pipeline=2",
        "parallel.microbatches=2",
        "optimizer.learning_rate=1e-3",
        "run.directory=a",
        "model.kv_heads=null",
        "run.directory=a b",
    )
    assert (config.parallel.layer_split, config.optimizer.learning_rate) == (
        (2, 3),
        0.001,
    )
    assert (config.run.directory, config.model.kv_heads) == ("a b", config.model.heads)


@pytest.mark.parametrize(
    "text",
    [
        "a #b",
        "#b",
        "a: b",
        "@a",
        "&a",
        "*a",
        "!a",
        "it's",
        "'it",
        "- a",
        "a]",
        "%a",
        "2024-01-01",
    ],
)
def test_an_overridden_text_is_what_stands_there(text, read):
    config = read("model: {layers: 5}", f"data.source={text}")
    assert config.data.source == text
    assert read(to_yaml(config)) == config


def test_an_overridden_text_may_be_quoted(read):
    assert read("model: {layers: 5}", "data.source='no'").data.source == "no"
    assert (
        read("model: {layers: 5}", "data.validation_source=null").data.validation_source
        is None
    )


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    content = b"\xef\xbb\xbfrun: {seed: 3}\r\nmodel: {layers: 5}\r\n"
    (tmp_path / "c.yaml").write_bytes(content)
    assert load(tmp_path / "c.yaml").model.layers == 5


def test_an_alias_stands_for_what_it_names_and_a_bomb_of_them_takes_no_room(read):
    assert read("model: {layers: &n 5, heads: *n, d_model: 40}").model.heads == 5
    lines = [
        "a: &a [" + "x," * 9 + "]",
        *(f"{k}: &{k} [{','.join(['*' + chr(ord(k) - 1)] * 9)}]" for k in "bcdefg"),
    ]
    with pytest.raises(ConfigError, match="line 1: there is no section a"):
        read("\n".join(lines))


def test_what_yaml_has_no_word_for_is_refused_when_given_from_python():
    with pytest.raises(ConfigError, match=r"^the given values hold Path\('x'\)"):
        load(
            {
                "run": {
                    "directory": type(
                        "Path", (), {"__repr__": lambda self: "Path('x')"}
                    )()
                }
            }
        )


@pytest.mark.parametrize(
    "overrides",
    [
        "mesh.tensor=2",
        {"mesh": {"tensor": 2}},
        [{"mesh": {"tensor": 2}}],
        None,
        [b"mesh.tensor=2"],
        b"mesh.tensor=2",
        [None],
        2,
        [["mesh.tensor=2"]],
    ],
    ids=repr,
)
def test_overrides_of_another_shape_are_told_how_they_are_written(overrides):
    shown = pattern_of(
        f"the overrides are {overrides!r}; ... list of texts, ... ['mesh.data=2']."
    )
    with pytest.raises(ConfigError, match=f"^{shown}$"):
        load({}, overrides)


def itself() -> list:
    """A list that holds itself."""
    found: list = []
    found.append(found)
    return found


NO_VALUES = [
    itself(),
    len,
    1 + 2j,
    "a\0b",
    [b"a"],
    iter(()),
    object(),
    {"a": {"b": 1}},
    b"run",
]
NO_NUMBERS = [float("nan"), datetime.date(2024, 1, 1), fractions.Fraction(1, 3)]


@pytest.mark.parametrize(
    "section", [field.name for field in dataclasses.fields(Config)]
)
def test_no_key_takes_what_no_yaml_file_can_hold(section):
    for key, rules in keys(type(getattr(Config(), section))).items():
        counts = isinstance(rules.default, int | float)
        for value in NO_VALUES + NO_NUMBERS * counts:
            with pytest.raises(ConfigError) as error:
                load(
                    {
                        section: functools.reduce(
                            _within, reversed(key.split(".")), value
                        )
                    }
                )
            assert "\n" not in str(error.value) and str(error.value).isprintable()


def _within(value, name):
    return {name: value}


@pytest.mark.parametrize("source", [3, b"config.yaml", [{"run": {}}]], ids=repr)
def test_what_is_no_config_at_all_is_told_what_may_be(source):
    shown = pattern_of(
        f"the config is {source!r}; ... file, nested dicts, a config or None."
    )
    with pytest.raises(ConfigError, match=f"^{shown}$"):
        load(source)


def test_paths_and_numpys_numbers_may_be_given_from_python():
    sections = {
        "model": {"layers": 4},
        "run": {"directory": Path("runs/mine")},
        "mesh": {"pipeline": np.int64(2)},
        "parallel": {
            "sequence_parallel": np.bool_(True),
            "layer_split": (np.int32(3), np.uint8(1)),
        },
        "optimizer": {"learning_rate": np.float32(0.5), "eps": np.float64(1e-6)},
    }
    plain = {
        "run": {"directory": "runs/mine"},
        "mesh": {"pipeline": 2},
        "optimizer": {"learning_rate": 0.5, "eps": 1e-6},
    }
    plain |= {
        "model": {"layers": 4},
        "parallel": {"sequence_parallel": True, "layer_split": [3, 1]},
    }
    assert load(sections) == load(plain)


def test_a_table_itself_is_told_to_be_written_to_a_file(tmp_path, monkeypatch):
    table = make_table("1f1b", 2, 2)
    with pytest.raises(ConfigError) as refused:
        load(
            {
                "mesh": {"pipeline": 2},
                "parallel": {"schedule": table, "microbatches": 2},
            }
        )
    sentence = str(refused.value)
    written = (
        r"^the given values .* table 1f1b .* file, with "
        r"(Path\('mine\.csv'\)\..*), and .*\.$"
    )
    monkeypatch.chdir(tmp_path)
    exec(re.match(written, sentence)[1], {"Path": Path, "table": table})
    load(
        {
            "mesh": {"pipeline": 2},
            "parallel": {"schedule": Path("mine.csv"), "microbatches": 2},
        }
    )


def test_printed_config_is_whole_and_loads_to_an_equal_one(read, tmp_path):
    config = read(
        "model: {family: gpt2, layers: 6, dropout: 0.1}\nmesh: {pipeline: 2}\nparallel: {layer_split: [2, 4]}"
    )
    printed = to_yaml(config)
    assert read(printed) == config
    whole = {
        name: {field.name for field in dataclasses.fields(kind)}
        for name, kind in typing.get_type_hints(Config).items()
    }
    assert {
        name: set(section) for name, section in yaml.safe_load(printed).items()
    } == whole


def test_every_key_is_documented():
    for path, key in keys(Config).items():
        assert len(key.doc) > 10, path


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_every_config_that_ships_is_legal(path):
    assert load(path).run.directory == f"runs/{path.stem}"


def test_another_config_is_loaded_with_overrides_and_what_followed_follows_again(read):
    one = read(
        "train: {steps: 200}\nmodel: {d_model: 64}\noptimizer: {warmup_steps: 7}"
    )
    assert load(one) == one
    changed = load(one, ["model.d_model=128", "train.steps=300"])
    assert changed == read(
        "train: {steps: 300}\nmodel: {d_model: 128}\noptimizer: {warmup_steps: 7}"
    )
    assert changed.model.d_ff != one.model.d_ff, "it follows from the width"
    with pytest.raises(ConfigError, match=r"--set mesh\.pipelin=3: .*no key"):
        load(one, ["mesh.pipelin=3"])


def test_errors_name_file_and_line(read, tmp_path):
    with pytest.raises(ConfigError, match=r"c\.yaml, line 4: train\.steps is 'ten'"):
        read("model:\n  layers: 2\ntrain:\n  steps: ten")


def test_given_values_are_named_without_a_line():
    with pytest.raises(
        ConfigError,
        match=r"^the given values: .*key model\.layer; .*layers\?$",
    ):
        load({"model": {"layer": 3}})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora": {"alpha": {1, 2}}}, r"hold {1, 2}; they may be texts"),
        ({"run": {"directory": b"x"}}, r"hold b'x'; they may be texts"),
        ({b"run": 1}, r"hold b'run'; they may be texts"),
        (
            {"run": functools.reduce(lambda inner, _: {"a": inner}, range(20), {})},
            "nested more than 8 deep",
        ),
        (
            {"run": functools.reduce(lambda inner, _: {"a": inner}, range(3000), {})},
            "nested more than 8 deep",
        ),
        (
            {"train": {"steps": 10**5000}},
            r"train\.steps is '0x.*; .*at least 1",
        ),
        ({None: 1}, "no section null"),
        ({("run", "seed"): 1}, "a key is a list"),
        ({"run": b"seed: 1"}, "hold b'seed: 1'"),
        ({"run": [None]}, "run"),
        ({"\u202emesh": {"data": 2}}, "no section"),
        ({"optimizer": {"name": "adamw\u202e"}}, "optimizer.name"),
    ],
    ids=range(12),
)
def test_what_no_config_holds_is_one_sentence(values, said):
    with pytest.raises(ConfigError, match=f"^the given values.*{said}") as error:
        load(values)
    assert "\n" not in str(error.value)
