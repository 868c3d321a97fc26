"""Whose code runs: commands that read a run import nothing of it, and others run code of the user's own, or what
--trust names.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import meshtrain as mt
from meshtrain.config import imports, to_yaml
from meshtrain.families import FAMILIES
from meshtrain.launch.__main__ import main as launch
from meshtrain.monitor.__main__ import main as monitor
from meshtrain.plan.__main__ import main as plan
from meshtrain.registry import TRUST
from meshtrain.report.__main__ import main as report
from meshtrain.survive.__main__ import main as survive
from meshtrain.train import main as train

SMALL = {
    "model": {
        "family": "llama",
        "layers": 2,
        "d_model": 16,
        "heads": 2,
        "vocab_size": 264,
    },
    "train": {"steps": 2, "global_batch_size": 8, "sequence_length": 16},
    "data": {"source": "synthetic"},
}
TRAP = """
from dataclasses import replace
from pathlib import Path

from meshtrain.families import FAMILIES

Path({marker!r}).touch()
if "toy" not in FAMILIES:
    FAMILIES.register(replace(FAMILIES["llama"], name="toy", activation="relu"))


def loss(logits, labels, vocabulary):
    return vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)
"""
BROUGHT = {
    "family": {"model.family": "toy"}, "optimizer": {"optimizer.name": "mine"}, "rate": {"optimizer.schedule": "mine"},
    "schedule": {"parallel.schedule": "mine"}, "loss": {"train.loss": "x:loss"}, "block": {"model.block": "x:block"},
    "attention": {"model.attention": "x:attention"}, "compression": {"parallel.reduce.compression": "mine"},
    "algorithm": {"parallel.reduce.algorithm": "mine"}, "source": {"data.source": "mine"}, "nothing": {},
}  # fmt: skip
MESH = {
    "schedule": {"mesh.pipeline": 2},
    "compression": {"mesh.data": 2},
    "algorithm": {"mesh.data": 2},
}  # counts there
OTHER = 12345  # a user


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a process has imported is forgotten at the end."""
    monkeypatch.setattr(imports, "_TAKEN", {})
    monkeypatch.delenv(TRUST, raising=False)
    yield
    if "toy" in FAMILIES:
        FAMILIES.forget("toy")


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code-ran"


@pytest.fixture
def trapped(tmp_path, marker):
    """Makes a run directory whose import leaves a marker, with keys that name what it would bring."""

    def make(brought=None, entry="x.py", place="imports/x.py", name="run", rows=3):
        run = tmp_path / name
        (run / place).parent.mkdir(parents=True)
        (run / place).write_text(TRAP.format(marker=str(marker)))
        sections = yaml.safe_load(to_yaml(mt.load(SMALL)))
        sections["run"] |= {"directory": str(run), "imports": [entry.format(run=run)]}
        for key, value in (brought or {}).items():
            *path, last = key.split(".")
            section = sections
            for part in path:
                section = section[part]
            section[last] = value
        (run / "config.yaml").write_text(yaml.safe_dump(sections, sort_keys=False))
        row = {
            "loss": 5.0,
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "tokens": 128,
            "tokens_per_second": 99.0,
            "step_seconds": 1.0,
        }
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": k} | row) + "\n" for k in range(1, rows + 1))
        )
        (run / "checkpoints").mkdir()
        return run

    return make


