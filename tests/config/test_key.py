"""A key is one line: from it alone follow what is read and refused, what null stands for, and what a resume does with a
change.
"""

import dataclasses
import re
import sys

import pytest
from refusals import pattern_of

from meshtrain.checkpoint.restoring import check_keys, compare
from meshtrain.config import Config, ConfigError, load, replaced, resolve, to_yaml
from meshtrain.config.follow import differences, nested, put, value_of
from meshtrain.config.key import Resume, key, keys, known

SHAPES = {"round": 1, "square": 2}


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """A key of each rule."""

    free: int = key(1, "where the toy is", least=1, resume=Resume.FREE)
    reported: int = key(1, "how often it is played with", least=1)
    refused: int = key(1, "who plays with it", least=1, resume=Resume.REFUSED)
    content: int = key(1, "what is in it", least=1, resume=Resume.CONTENT)
    tokens: int = key(1, "what it stands for", least=1, resume=Resume.TOKENS)
    shape: str = key("round", "what it is", one_of=SHAPES, resume=Resume.SHAPE)
    size: int = key(1, "how large it is", least=1, most=9, resume=Resume.SIZE)
    weight: int = key(
        None,
        "what it weighs; null: ten times its size",
        least=1,
        follows=lambda c: 10 * c.toy.size,
    )
    corners: int = key(
        0,
        "of a square",
        resume=Resume.REFUSED,
        counts=lambda c: c.toy.shape == "square",
    )


@dataclasses.dataclass(frozen=True)
class WithToy(Config):
    toy: ToyConfig = dataclasses.field(default_factory=ToyConfig)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(sys.modules[load.__module__], "Config", WithToy)


def changed(allow: str = "", weights_only: bool = False, **values) -> list[str]:
    """What a resume of the defaults says when the toy has other values."""
    settings = [f"toy.{name}={value}" for name, value in values.items()] + [
        f"checkpoint.allow=[{allow}]"
    ]
    return compare(
        dataclasses.asdict(load(None)), load(None, settings), "x", weights_only
    )


def test_a_new_key_is_read_and_printed(tmp_path):
    (tmp_path / "toy.yaml").write_text("toy: {size: 2, shape: square}")
    config = load(tmp_path / "toy.yaml", ["toy.free=3"])
    assert config.toy == ToyConfig(free=3, size=2, shape="square", weight=20)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("toy.free=0", "toy.free is 0; ... least 1 ... most 2147483647."),
        ("toy.size=10", "toy.size is 10; ... least 1 ... most 9."),
        (
            "toy.shape=rond",
            "toy.shape is 'rond'; ... square; ... round?",
        ),
        ("toy.shape=", "toy.shape ... no value; ... round, square."),
        (
            "toy.size=null",
            "toy.size ... no value; ... least 1 ... most 9.",
        ),
        ("toy.wait=3", "key toy.wait; did you mean toy.weight?"),
        ("checkpoint.allow=[toy.refusd]", "did you mean toy.refused?"),
    ],
)
def test_a_new_key_is_refused_by_its_line(setting, sentence):
    with pytest.raises(ConfigError) as refused:
        check_keys(load(None, [setting]))
    assert re.search(f"{pattern_of(sentence)}$", str(refused.value))


def test_a_name_that_is_registered_later_is_legal_from_then_on(monkeypatch):
    with pytest.raises(ConfigError):
        load(None, ["toy.shape=flat"])
    monkeypatch.setitem(SHAPES, "flat", 3)
    assert load(None, ["toy.shape=flat"]).toy.shape == "flat"


def test_what_null_stands_for_follows_the_others_until_it_is_given():
    assert load(None, ["toy.weight=null"]).toy.weight == 10
    given = load(None, ["toy.size=2", "toy.weight=7"])
    assert replaced(given, toy={"size": 3}).toy.weight == 7
    assert replaced(load(None), toy={"size": 3}).toy.weight == 30
    assert replaced(given, toy={"weight": None}).toy.weight == 20


