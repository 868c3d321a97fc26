"""What a config imports is there in every command, is kept with the run, and is refused in a sentence where it cannot
be had.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from refusals import pattern_of

import meshtrain as mt
from meshtrain.config import imports, to_yaml
from meshtrain.config.check import hooks
from meshtrain.families import FAMILIES
from meshtrain.launch.__main__ import main as launch
from meshtrain.learning_rates import LEARNING_RATES
from meshtrain.survive.view import digests
from meshtrain.train import main as train

loading = importlib.import_module(
    "meshtrain.config.load"
)  # the module, of which the package has the function

FILE = '''
"""A family, a block and a loss of our own."""
from dataclasses import replace

import jax.numpy as jnp

from meshtrain.families import FAMILIES
from meshtrain.learning_rates import LEARNING_RATES, LearningRate

if "toy" not in FAMILIES:
    FAMILIES.register(replace(FAMILIES["llama"], name="toy", activation="relu"))
if "square" not in LEARNING_RATES:
    LEARNING_RATES.register(LearningRate("square", lambda o, rest, steps: lambda k: o.learning_rate * (1 - k / (rest + 1)) ** 2))


def parallel_block(block, x, sequence, collectives, dropout):
    h = collectives.enter(block.attention_norm(x))
    y = block.attention(h, sequence, collectives, dropout.at(0)) + block.mlp(h, collectives)
    return x + dropout.at(1).stream(y, collectives.first_position(x.shape[1]))


def capped_loss(logits, labels, vocabulary):
    logits = 30 * jnp.tanh(logits / 30)
    return vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)
'''
CONFIG = {
    "run": {"imports": ["mine.py"]},
    "model": {
        "family": "toy",
        "layers": 2,
        "d_model": 16,
        "heads": 2,
        "vocab_size": 264,
    }
    | {"block": "mine:parallel_block"},
    "train": {
        "steps": 2,
        "global_batch_size": 8,
        "sequence_length": 16,
        "loss": "mine:capped_loss",
    },
    "data": {"source": "synthetic"},
    "optimizer": {"schedule": "square", "warmup_steps": 0},
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A config and the file beside it; what a process has imported is forgotten at the end."""
    monkeypatch.setattr(imports, "_TAKEN", {})
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text(FILE)
    path = tmp_path / "configs" / "x.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    yield path
    for registry, name in ((FAMILIES, "toy"), (LEARNING_RATES, "square")):
        if name in registry:
            registry.forget(name)


def test_a_file_beside_the_config_is_imported_before_the_rest_is_read(written):
    config = mt.load(written)
    assert (config.model.family, config.run.imports) == (
        "toy",
        (str(written.parent / "mine.py"),),
    )
    assert hooks(config)["loss"].__name__ == "capped_loss"
    # Of a config itself, and imported once alone
    again = mt.load(config, ["train.loss=null"])
    assert again.train.loss is None and hooks(again)["block"] is hooks(config)["block"]


def test_an_override_may_name_it_too_from_the_working_directory_and_a_module_by_its_name(
    written, monkeypatch
):
    monkeypatch.chdir(written.parent)
    assert (
        mt.load(None, ["run.imports=[mine.py, json]", "model.family=toy"]).run.imports[
            1
        ]
        == "json"
    )


def test_of_a_run_its_copy_is_taken_wherever_the_file_has_gone(written):
    resolved = mt.load(written)
    run = written.parent.parent / "run"
    (run / imports.COPIES).mkdir(parents=True)
    for name, text in imports.files(resolved.run.imports).items():
        (run / imports.COPIES / name).write_text(text)
    (run / "config.yaml").write_text(to_yaml(resolved))
    (written.parent / "mine.py").write_text("raise ValueError('not this one')")
    imports._TAKEN.clear()
    assert mt.load(run / "config.yaml").run.imports == (
        str(run / imports.COPIES / "mine.py"),
    )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("run.imports", "mine.py", r"must be a list, .*\[mine\.py\]"),
        ("run.imports", "[nope.py]", r"no Python file .*nope\.py"),
        (
            "run.imports",
            "[no.such]",
            r"imports: no\.such: ModuleNotFoundError: ",
        ),
        (
            "train.loss",
            "mine:caped_loss",
            r"train\.loss: .*caped_loss; did you mean capped_loss\?",
        ),
        (
            "train.loss",
            "other:loss",
            r"train\.loss is 'other:loss'; .*MODULE:FUNCTION, .*\(mine\)",
        ),
        ("model.block", "mine", r"model.block is 'mine'; write MODULE:FUNCTION"),
    ],
)
def test_what_is_not_there_is_a_sentence(written, key, value, sentence):
    with pytest.raises(mt.ConfigError, match=sentence):
        mt.load(written, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\n1 / 0\n", r"mine\.py, line 2: ZeroDivisionError: "),
        ("x = 1\n\ndef (\n", r"mine\.py, line 3: SyntaxError: "),
        (
            "from meshtrain.families import FAMILIES as F\nF.register(F['gpt2'])\n\nraise KeyError('a')",
            r"mine.py, line 4: KeyError",
        ),
    ],
)
def test_what_a_file_raises_is_told_with_its_line(written, text, sentence):
    (written.parent / "mine.py").write_text(text)
    with pytest.raises(mt.ConfigError, match=sentence):
        mt.load(written)