def own_by(path: Path, user: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can chown")
    for one in (path, *path.rglob("*")):
        os.chown(one, user, user, follow_symlinks=False)


READING = {
    "report": lambda run: report([str(run)]),
    "report --json": lambda run: report([str(run), "--json"]),
    "report --html": lambda run: report(
        [str(run), "--html", str(run.parent / "page.html")]
    ),
    "report of two": lambda run: report([str(run), str(run)]),
    "monitor": lambda run: monitor([str(run), "--once"]),
    "plan": lambda run: plan(["--config", str(run / "config.yaml")]),
    "plan --search": lambda run: plan(
        ["--config", str(run / "config.yaml"), "--search", "--devices", "2"]
    ),
    "print-config": lambda run: train(
        ["--config", str(run / "config.yaml"), "--print-config"]
    ),
    "survive status": lambda run: survive(["status", str(run)]),
    "survive stats": lambda run: survive(["stats", str(run)]),
}


@pytest.mark.parametrize("owner", [None, OTHER])
@pytest.mark.parametrize("command", READING)
def test_a_command_that_reads_a_run_runs_no_code_of_it(
    command, owner, trapped, marker, capsys
):
    run = trapped({"model.family": "toy", "train.loss": "x:loss"})
    if owner is not None:
        own_by(run, owner)
    code, said = READING[command](run), capsys.readouterr()
    assert not marker.exists() and code in (0, 1, 2) and "Traceback" not in said.err
    if command.startswith("plan"):
        # a plan needs to know the family
        assert (
            code == 2
            and "--trust" in said.err
            and str(run) in said.err
            and "model.family" in said.err
        )


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ("x.py", "imports/x.py"),
        ("{run}/imports/x.py", "imports/x.py"),
        ("/nowhere/x.py", "imports/x.py"),
        ("x.py", "x.py"),
        ("../run/x.py", "x.py"),
        ("trap_module", "trap_module.py"),
        ("imports.x", "imports/x.py"),
    ],
)
@pytest.mark.parametrize("command", ["report", "monitor", "plan", "print-config"])
def test_wherever_a_run_has_its_code_reading_leaves_it_alone(
    command, entry, place, trapped, marker, monkeypatch, capsys
):
    run = trapped(entry=entry, place=place)
    monkeypatch.chdir(run)
    # As `python -m meshtrain` has the working directory
    monkeypatch.syspath_prepend(run)
    assert READING[command](run) == 0, capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("strip", ["metrics.jsonl", "checkpoints", "both"])
def test_a_config_yaml_without_rows_is_a_runs_too(strip, trapped, marker):
    run = trapped()
    for name in ("metrics.jsonl", "checkpoints") if strip == "both" else (strip,):
        shutil.rmtree(run / name) if name == "checkpoints" else (run / name).unlink()
    assert READING["plan"](run) == 0 and not marker.exists()


def test_a_config_within_a_run_under_another_name_is_the_runs(trapped, marker):
    run = trapped()
    inner = run / "survive" / "gen-1"
    inner.mkdir(parents=True)
    shutil.copy(run / "config.yaml", inner / "config.1.n0.yaml")
    (inner / "x.py").write_text((run / "imports/x.py").read_text())
    assert (
        plan(["--config", str(inner / "config.1.n0.yaml")]) == 0 and not marker.exists()
    )


@pytest.mark.parametrize("kind", BROUGHT)
@pytest.mark.parametrize(
    "command", ["report", "report --json", "monitor", "print-config"]
)
def test_names_that_a_plug_in_brings_are_read_as_they_are(
    command, kind, trapped, marker, capsys
):
    run = trapped(BROUGHT[kind] | MESH.get(kind, {}))
    assert READING[command](run) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert not marker.exists() and "Traceback" not in out
    if command == "print-config":
        for key, value in BROUGHT[kind].items():
            section = yaml.safe_load(out)
            for part in key.split("."):
                section = section[part]
            assert section == value


@pytest.mark.parametrize("kind", BROUGHT)
def test_a_plan_needs_of_a_plug_in_what_it_counts_with_and_says_so(
    kind, trapped, marker, capsys
):
    run = trapped(BROUGHT[kind] | MESH.get(kind, {}))
    code = READING["plan"](run)
    said = capsys.readouterr()
    assert not marker.exists() and "Traceback" not in said.err
    assert code in (0, 2)
    if code == 2:
        assert "--trust" in said.err and next(iter(BROUGHT[kind])) in said.err
    assert (code == 2) == (
        kind in ("family", "optimizer", "schedule", "compression", "algorithm")
    )


@pytest.mark.parametrize("command", READING)
def test_a_run_that_is_trusted_is_read_with_its_code(command, trapped, marker, capsys):
    run = trapped({"model.family": "toy", "train.loss": "x:loss"})
    own_by(run, OTHER) if os.geteuid() == 0 else None
    words = {
        "plan": (plan, ["--config", str(run / "config.yaml")]),
        "print-config": (
            train,
            ["--config", str(run / "config.yaml"), "--print-config"],
        ),
        "report": (report, [str(run)]),
        "monitor": (monitor, [str(run), "--once"]),
    }
    if command not in words:
        pytest.skip("calls no code of its own")
    main, given = words[command]
    assert main([*given, "--trust", str(run)]) == 0, capsys.readouterr().err
    assert marker.exists()
    assert TRUST not in os.environ  # of that command alone


