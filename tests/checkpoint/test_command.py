"""python -m meshtrain.checkpoint ls | show | verify | diff."""

import errno
import shutil

import pytest
from checkpoint_runs import saved

from meshtrain.checkpoint import steps
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
    assert " 0.500000 " in lines[2] and lines[2].split()[-1] == "kB"
    assert lines[4].endswith("damaged, set aside")


def test_show_prints_the_newest_step_and_its_tree(run, capsys):
    code, lines, _ = call(capsys, "show", run)
    assert code == 0 and lines[0] == f"step 3 in {run}/checkpoints/3"
    assert "    blocks" in lines
    gates = [line.split() for line in lines if line.split()[0] == "gate"]
    assert gates == [["gate", "float32", "[5,", "24,", "50]", "24.0", "kB"]] * 3  # the weight and two moments
    assert any(line.startswith("model: family llama, layers 5") for line in lines)


def test_verify_tells_intact_from_damaged(run, damaged, capsys):
    assert call(capsys, "verify", run)[0] == 0
    code, lines, _ = call(capsys, "verify", damaged)
    assert code == 1
    assert [line.split(":")[1].split(",")[0].strip() for line in lines] == ["intact", "intact", "DAMAGED"]
    assert "manifest.json is damaged between bytes" in lines[2]


def test_diff_names_what_differs_and_only_that(run, capsys):
    steps_of = run / "checkpoints"
    assert call(capsys, "diff", steps_of / "1", steps_of / "1") == (0, ["the same"], "")
    code, lines, _ = call(capsys, "diff", steps_of / "1", steps_of / "2")
    assert code == 1
    assert lines[:2] == ["step: 1 | 2", "loss: 1.0 | 0.5"]
    assert (
        sum(line.startswith("array params.head.weight: 6,168 of 6,168 numbers differ, by up to ") for line in lines)
        == 1
    )
    assert not any(line.startswith(("config", "version", "array step")) for line in lines)
    assert len(call(capsys, "diff", "--no-values", steps_of / "1", steps_of / "2")[1]) == 2


def test_wrong_usage_is_one_sentence_and_exit_code_2(tmp_path, damaged, capsys):
    for arguments in (["ls", tmp_path / "nothing"], ["verify", tmp_path], ["show", tmp_path]):
        code, lines, said = call(capsys, *arguments)
        assert code == 2 and lines == [] and said.count("\n") == 1 and said.startswith("meshtrain: there is no ")
    for arguments in (["lss", damaged], ["ls"], ["diff", damaged]):
        with pytest.raises(SystemExit, match="2"):
            main([str(a) for a in arguments])
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith("meshtrain: ")
    (damaged / "checkpoints" / "3" / steps.COMMIT).unlink()
    code, _, said = call(capsys, "show", damaged)
    assert code == 2 and "3 cannot be read: it has no COMMIT file" in said


def test_nothing_that_is_damaged_is_read(damaged, capsys):
    manifest = damaged / "checkpoints" / "3" / steps.MANIFEST
    for content in ("{", "{}", manifest.read_text()):
        manifest.write_text(content)
        assert "manifest.json" in call(capsys, "ls", damaged)[1][3]
        for command in (["show", damaged], ["diff", "--no-values", damaged, damaged]):
            code, lines, said = call(capsys, *command)
            assert code == 2 and lines == [] and said.count("\n") == 1 and "3 cannot be read: manifest.json" in said
    second = damaged / "checkpoints" / "2"
    array = max((second / "arrays").rglob("*"), key=lambda path: path.stat().st_size)
    array.write_bytes(array.read_bytes()[:-1])
    code, lines, said = call(capsys, "diff", second, damaged / "checkpoints" / "1")
    assert code == 2 and lines == [] and "2 is damaged: arrays/" in said
    assert call(capsys, "diff", "--no-values", second, damaged / "checkpoints" / "1")[0] == 1


def test_what_the_system_refuses_is_one_sentence(run, monkeypatch, capsys):
    def refused(directory):
        raise PermissionError(errno.EACCES, "Permission denied", str(directory / steps.COMMIT))

    monkeypatch.setattr(steps, "commit_problem", refused)
    code, _, said = call(capsys, "show", run)
    assert (code, said) == (2, f"meshtrain: {run}/checkpoints/3/COMMIT cannot be read: permission denied.\n")


def test_a_newer_format_is_named(damaged, monkeypatch, capsys):
    monkeypatch.setattr(steps, "FORMAT", 4)
    steps.commit(damaged / "checkpoints" / "3")
    monkeypatch.undo()
    assert any("format 4, of a later meshtrain" in line for line in call(capsys, "ls", damaged)[1])
    assert call(capsys, "verify", damaged)[0] == 1
