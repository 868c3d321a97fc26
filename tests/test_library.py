"""`import meshtrain as mt`: every name there is, at once and in any order of imports, and nothing started by
looking.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from checkpoint_runs import config as small
from checkpoint_runs import take
from refusals import tells

import meshtrain as mt
from meshtrain.plan.estimate import Plan

ROOT = Path(__file__).parents[1]
NAMES = {
    "Config", "ConfigError", "CheckpointError", "Checkpointer", "Model", "Program", "State", "fake_devices", "load", "make_mesh",
    "RunHook", "open_data", "plan", "read_model", "schedule", "show", "train",
}  # fmt: skip
TINY = {
    "run": {"fake_devices": 8},
    "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 260},
    "mesh": {"data": 2},
    "train": {"steps": 2, "global_batch_size": 4, "sequence_length": 16},
    "data": {"source": "synthetic"},
    "optimizer": {"warmup_steps": 1},
}


def python(script: str, **environment: str) -> str:
    """What a Python of its own prints."""
    bare = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    command = [sys.executable, "-c", script]
    env = {**bare, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_name_is_there_and_known_to_type_checkers():
    assert set(mt.__all__) == NAMES and set(dir(mt)) >= NAMES
    tree = ast.parse((ROOT / "meshtrain" / "__init__.py").read_text())
    (typed,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found = {
        alias.asname: (node.module, alias.name)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(found) == NAMES
    for name, (module, defined) in found.items():
        there = getattr(__import__(module, fromlist=[defined]), defined)
        assert there in (
            getattr(mt, name),
            getattr(getattr(mt, name), "function", None),
        ), name
    with pytest.raises(AttributeError, match=r"has no attribute 'lode'$"):
        mt.lode  # noqa: B018
    with pytest.raises(AttributeError, match=r"'read_csv'; .* mt\.schedule\.read_csv$"):
        mt.read_csv  # noqa: B018


LAZY = """
import sys, meshtrain as mt
assert dir(mt) and mt.Config and mt.ConfigError
config = mt.load(None, ["mesh.data=2"])
assert mt.plan(config).devices == 2
import meshtrain.plan
print("jax" in sys.modules)
for name in mt.__all__: getattr(mt, name)
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""


@pytest.mark.thorough
def test_looking_loads_no_jax_and_starts_no_backend():
    assert python(LAZY).split() == ["False", "False"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("import meshtrain.train, meshtrain.plan", marks=pytest.mark.slow),
        "mt.train, mt.plan; import meshtrain.train, meshtrain.plan",
    ],
)
def test_train_and_plan_are_modules_that_can_be_called_whatever_was_imported_before(
    before,
):
    script = f"""
import meshtrain as mt
{before}
from meshtrain.train import train, main
from meshtrain.plan import plan
import meshtrain.train as module, inspect
assert module is mt.train and mt.train.main is main
print(mt.plan(mt.load(None)).devices, *inspect.signature(mt.train).parameters, *inspect.signature(mt.plan).parameters)
try:
    mt.train(mt.load(None, ["run.directory=/proc/nowhere"]))
except mt.ConfigError as error:
    print(error)
"""
    first, second = python(script).splitlines()
    assert first == "1 config block attention loss callbacks config cluster profile"
    assert "run.directory /proc/nowhere cannot be written" in second


def test_plan_is_the_planners_estimate_on_a_cluster_of_any_name():
    config = mt.load(None, ["mesh.data=8", "run.fake_devices=8"])
    assert (
        isinstance(mt.plan(config), Plan)
        and mt.plan(config).cluster.accelerator.platform == "cpu"
    )
    assert mt.plan(config, "h200").cluster.accelerator.name == "h200"
    with pytest.raises(mt.ConfigError, match="needs 8 devices, but cluster"):
        mt.plan(config, mt.plan(mt.load(None), "h200").cluster)


# --- several in one process, and JAX started before


@pytest.mark.slow
def test_programs_and_checkpointers_live_side_by_side_and_one_after_the_other(tmp_path):
    settings = [small(tmp_path / "a"), small(tmp_path / "b", mesh={"tensor": 2})]
    for first_step in (0, 1):
        programs = [mt.Program(config) for config in settings]
        opened = [
            mt.Checkpointer(config, program)
            for config, program in zip(settings, programs, strict=True)
        ]
        found = [checkpointer.restore_or_init() for checkpointer in opened]
        assert [step for _, step in found] == [first_step] * 2
        losses = []
        for program, checkpointer, (state, step) in zip(
            programs, opened, found, strict=True
        ):
            state, loss = take(program, state, step + 1)
            checkpointer.save(step + 1, state, loss)
            losses.append(loss)
        assert losses[0] == pytest.approx(losses[1], rel=2e-5), (
            "the losses of both runs"
        )
        for checkpointer in opened:
            checkpointer.close()


def test_a_mesh_of_another_shape_than_the_configs_is_refused():
    mesh = mt.make_mesh(mt.load(None, ["mesh.data=2"]))
    says = r"data 2 x tensor 1 x pipeline 1, .* data 1 x tensor 2 x pipeline 1"
    with pytest.raises(mt.ConfigError, match=says):
        mt.Program(mt.load(None, ["mesh.tensor=2"]), mesh)


LATE = """
import warnings; warnings.simplefilter("error")
import jax; jax.devices()
import meshtrain as mt
print(mt.Program(mt.load(None)).mesh.size)
try:
    mt.make_mesh(mt.load(None, ["mesh.data=4", "run.fake_devices=8"]))
except mt.ConfigError as error:
    print(error)
"""