def test_trust_in_another_run_is_none_in_this(trapped, marker, capsys):
    run, other = trapped({"model.family": "toy"}), trapped(name="run2")
    assert plan(["--config", str(run / "config.yaml"), "--trust", str(other)]) == 2
    assert not marker.exists() and str(run) in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "nowhere", "/etc/hostname"])
def test_trust_takes_a_directory(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        plan(
            [
                "--config",
                "quickstart",
                f"--trust={folder}" if not folder else "--trust",
                *([folder] if folder else []),
            ]
        )
    assert ended.value.code == 2 and "--trust" in capsys.readouterr().err


# --- where code must run


RUNNING = {
    "train": lambda run, *words: train(["--config", str(run / "config.yaml"), *words]),
    "survive": lambda run, *words: survive(
        ["--config", str(run / "config.yaml"), *words]
    ),
    "launch slurm": lambda run, *words: launch(
        ["slurm", "--config", str(run / "config.yaml"), *words]
    ),
    "launch local": lambda run, *words: launch(
        ["local", "2", "--config", str(run / "config.yaml"), *words]
    ),
}


@pytest.mark.parametrize("given", ["all", "config.yaml", "imports", "imports/x.py"])
@pytest.mark.parametrize("command", RUNNING)
def test_a_command_that_runs_a_strangers_config_is_refused(
    command, given, trapped, marker, capsys
):
    run = trapped({"model.family": "toy"})
    own_by(run, OTHER) if given == "all" else (
        own_by(run, 0),
        os.chown(run / given, OTHER, OTHER),
    )
    assert RUNNING[command](run) == 2
    said = capsys.readouterr().err
    assert (
        not marker.exists()
        and "another user" in said
        and f"--trust {run}" in said
        and "Traceback" not in said
    )


def test_a_job_that_is_printed_trusts_what_was_trusted(trapped, marker, capsys):
    run = trapped({"model.family": "toy"})
    own_by(run, OTHER) if os.geteuid() == 0 else run.chmod(0o777)
    assert RUNNING["launch slurm"](run, "--trust", str(run)) == 0 and marker.exists()
    assert f"--trust {run}" in capsys.readouterr().out


def own_file(folder: Path, marker: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.py").write_text(TRAP.format(marker=str(marker)))
    (folder / "mine.yaml").write_text(
        yaml.safe_dump(
            SMALL
            | {
                "run": {"imports": ["x.py"]},
                "model": SMALL["model"] | {"family": "toy"},
            }
        )
    )
    return folder / "mine.yaml"


def test_ones_own_file_runs_with_ones_own_config(tmp_path, marker):
    path = own_file(tmp_path / "configs", marker)
    assert mt.load(path).model.family == "toy" and marker.exists()
    marker.unlink()
    imports._TAKEN.clear()
    assert plan(["--config", str(path)]) == 0 and marker.exists()


FAULTS = {
    "file of another": lambda d: os.chown(d / "x.py", OTHER, -1),
    "config of another": lambda d: os.chown(d / "mine.yaml", OTHER, -1),
    "folder of another": lambda d: os.chown(d, OTHER, -1),
    "folder above of another": lambda d: os.chown(d.parent, OTHER, -1),
    "file for everyone": lambda d: (d / "x.py").chmod(0o646),
    "config for everyone": lambda d: (d / "mine.yaml").chmod(0o666),
    "folder for everyone": lambda d: d.chmod(0o777),
    "folder above for everyone": lambda d: d.parent.chmod(0o777),
    "file of a group": lambda d: (
        os.chown(d / "x.py", -1, 1),
        (d / "x.py").chmod(0o664),
    ),
    "folder of a group": lambda d: (os.chown(d, -1, 1), d.chmod(0o775)),
    "a link to a file of another": lambda d: (
        os.chown((d / "x.py").rename(d.parent / "y.py"), OTHER, -1),
        (d / "x.py").symlink_to(d.parent / "y.py"),
    ),
    "a link of another": lambda d: (
        (d / "x.py").rename(d.parent / "y.py"),
        (d / "x.py").symlink_to(d.parent / "y.py"),
        os.lchown(d / "x.py", OTHER, -1),
    ),
    "a link to a file for everyone": lambda d: (
        (d / "x.py").rename(d.parent / "y.py").chmod(0o666),
        (d / "x.py").symlink_to(d.parent / "y.py"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_code_that_others_may_have_written_is_refused_until_it_is_trusted(
    fault, tmp_path, marker, monkeypatch
):
    path = own_file(tmp_path / "up" / "configs", marker)
    if os.geteuid() != 0 and ("of" in fault or "group" in fault):
        pytest.skip("only root can chown")
    FAULTS[fault](path.parent)
    with pytest.raises(
        mt.ConfigError, match=r"run\.imports: .*(another|everyone|group).*--trust"
    ):
        mt.load(path)
    assert not marker.exists()
    monkeypatch.setenv(TRUST, str(tmp_path / "up"))
    assert mt.load(path).model.family == "toy" and marker.exists()


def test_a_group_of_the_owner_alone_may_write(tmp_path, marker):
    path = own_file(tmp_path / "configs", marker)
    for one in (path, path.parent, path.parent / "x.py"):
        one.chmod(one.stat().st_mode | 0o020)
    group = path.stat().st_gid
    if not imports._is_private(path.stat()):
        pytest.skip(f"group {group} has others in it")
    assert mt.load(path).model.family == "toy"


def test_a_sticky_directory_that_all_may_write_is_as_tmp(tmp_path, marker):
    path = own_file(tmp_path / "shared" / "configs", marker)
    path.parent.parent.chmod(0o1777)
    assert mt.load(path).model.family == "toy"


def test_trusting_a_run_is_no_trust_in_what_its_links_lead_to(
    tmp_path, trapped, marker, monkeypatch
):
    run = trapped({"train.loss": "x:loss"})
    outside = (run / "imports/x.py").rename(tmp_path / "outside.py")
    (run / "imports/x.py").symlink_to(outside)
    outside.chmod(0o666)
    monkeypatch.setenv(TRUST, str(run))
    with pytest.raises(mt.ConfigError, match=r"outside\.py .*written by everyone"):
        mt.load(run / "config.yaml")
    assert not marker.exists()


def test_a_module_beside_the_config_is_code_of_others_too(
    tmp_path, marker, monkeypatch
):
    path = own_file(tmp_path / "configs", marker)
    (path.parent / "trap_beside.py").write_text(TRAP.format(marker=str(marker)))
    (path.parent / "trap_beside.py").chmod(0o666)
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(mt.ConfigError, match=r"trap_beside\.py .*written by everyone"):
        mt.load(SMALL, ["run.imports=[trap_beside]"])
    package = path.parent / "trap_package"
    package.mkdir()
    (package / "__init__.py").write_text(TRAP.format(marker=str(marker)))
    (package / "part.py").write_text("")
    package.chmod(0o777)
    with pytest.raises(mt.ConfigError, match=r"trap_package .*written by everyone"):
        mt.load(SMALL, ["run.imports=[trap_package.part]"])
    assert not marker.exists()
    assert mt.load(SMALL, ["run.imports=[json.tool]"]).run.imports == ("json.tool",)


def test_pods_trust_the_folder_that_brings_their_files(tmp_path, marker, capsys):
    path = own_file(tmp_path / "configs", marker)
    (path.parent / "parts").mkdir()
    (path.parent / "x.py").rename(path.parent / "parts/x.py")
    path.write_text(path.read_text().replace("x.py", "parts/x.py"))
    words = f"jobset --nodes 1 --image image --volume v --mount /runs --config {path} --set run.directory=/runs/x"
    assert launch(words.split()) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    command = json.dumps(documents)
    assert (
        '"run.imports=[/etc/meshtrain/x.py]"' in command
        and '"--trust", "/etc/meshtrain"' in command
    )


# --- which file is taken


def test_an_absolute_path_is_that_file_whatever_lies_beside_the_config(
    tmp_path, marker
):
    path = own_file(tmp_path / "configs", marker)
    elsewhere = tmp_path / "elsewhere" / "x.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text(TRAP.format(marker=str(tmp_path / "elsewhere-ran")))
    (path.parent / "imports").mkdir()
    shutil.copy(path.parent / "x.py", path.parent / "imports/x.py")
    for name in ("mine.yaml", "config.yaml"):
        imports._TAKEN.clear()
        (path.parent / name).write_text(
            path.read_text().replace("- x.py", f"- {elsewhere}")
        )
        assert mt.load(path.parent / name).run.imports == (str(elsewhere),)
    assert not marker.exists() and (tmp_path / "elsewhere-ran").exists()
    missing = path.parent / "missing.yaml"
    missing.write_text(
        path.read_text().replace(str(elsewhere), str(tmp_path / "nowhere/x.py"))
    )
    with pytest.raises(mt.ConfigError, match=r"no Python file .*nowhere/x\.py"):
        mt.load(missing)


def test_a_relative_path_counts_from_the_config_and_is_not_guessed(
    tmp_path, marker, monkeypatch
):
    path = own_file(tmp_path / "configs", marker)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (path.parent / "imports").mkdir()
    (path.parent / "imports/x.py").write_text("raise ValueError('not this one')")
    assert mt.load(path).run.imports == (str(path.parent / "x.py"),)
    (tmp_path / "here/x.py").write_text("raise ValueError('nor this one')")
    with pytest.raises(
        mt.ConfigError, match=r"imports: x\.py .*configs/x\.py .*here/x\.py, .*differ"
    ):
        mt.load(path)
    (tmp_path / "here/x.py").write_text((path.parent / "x.py").read_text())
    assert mt.load(path).run.imports == (str(path.parent / "x.py"),)
    (path.parent / "x.py").unlink()
    assert mt.load(path).run.imports == (str(tmp_path / "here/x.py"),)
    (tmp_path / "here/x.py").unlink()
    with pytest.raises(mt.ConfigError, match=r"no Python file .*configs/x\.py"):
        mt.load(path)


def test_an_override_counts_from_the_working_directory_and_takes_no_copy_of_a_run(
    tmp_path, trapped, marker, monkeypatch
):
    run = trapped()
    (tmp_path / "x.py").write_text("HERE = True")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRUST, str(run))
    config = mt.load(run / "config.yaml", ["run.imports=[]"])
    assert config.run.imports == ()
    imports._TAKEN.clear()
    assert mt.load(SMALL, ["run.imports=[x.py]"]).run.imports == (
        str(tmp_path / "x.py"),
    )


# --- how code ends


RAISES = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit()": "SystemExit",
    "sys.exit('no')": "SystemExit: no",
    "raise GeneratorExit": "GeneratorExit",
    "import asyncio; raise asyncio.CancelledError('x')": "CancelledError: x",
    "raise BaseException('base')": "BaseException: base",
    "raise type('Loud', (Exception,), {'__str__': lambda self: 1 / 0})": "Loud: a message that cannot be printed",
    "def f(): f()\nf()": "RecursionError",
    "raise BaseExceptionGroup('g', [SystemExit(0)])": "BaseExceptionGroup: g",
}


@pytest.mark.parametrize("text", RAISES)
def test_an_import_that_ends_the_process_is_a_sentence_and_exit_code_2(
    text, tmp_path, capsys
):
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(SMALL | {"run": {"imports": ["ends.py"]}})
    )
    (tmp_path / "ends.py").write_text(f"import sys\n{text}\n")
    assert train(["--config", str(tmp_path / "mine.yaml")]) == 2
    said = capsys.readouterr().err
    assert (
        f"run.imports: ends.py, line 2: {RAISES[text]}" in said
        and "Traceback" not in said
    )


@pytest.mark.parametrize(
    "text",
    ["raise KeyboardInterrupt", "class Mine(KeyboardInterrupt): pass\nraise Mine"],
)
def test_an_import_that_raises_what_ctrl_c_does_is_not_taken_for_it_by_a_command(
    text, tmp_path
):
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(SMALL | {"run": {"imports": ["ends.py"]}})
    )
    (tmp_path / "ends.py").write_text(f"{text}\n")
    words = [
        sys.executable,
        "-m",
        "meshtrain",
        "plan",
        "--config",
        str(tmp_path / "mine.yaml"),
    ]
    ended = subprocess.run(
        words, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (
        ended.returncode == 2
        and "run.imports: ends.py" in ended.stderr
        and "Traceback" not in ended.stderr
    )
