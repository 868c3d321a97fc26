"""python -m meshtrain.checkpoint ls | show | verify | diff."""

import errno
import json
import os
import shutil

import pytest
from checkpoint_runs import saved
from refusals import refused, tells

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.__main__ import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = saved(tmp_path_factory.mktemp("run"))
    (directory / "checkpoints" / "9.damaged").mkdir()
    return directory


@pytest.fixture
def damaged(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "3" / steps.MANIFEST
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64", 1))
    return tmp_path / "run"


def call(capsys, *arguments):
    code = main([str(a) for a in arguments])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def test_ls_lists_steps_with_losses_and_what_is_no_checkpoint(run, capsys):
    code, lines, _ = call(capsys, "ls", run)
    assert code == 0
    assert [line.split()[0] for line in lines] == ["step", "1", "2", "3", "9.damaged"]
    assert " 0.500000 " in lines[2] and lines[2].split()[-1] == "KiB"
    assert lines[4].endswith("damaged, set aside")


def test_show_prints_the_newest_step_and_its_tree(run, capsys):
    code, lines, _ = call(capsys, "show", run)
    assert code == 0 and lines[0] == f"step 3 in {run}/checkpoints/3"
    assert "    blocks" in lines
    gates = [line.split() for line in lines if line.split()[0] == "gate"]
    assert (
        gates == [["gate", "float32", "[5,", "24,", "50]", "23.4", "KiB"]] * 3
    )  # the weight and two moments
    assert any(line.startswith("model: family llama, layers 5") for line in lines)


@pytest.mark.thorough
def test_the_best_step_is_marked_and_can_be_named(tmp_path, capsys):
    run = saved(tmp_path / "run", 3, evals={1: 0.5, 2: 0.25, 3: 0.75})
    assert [line.endswith(" KiB  best") for line in call(capsys, "ls", run)[1]] == [
        False,
        False,
        True,
        False,
    ]
    assert (
        call(capsys, "show", run, "--step", "best")[1][0]
        == f"step 2 in {run}/checkpoints/2"
    )
    for word, named in (("best", "2"), ("newest", "3"), ("1", "1")):
        code, (line,), _ = call(capsys, "verify", run, "--step", word)
        assert code == 0 and line.startswith(f"{named}: intact")
    as_json = (
        "".join(call(capsys, word, run, "--json")[1])
        for word in ("ls", "show", "verify")
    )
    listed, shown, (first, *_) = map(json.loads, as_json)
    found = [(entry["step"], entry["best"], entry["eval_loss"]) for entry in listed]
    assert found == [(1, False, 0.5), (2, True, 0.25), (3, False, 0.75)]
    assert shown["step"] == 3 and "blocks.mlp.gate" in " ".join(shown["leaves"])
    assert listed[2]["bytes"] == shown["bytes"] > 0
    assert (first["name"], first["intact"], first["problems"]) == ("1", True, [])
    assert (
        call(capsys, "show", run, "--step", "4")[2]
        == f"meshtrain: there is no step 4 in {run}; it has 1, 2, 3.\n"
    )


def test_no_step_is_the_best_where_none_was_evaluated(run, capsys):
    assert not any("best" in line for line in call(capsys, "ls", run)[1])
    best = refused(main, capsys, "verify", str(run), "--step", "best")
    assert tells(best, f"no checkpoint in {run} has an eval loss", "none is the best")
    lowest = refused(main, capsys, "show", str(run), "--step", "lowest")
    assert tells(lowest, "'lowest' is none", "a number, newest or best")


def test_verify_tells_intact_from_damaged(run, damaged, capsys):
    assert call(capsys, "verify", run)[0] == 0
    code, lines, _ = call(capsys, "verify", damaged)
    assert code == 1
    assert [line.split(":")[1].split(",")[0].strip() for line in lines] == [
        "intact",
        "intact",
        "DAMAGED",
    ]
    assert "manifest.json is damaged between bytes" in lines[2]
    code, lines, _ = call(capsys, "verify", damaged, "--json")
    assert code == 1 and [entry["intact"] for entry in json.loads("".join(lines))] == [
        True,
        True,
        False,
    ]


@pytest.mark.thorough
def test_diff_names_what_differs_and_only_that(run, capsys):
    steps_of = run / "checkpoints"
    assert call(capsys, "diff", steps_of / "1", steps_of / "1") == (0, ["the same"], "")
    code, lines, _ = call(capsys, "diff", steps_of / "1", steps_of / "2")
    assert code == 1
    assert lines[:2] == ["step: 1 | 2", "loss: 1.0 | 0.5"]
    assert (
        json.loads(
            "\n".join(call(capsys, "diff", "--json", steps_of / "1", steps_of / "2")[1])
        )
        == lines
    )
    differs = "array params.head.weight: 6,168 of 6,168 numbers"
    assert sum(line.startswith(differs) for line in lines) == 1
    assert not any(
        line.startswith(("config", "version", "array step")) for line in lines
    )
    assert (
        len(call(capsys, "diff", "--no-values", steps_of / "1", steps_of / "2")[1]) == 2
    )


def test_wrong_usage_is_one_sentence_and_exit_code_2(tmp_path, damaged, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for words, says in (
        (["verfy", "x"], "did you mean verify?"),
        (["diff", "x"], "second"),
        (["show", "x" * 300], "name too long"),
        (["ls", f"{tmp_path}/file"], f"{tmp_path}/file"),
        (["show", f"{tmp_path}/loop"], f"{tmp_path}/loop"),
    ):
        assert says in refused(main, capsys, *words)
    for word, path in (
        ("ls", tmp_path / "nothing"),
        ("verify", tmp_path),
        ("show", tmp_path),
    ):
        assert refused(main, capsys, word, str(path)).startswith(
            "meshtrain: there is no "
        )
    (damaged / "checkpoints" / "3" / steps.COMMIT).unlink()
    unmarked = refused(main, capsys, "show", str(damaged))
    assert tells(unmarked, "/3 cannot be read", "no COMMIT")


def test_nothing_that_is_damaged_is_read(damaged, capsys):
    manifest = damaged / "checkpoints" / "3" / steps.MANIFEST
    for content in ("{", "{}", manifest.read_text()):
        manifest.write_text(content)
        assert "manifest.json" in call(capsys, "ls", damaged)[1][3]
        for command in (["show", damaged], ["diff", "--no-values", damaged, damaged]):
            assert "3 cannot be read: manifest.json" in refused(
                main, capsys, *map(str, command)
            )
    second = damaged / "checkpoints" / "2"
    array = max((second / "arrays").rglob("*"), key=lambda path: path.stat().st_size)
    array.write_bytes(array.read_bytes()[:-1])
    assert "2 is damaged: arrays/" in refused(
        main, capsys, "diff", str(second), str(damaged / "checkpoints" / "1")
    )
    assert (
        call(capsys, "diff", "--no-values", second, damaged / "checkpoints" / "1")[0]
        == 1
    )


def test_what_the_system_refuses_is_one_sentence(run, monkeypatch, capsys):
    def refused(directory):
        raise PermissionError(
            errno.EACCES, "Permission denied", str(directory / steps.COMMIT)
        )

    monkeypatch.setattr(steps, "commit_problem", refused)
    code, _, said = call(capsys, "show", run)
    assert (code, said) == (
        2,
        f"meshtrain: {run}/checkpoints/3/COMMIT cannot be read: permission denied.\n",
    )


def test_a_newer_format_is_named(damaged, monkeypatch, capsys):
    monkeypatch.setattr(steps, "WHOLE", 4)
    steps.commit(damaged / "checkpoints" / "3")
    monkeypatch.undo()
    assert any(
        "format 4, of a later meshtrain" in line
        for line in call(capsys, "ls", damaged)[1]
    )
    assert call(capsys, "verify", damaged)[0] == 1


# --- names, and what is no step


@pytest.fixture
def odd(run, tmp_path):
    """A run with a renamed step, a link, a file and a directory where steps are, and a step under a person's own
    name.
    """
    root = shutil.copytree(run, tmp_path / "run") / "checkpoints"
    shutil.copytree(root / "1", root / "best")
    (root / "1").rename(root / "40")
    (root / "050").symlink_to("2")
    (root / "60").write_text("a file")
    (root / "70.writing").mkdir()
    (root / "80.writing").write_text("a file")
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    (root / "3" / steps.COMMIT).unlink()
    (root / "3" / steps.COMMIT).mkdir()
    return root.parent


RENAMED = {"40": "it is step 1, renamed", "050": "it is step 2, renamed"}
NAMED = {"3": "COMMIT is not a file", **RENAMED, "60": "it is not a directory"}


def test_ls_and_verify_name_each_that_is_not_the_step_of_its_name(odd, capsys):
    code, lines, said = call(capsys, "ls", odd)
    assert (code, said) == (0, "")
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert {name: found[name] for name in NAMED} == NAMED
    assert found["2"].endswith("KiB")
    assert {
        name: text for name, text in found.items() if text.startswith("no checkpoint")
    } == {
        "best": "no checkpoint: it is step 1, renamed",
        "9.damaged": "no checkpoint: damaged, set aside",
        "70.writing": "no checkpoint: unfinished",
        "80.writing": "no checkpoint: something else",
        "'\\udcff\\udcfe'": "no checkpoint: something else",
    }
    code, lines, _ = call(capsys, "verify", odd)
    assert code == 1 and lines[0].startswith("2: intact")
    assert lines[1:] == [f"{name}: DAMAGED: {text}" for name, text in NAMED.items()]


@pytest.mark.parametrize("command", [["show"], ["diff", "--no-values"], ["diff"]])
def test_show_and_diff_refuse_what_is_not_the_step_of_its_name(command, odd, capsys):
    for name, text in NAMED.items():
        path = odd / "checkpoints" / name
        arguments = (
            [*command, path]
            if command == ["show"]
            else [*command, odd / "checkpoints" / "2", path]
        )
        sentence = f"meshtrain: {path} cannot be read: {text}.\n"
        if path.is_file():
            legal = "give a run directory, its checkpoints/, or one step"
            sentence = f"meshtrain: there is no directory {path}; {legal}.\n"
        assert call(capsys, *arguments) == (2, [], sentence)


@pytest.mark.thorough
def test_a_checkpoint_under_a_persons_own_name_is_looked_at_like_any_other(odd, capsys):
    path = odd / "checkpoints" / "best"
    assert call(capsys, "show", path)[1][0] == f"step 1 in {path}"
    assert call(capsys, "verify", path)[1][0].startswith("best: intact")
    code, lines, _ = call(capsys, "ls", path)
    assert code == 0 and len(lines) == 2 and lines[1].split()[0] == "1"
    assert call(capsys, "diff", path, odd / "checkpoints" / "2")[1][0] == "step: 1 | 2"


def test_a_manifest_that_is_wrong_under_right_digests_is_one_sentence(damaged, capsys):
    step = damaged / "checkpoints" / "3"
    for leaf in (
        {"dtype": "float99", "shape": [1]},
        {"dtype": "float32", "shape": ["many"]},
        {},
        7,
    ):
        content = json.loads((step / steps.MANIFEST).read_text())
        content["leaves"]["params.head.weight"] = leaf
        (step / steps.MANIFEST).write_text(json.dumps(content))
        digests.write(step)
        steps.commit(step)
        for command in (
            ["show", step],
            ["diff", step, step],
            ["diff", "--no-values", step, step],
        ):
            said = f"meshtrain: {step} cannot be read: manifest.json has no legal leaves.\n"
            assert call(capsys, *command) == (2, [], said)
        assert call(capsys, "verify", step)[:2] == (
            1,
            ["3: DAMAGED: manifest.json has no legal leaves"],
        )
        assert call(capsys, "ls", step)[1][1].split(maxsplit=1) == [
            "3",
            "manifest.json has no legal leaves",
        ]


def test_arrays_that_are_not_those_of_the_manifest_are_one_sentence(damaged, capsys):
    step = damaged / "checkpoints" / "3"
    shutil.rmtree(step / "arrays")
    digests.write(step)
    steps.commit(step)
    code, _, said = call(capsys, "diff", step, damaged / "checkpoints" / "2")
    assert code == 2 and said.count("\n") == 1
    assert (
        said.startswith(f"meshtrain: {step}/arrays cannot be read by Orbax ")
        and "does not exist" in said
    )


def test_a_step_that_a_run_removes_meanwhile_is_not_called_damaged(
    damaged, monkeypatch, capsys
):
    root, problems = damaged / "checkpoints", digests.problems

    def removed(directory, *rest, **only):
        if directory.name == "1" and directory.exists():
            steps.remove(directory)
        return problems(directory, *rest, **only)

    shutil.rmtree(root / "3")
    spare = shutil.copytree(root / "1", damaged / "spare")
    for command, wanted in (
        ("verify", ["1: removed meanwhile", "2: intact"]),
        ("ls", ["     step", "        2"]),
    ):
        shutil.copytree(spare, root / "1", dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(digests, "problems", removed)
            code, lines, _ = call(capsys, command, root)
        found = [
            line.split(",")[0][: len(start)]
            for line, start in zip(lines, wanted, strict=False)
        ]
        assert code == 0 and found == wanted