def test_two_files_of_one_name_in_one_process_are_not_taken_for_each_other(written):
    mt.load(written)
    (written.parent / "mine.py").write_text(FILE + "\nCHANGED = True\n")
    with pytest.raises(mt.ConfigError, match=r"mine\.py is not .*imported from"):
        mt.load(written)


def test_nodes_whose_files_differ_do_not_agree(written):
    one = digests(mt.load(written))
    imports._TAKEN.clear()
    (written.parent / "mine.py").write_text(FILE + "\nCHANGED = True\n")
    other = digests(mt.load(written))
    assert {name for name in one if one[name] != other[name]} == {"run.imports"}


def test_pods_get_the_file_beside_the_config(written, capsys):
    words = f"jobset --nodes 1 --image image --volume v --mount /runs --config {written} --set run.directory=/runs/x"
    assert launch(words.split()) == 0
    shipped = next(
        d
        for d in yaml.safe_load_all(capsys.readouterr().out)
        if d["kind"] == "ConfigMap"
    )["data"]
    assert shipped["mine.py"] == FILE
    pod = written.parent.parent / "pod"
    pod.mkdir()
    for name, text in shipped.items():
        (pod / name).write_text(text)
    imports._TAKEN.clear()
    assert mt.load(pod / "config.yaml").run.imports == (str(pod / "mine.py"),)


def installed(directory: Path, value: str) -> None:
    """Puts a distribution whose plug-in is `value` where Python finds it, as pip would."""
    info = directory / "team_parts-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: team-parts\nVersion: 1.2\n"
    )
    (info / "entry_points.txt").write_text(f"[meshtrain.plugins]\nteam = {value}\n")


@pytest.fixture
def plugged(written, monkeypatch):
    """Has a distribution's plug-in found and loaded anew by the next config; that it is forgotten again is seen to."""
    caches = imports.plugins, loading._plug_in

    def plug(value, text=FILE):
        site = written.parent.parent / "site"
        installed(site, value)
        (site / "team_plugin.py").write_text(text)
        monkeypatch.syspath_prepend(site)
        for cache in caches:
            cache.cache_clear()

    yield plug
    sys.modules.pop("team_plugin", None)
    for cache in caches:
        cache.cache_clear()


IN_PLUGIN = [
    "run.imports=[]",
    "model.block=team_plugin:parallel_block",
    "train.loss=team_plugin:capped_loss",
]


@pytest.mark.parametrize("value", ["team_plugin", "team_plugin:register"])
def test_a_plug_in_of_a_distribution_is_there_without_being_named(value, plugged):
    plugged(value, FILE + "\nCALLS = []\n\n\ndef register():\n    CALLS.append(1)\n")
    config = mt.load({**CONFIG, "run": {}}, IN_PLUGIN)
    assert (config.model.family, config.optimizer.schedule) == ("toy", "square")
    assert hooks(config)["loss"].__name__ == "capped_loss"
    assert len(sys.modules["team_plugin"].CALLS) == value.endswith(":register")
    assert imports.plugins() == (
        "team of team-parts 1.2",
    ) and "run.imports" in digests(config)


@pytest.mark.parametrize(
    ("value", "text", "why"),
    [
        ("team_plugin", "1 / 0", "ZeroDivisionError: division by zero"),
        (
            "team_plugin:register",
            "",
            "AttributeError: ... 'team_plugin' ... 'register'",
        ),
        ("no_such", "", "ModuleNotFoundError: ... 'no_such'"),
    ],
)
def test_a_plug_in_that_fails_is_one_sentence_that_names_its_distribution(
    value, text, why, plugged
):
    plugged(value, text)
    with pytest.raises(mt.ConfigError) as refused:
        mt.load(None)
    sentence = f"the plug-in team ({value}) of team-parts 1.2 cannot be loaded: {why}; ... uninstall it."
    assert re.fullmatch(pattern_of(sentence), str(refused.value))