@pytest.mark.thorough
def test_a_mesh_larger_than_what_jax_has_started_with_is_refused_with_the_way_out():
    size, sentence = python(LATE).splitlines()
    assert size == "1"
    assert tells(sentence, "needs 4 devices, but ... 1 (cpu); JAX had started")
    assert "restart the kernel" in sentence


# --- whole runs


@pytest.mark.thorough
def test_a_run_with_a_replaced_loss_goes_on_after_a_stop_with_it(tmp_path):
    def doubled(logits, labels, vocabulary):
        return 2 * (
            vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)
        )

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    plain, twice = ([f"run.directory={tmp_path / name}"] for name in ("plain", "twice"))
    constant = [
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1e-9",
    ]
    assert mt.train(mt.load(tmp_path / "tiny.yaml", [*plain, *constant])).exit_code == 0
    for steps in (1, 2):
        config = mt.load(
            tmp_path / "tiny.yaml", [*twice, *constant, f"train.steps={steps}"]
        )
        assert mt.train(config, loss=doubled).exit_code == 0
    losses = [
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("plain", "twice")
    ]
    np.testing.assert_allclose(losses[1], 2 * np.array(losses[0]), rtol=1e-5)


@pytest.mark.thorough
def test_a_checkpoint_knows_that_its_model_was_another_and_is_not_taken_for_the_built_in_one(
    tmp_path, capsys
):
    def silent(block, x, sequence, collectives, dropout):
        return x

    def other(block, x, sequence, collectives, dropout):
        return x + 0

    def run(**hooks) -> list[str]:
        program = mt.Program(small(tmp_path), **hooks)
        checkpointer = mt.Checkpointer(program.config, program)
        try:
            state, step = checkpointer.restore_or_init()
            checkpointer.save(step + 1, state, 1.0)
        finally:
            checkpointer.close()
        return capsys.readouterr().err.splitlines()

    assert run(block=silent) == run(block=silent) == []
    lost = r"checkpoints/2 .* functions .* block=silent; give"
    with pytest.raises(mt.ConfigError, match=lost):
        run()
    with pytest.raises(mt.ConfigError, match=lost):
        mt.read_model(tmp_path)
    assert mt.read_model(tmp_path, block=silent).step == 2
    (changed,) = run(block=other)
    assert "block was silent and is other" in changed


@pytest.mark.thorough
def test_the_step_of_a_placed_batch_is_that_of_the_training_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = mt.load(TINY, ["run.directory=run", "checkpoint.resume=never"])
    met: list[str] = []

    class Watching(mt.RunHook):
        def before_step(self, step, compiled, state, batch):
            met.append(f"before {step}")
            return state, batch

        def before_save(self, step, state):
            met.append(f"save {step}, {int(state.step)}")

    result = mt.train(
        config, callbacks=[Watching(), lambda row: met.append(f"loss {row['step']}")]
    )
    assert (result.exit_code, result.steps, result.directory) == (
        0,
        2,
        tmp_path / "run",
    )
    assert met == ["before 1", "loss 1", "before 2", "loss 2", "save 2, 2"]
    program, (data, _) = mt.Program(config), mt.open_data(config)
    state, losses = program.init(), []
    for k in range(2):
        state, metrics = program.train_step(state, program.place(data.batch(k)))
        losses.append(float(metrics["loss"]))
    rows = [
        json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()
    ]
    assert losses == [row["loss"] for row in rows] == list(result.losses)
    again = mt.train(mt.load(config, ["checkpoint.resume=auto", "train.steps=3"]))
    assert (again.steps, len(again.losses)) == (3, 1), "only the steps of this call"
    with pytest.raises(
        mt.ConfigError, match=r"callback is 'print'; .*RunHook .* function"
    ):
        mt.train(config, callbacks=["print"])


@pytest.mark.thorough
def test_the_packages_own_lines_run_and_each_that_is_looked_at_shows_itself(
    tmp_path, monkeypatch
):
    (example,) = re.findall(r"\n\n((?:    .*\n|\n)+)", mt.__doc__)[:1]
    lines = [
        line.split("  #")[0].strip() for line in example.splitlines() if line.strip()
    ]
    assert len(lines) == 10 and lines[0] == "import meshtrain as mt"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text(
        yaml.safe_dump({**TINY, "mesh": {"pipeline": 2}})
    )
    monkeypatch.chdir(tmp_path)
    assert (
        mt.train(
            mt.load("configs/quickstart.yaml", ["run.directory=runs/quickstart"])
        ).exit_code
        == 0
    )
    found: dict = {}
    exec("\n".join(lines), found)
    assert found["logits"].shape == (1, 2, 260) and float(found["metrics"]["loss"]) > 0
    looked_at = [line for line in lines if re.fullmatch(r"program\.[\w.()]+", line)]
    assert [type(eval(line, found)).__name__ for line in looked_at] == [
        "Layout",
        "CompiledCollectives",
        "Table",
    ]
    assert all(
        "<img" in html or "<table" in html
        for html in (eval(line, found)._repr_html_() for line in looked_at)
    )


@pytest.mark.thorough
def test_the_guides_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(
        r"## As a library\n\n```python\n(.*?)```",
        (ROOT / "docs" / "library.md").read_text(),
        re.DOTALL,
    )
    assert (
        len(
            [line for line in example.splitlines() if line and not line.startswith("#")]
        )
        < 10
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(example, found)
    assert found["logits"].shape == (1, 2, 260) and isinstance(
        found["logits"], jax.Array
    )
    assert float(capsys.readouterr().out.split()[0]) > 0
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "2").is_dir()