def test_a_resume_goes_by_the_rule_of_the_line():
    assert changed(free=2) == [] and changed() == []
    (note,) = changed(reported=2)
    assert re.match(r"toy\.reported was 1 and is 2 ", note)
    for name, value in (
        ("refused", 2),
        ("content", 2),
        ("tokens", 2),
        ("shape", "square"),
        ("size", 2),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"^x does not fit this config: toy\.{name} is {value} but was ",
        ):
            changed(**{name: value})
    for name in ("refused", "content", "tokens"):
        assert changed(f"toy.{name}", **{name: 2}) == [
            f"toy.{name} was 1 and is 2 from here on."
        ]


def test_weights_alone_go_by_it_too():
    assert changed(weights_only=True, reported=2, refused=2, content=2) == []
    for name, value in (("tokens", 2), ("shape", "square"), ("size", 2)):
        with pytest.raises(ConfigError, match=rf"toy\.{name} is {value} but was "):
            changed(weights_only=True, **{name: value})
    assert changed("toy.size", weights_only=True, size=2) == []
    with pytest.raises(
        ConfigError, match=r"only .*\.layers and .*\.vocab_size and .*\.size "
    ):
        check_keys(
            load(
                None,
                [
                    "checkpoint.allow=[toy.shape]",
                    "checkpoint.weights_only=true",
                    "checkpoint.resume=a",
                ],
            )
        )


def test_a_key_on_which_nothing_depends_is_not_compared():
    assert changed(corners=4) == []
    square, old = (
        load(None, ["toy.shape=square"]),
        dataclasses.asdict(load(None, ["toy.shape=square"])),
    )
    with pytest.raises(ConfigError, match=r"toy\.corners is 4 but was 0"):
        compare(old, replaced(square, toy={"corners": 4}), "x", weights_only=False)


def test_a_section_may_have_sections():
    inner = {"parallel": {"zero_stage": 2, "reduce": {"block": 32}}}
    config = put(WithToy(), **inner, toy={"size": 3})
    assert (
        config.parallel.reduce.block == 32
        and config.parallel.reduce.rank == WithToy().parallel.reduce.rank
    )
    assert (config.parallel.zero_stage, config.parallel.sync, config.toy.size) == (
        2,
        WithToy().parallel.sync,
        3,
    )
    assert nested("parallel.reduce.block", 32) == {
        "parallel": {"reduce": {"block": 32}}
    }
    assert value_of(config, "parallel.reduce.block") == 32
    again = replaced(resolve(config), parallel={"reduce": {"rank": 7}})
    assert again.parallel.reduce == dataclasses.replace(
        resolve(config).parallel.reduce, rank=7
    )


def test_what_null_stands_for_in_an_inner_section_follows_too():
    chosen = load(None, ["parallel.reduce.compression=powersgd"])
    assert chosen.parallel.reduce.feedback is True
    assert (
        replaced(
            chosen, parallel={"reduce": {"compression": "int8"}}
        ).parallel.reduce.feedback
        is False
    )
    given = load(
        None, ["parallel.reduce.compression=int8", "parallel.reduce.feedback=true"]
    )
    assert (
        replaced(given, parallel={"reduce": {"block": 64}}).parallel.reduce.feedback
        is True
    )


def test_differences_name_a_key_of_an_inner_section_by_its_path():
    old, new = (
        dataclasses.asdict(load(None, [f"parallel.reduce.block={block}"]))
        for block in (32, 64)
    )
    assert list(differences(old, new)) == [("parallel.reduce.block", 32, 64)]
    del old["parallel"]["reduce"]["block"]
    assert list(differences(old, new)) == [], "only keys that both know"
    del old["parallel"]["reduce"]
    assert list(differences(old, new)) == []


def test_what_another_version_has_is_known_at_every_depth():
    parallel = {"reduce": {"block": 32, "gone": 2}, "gone": {"a": 1}}
    theirs = {"mesh": {"data": 2, "gone": 1}, "parallel": parallel, "gone": {}}
    assert known(theirs, Config) == {
        "mesh": {"data": 2},
        "parallel": {"reduce": {"block": 32}},
    }


def test_no_key_is_left_to_follow():
    config = resolve(WithToy())
    for path, rules in keys(WithToy).items():
        if rules.null:
            assert value_of(config, path) is not None, path