@pytest.mark.thorough
def test_through_the_commands_it_trains_on_all_axes_goes_on_and_is_evaluated_reported_and_survives(
    written,
):
    path = f"{Path(__file__).parents[2]}"
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    at = written.parent.parent

    def run(command, *words):
        done = subprocess.run(
            [sys.executable, "-m", f"meshtrain.{command}", *words],
            cwd=at,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    axes = [
        "mesh.data=2",
        "mesh.tensor=2",
        "mesh.pipeline=2",
        "parallel.microbatches=2",
    ]
    given = [
        "--config",
        "configs/x.yaml",
        *(word for axis in axes for word in ("--set", axis)),
    ]
    run("train", *given, "--set", "run.directory=r")
    (written.parent / "mine.py").write_text(FILE + "\nCHANGED = True\n")
    assert "mine.py has changed since" in run(
        "train", *given, "--set", "run.directory=r", "--set", "train.steps=3"
    )
    (written.parent / "mine.py").unlink()
    installed(at / "site", "team_plugin")
    (at / "site" / "team_plugin.py").write_text(FILE)
    environment["PYTHONPATH"] = f"{at / 'site'}:{path}"
    (written.parent / "p.yaml").write_text(yaml.safe_dump(CONFIG | {"run": {}}))
    plugged = (word for key in IN_PLUGIN for word in ("--set", key))
    run(
        "train",
        "--config",
        "configs/p.yaml",
        *given[2:],
        *plugged,
        "--set",
        "run.directory=p",
    )
    environment["PYTHONPATH"] = path
    assert "eval loss" in run("evaluate", "r")
    assert "loss mine:capped_loss" in run("report", "r")
    (written.parent / "mine.py").write_text(FILE)
    hurt = (
        "--set run.directory=s --set survive.inject=[kill@1:0] --set checkpoint.every=1"
    )
    run("survive", *given, *hurt.split())
    rows = {
        name: (at / name / "metrics.jsonl").read_text().splitlines()[:2]
        for name in "rsp"
    }
    losses = {
        name: [json.loads(line)["loss"] for line in lines]
        for name, lines in rows.items()
    }
    assert losses["s"] == losses["r"] == losses["p"]


PARTS = {
    "train.loss": "capped_loss",
    "model.block": "parallel_block",
    "model.attention": "plain_attention",
}
ATTENTION = """

def plain_attention(q, k, v, segments, collectives, dropout):
    mixed = jnp.cumsum(v, axis=1) / (1 + jnp.arange(v.shape[1])[None, :, None, None])
    out = jnp.repeat(mixed, q.shape[2] // v.shape[2], axis=2)
    return out.reshape(q.shape[0] * q.shape[1], -1).astype(q.dtype)


def other_attention(q, k, v, segments, collectives, dropout):
    return plain_attention(q, k, v, segments, collectives, dropout)


def other_loss(logits, labels, vocabulary):
    return capped_loss(logits, labels, vocabulary)


def other_block(block, x, sequence, collectives, dropout):
    return parallel_block(block, x, sequence, collectives, dropout)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("key", PARTS)
def test_a_run_goes_on_with_another_function_and_with_the_built_in_part_where_that_is_allowed(
    key, written, capsys
):
    kind, run = key.partition(".")[2], written.parent / "r"
    (written.parent / "mine.py").write_text(FILE + ATTENTION)
    base = ["--config", str(written), "--set", f"run.directory={run}"]
    base += [word for k in PARTS for word in ("--set", f"{k}=null")] + [
        "--set",
        f"{key}=mine:{PARTS[key]}",
    ]

    def go_on(steps, *settings):
        code = train(
            [
                *base,
                "--set",
                f"train.steps={steps}",
                *(word for each in settings for word in ("--set", each)),
            ]
        )
        return code, capsys.readouterr().err

    assert go_on(1)[0] == 0
    code, said = go_on(2, f"{key}=null")
    assert (
        code == 2
        and f"{kind}=" in said
        and f"checkpoint.allow: [{key}]" in said
        and "Traceback" not in said
    )
    code, said = go_on(2, f"{key}=mine:other_{kind}")
    assert (
        code == 0
        and f"the {kind} was " in said
        and f"other_{kind} from here on" in said
    )
    code, said = go_on(3, f"{key}=null", f"checkpoint.allow=[{key}]")
    assert (
        code == 0 and f"the {kind} was " in said and "is built in from here on" in said
    )
    code, said = go_on(4, f"{key}=null")
    assert code == 0 and f"the {kind} was" not in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("key", "other", "rule"),
    [("model.family", "llama", 2), ("optimizer.schedule", "cosine", 0)],
)
def test_a_run_whose_code_is_gone_is_a_sentence_or_goes_on(
    key, other, rule, written, capsys
):
    run = written.parent / "r"
    base = [
        "--config",
        str(written),
        "--set",
        f"run.directory={run}",
        "--set",
        "train.loss=null",
        "--set",
        "model.block=null",
    ]
    assert train(base) == 0
    plain = json.loads(json.dumps(CONFIG))
    plain["run"], plain["train"] = (
        {"directory": str(run)},
        {**plain["train"], "steps": 3, "loss": None},
    )
    plain["model"]["block"] = None
    section, _, name = key.partition(".")
    plain["model"]["family"], plain["optimizer"]["schedule"] = "llama", "cosine"
    plain[section][name] = other
    if key != "model.family":
        plain["model"]["family"], plain["run"]["imports"] = (
            "toy",
            [str(written.parent / "mine.py")],
        )
    else:
        FAMILIES.forget("toy")
        LEARNING_RATES.forget("square")
    (written.parent / "plain.yaml").write_text(yaml.safe_dump(plain))
    capsys.readouterr()
    code, said = (
        train(["--config", str(written.parent / "plain.yaml")]),
        capsys.readouterr().err,
    )
    assert code == rule and key in said and "Traceback" not in said
