"""Wrong usage of any command is one sentence with the nearest right spelling and exit code 2; so ends whatever else goes wrong."""

import errno
import importlib
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain import cli
from meshtrain.config import ConfigError

COMMANDS = {
    name: importlib.import_module(module).main
    for name, module in {
        "train": "meshtrain.train",
        "plan": "meshtrain.plan.__main__",
        "data": "meshtrain.data.__main__",
        "checkpoint": "meshtrain.checkpoint.__main__",
        "evaluate": "meshtrain.evaluate.__main__",
        "generate": "meshtrain.generate.__main__",
        "serve": "meshtrain.serve.__main__",
    }.items()
}

WRONG = {
    "train": [
        ("", "the following arguments are required: --config"),
        ("--confg run.yaml", "there is no option --confg; did you mean --config?"),
        ("--conf run.yaml", "there is no option --conf; did you mean --config?"),
        ("-config run.yaml", "there is no option -config; did you mean --config?"),
        ("--config", "argument --config: expected one argument"),
        ("--config=", "an argument is empty; give --config a value"),
        ("--config run.yaml --set", "argument --set: expected one argument"),
        ("--config run.yaml --print-config=yes", "argument --print-config: ignored explicit argument 'yes'"),
        ("--config run.yaml mesh.data=2", "unrecognized arguments: mesh.data=2"),
        ("--config run.yaml --" + "x" * 5000, "xxx…xxx"),
    ],
    "plan": [
        ("", "--config FILE is needed"),
        ("--config run.yaml --flag", "there is no option --flag; did you mean --flags?"),
        ("--config run.yaml --gant -", "there is no option --gant; did you mean --gantt?"),
        ("--config run.yaml --search --devices -3", "argument --devices: '-3' is not a whole number of at least 1"),
        ("--config run.yaml --search --devices " + "9" * 5000, "'999"),
    ],
    "data": [
        ("", "a command is missing; legal are prepare, show, train-tokenizer, verify."),
        ("prepar", "there is no command prepar; did you mean prepare?"),
        ("zebra --input x", "there is no command zebra; legal are prepare, show, train-tokenizer, verify."),
        ("--inptu x", "there is no option --inptu"),
        ("prepare --inptu x --output y", "there is no option --inptu; did you mean --input?"),
        ("prepare --output y", "the following arguments are required: --input; see python -m meshtrain.data prepare --help."),
        ("prepare --input x --output y --bad skp", "argument --bad: invalid choice: 'skp'"),
    ],
    "checkpoint": [
        ("", "a command is missing; legal are ls, show, verify, diff."),
        ("lss runs/x", "there is no command lss; did you mean ls?"),
        ("ls", "the following arguments are required: directory"),
        ("diff a b --no-value", "there is no option --no-value; did you mean --no-values?"),
    ],
    "evaluate": [
        ("", "the following arguments are required: RUN"),
        ("runs/x --txt a", "there is no option --txt; did you mean --text?"),
        ("runs/x --text a --tasks b", "argument --tasks: not allowed with argument --text"),
        ("runs/x --stride 0", "argument --stride: '0' is not a whole number of at least 1"),
        ("runs/x --tasks a --shots -1", "argument --shots: '-1' is not a whole number from 0 to 9999"),
        ("runs/x --step last", "argument --step: 'last' is no step; it must be a number, best or newest"),
    ],
    "generate": [
        ("", "the following arguments are required: RUN"),
        ("runs/x --promt hello", "there is no option --promt; did you mean --prompt?"),
        ("runs/x --prompt hello --temperature -1", "argument --temperature: '-1' is below 0"),
        ("runs/x --prompt hello --temperature hot", "argument --temperature: 'hot' is no temperature"),
        ("runs/x --prompt hello --top-p 1.5", "argument --top-p: '1.5' is no share; it must be above 0 and at most 1"),
        ("runs/x --prompt hello --top-k 0", "argument --top-k: '0' is not a whole number of at least 1"),
        ("runs/x --prompt hello --seed=-3", "argument --seed: '-3' is no seed; it must be a whole number from 0"),
        ("runs/x --prompt hello --step last", "argument --step: 'last' is no step; it must be a number, best or newest"),
        ("runs/x hello", "unrecognized arguments: hello"),
    ],
    "serve": [
        ("--port 8000", "the following arguments are required: RUN"),
        ("runs/x --prot 8000", "there is no option --prot; did you mean --port?"),
        ("runs/x --port 65536", "argument --port: '65536' is no port; ports are 0 to 65535"),
        ("runs/x --slots 0", "argument --slots: '0' is not a whole number of at least 1"),
        ("runs/x --drain nan", "argument --drain: 'nan' is no number of seconds"),
        ("runs/x --step last", "argument --step: 'last' is no step; it must be a number, best or newest"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "words", "says"), [(name, *case) for name, cases in WRONG.items() for case in cases])
def test_wrong_usage_is_one_sentence_and_exit_code_2(name, words, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[name](words.split())
    caught = capsys.readouterr()
    assert (stopped.value.code, caught.out) == (cli.USAGE, "")
    assert caught.err.startswith("meshtrain: ") and caught.err.count("\n") == 1 and caught.err[-2] in ".?"
    assert says in caught.err and len(caught.err) < 500


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_argument_is_refused(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        COMMANDS[name](["--config", ""] if name in ("train", "plan") else ["verify", ""])
    assert "an argument is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_still_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        COMMANDS[name](["--help"])
    assert f"usage: python -m meshtrain.{name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("mesh.data is 3."), cli.USAGE, "mesh.data is 3."),
        (KeyboardInterrupt(), cli.STOPPED, "stopped."),
        (OSError(errno.ENOSPC, "No space left on device", "page.html"), cli.FAILED, "page.html: no space left on device."),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), cli.FAILED, "standard output cannot be written: broken pipe."),  # another one than the output
        (OSError(errno.ENOSPC, "No space left on device"), cli.FAILED, "standard output cannot be written: no space left on device."),
        (OSError(errno.EIO, "Input/output error"), cli.FAILED, "input/output error."),
    ],
)  # fmt: skip
def test_a_command_ends_on_a_sentence_and_an_exit_code(error, code, says, capsys):
    @cli.command
    def main(arguments=None):
        raise error

    assert main([]) == code
    assert capsys.readouterr().err == f"meshtrain: {says}\n"


def test_what_the_package_logs_is_said_by_its_commands_and_by_them_alone(capsys):
    @cli.command
    def main(arguments=None):
        logging.getLogger("meshtrain.data.cache").info("preparing %d files", 3)
        logging.getLogger("meshtrain.data.cache").debug("a detail")
        logging.getLogger("elsewhere").info("another library's")
        return cli.DONE

    assert main([]) == main([]) == cli.DONE
    assert capsys.readouterr().err == "meshtrain: preparing 3 files\n" * 2
    logging.getLogger("meshtrain.data.cache").info("to nobody")
    assert capsys.readouterr().err == "" and logging.getLogger("meshtrain").handlers == []


def test_what_a_terminal_has_no_letters_for_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.command(lambda arguments: print("läufe/\udcff") or cli.DONE)([]) == cli.DONE
    assert written.getvalue() == b"l\\xe4ufe/\\udcff\n"


def test_a_reader_that_has_had_enough_gets_no_traceback(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {layers: 4}")
    command = [sys.executable, "-m", "meshtrain.train", "--config", "run.yaml", "--print-config"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert "meshtrain: " not in said and "Traceback" not in said and process.wait(60) == cli.FAILED
