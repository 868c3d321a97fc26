"""Wrong usage of any command is one sentence with the nearest right spelling and exit code 2; so ends whatever else
goes wrong.
"""

import argparse
import errno
import fcntl
import importlib
import io
import logging
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from meshtrain import cli
from meshtrain.commands import COMMANDS as ALL
from meshtrain.commands import parser_of
from meshtrain.config import Config, ConfigError
from meshtrain.config.key import SYNONYMS, keys
from meshtrain.keys import main as keys_main
from meshtrain.plan.__main__ import main as plan_main

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
        (
            "--config run.yaml --print-config=yes",
            "argument --print-config: ignored explicit argument 'yes'",
        ),
        (
            "--config run.yaml mesh.data=2",
            "unexpected argument mesh.data=2; did you mean --set mesh.data=2?",
        ),
        (
            "--config run.yaml --set mesh.tensor 2",
            "unexpected argument 2; did you mean --set mesh.tensor=2?",
        ),
        (
            "--config run.yaml --mesh.tensor 2",
            "there is no option --mesh.tensor; did you mean --set mesh.tensor=2?",
        ),
        (
            "--config run.yaml --mesh.tensr=2",
            "there is no option --mesh.tensr; did you mean --set mesh.tensor=2?",
        ),
        (
            "--config run.yaml --learning-rate 3e-4",
            "there is no option --learning-rate; did you mean --set optimizer.learning_rate=3e-4?",
        ),
        ("--config run.yaml --every 3", "there is no option --every.\n"),
        ("--config run.yaml --" + "x" * 5000, "xxx…xxx"),
    ],
    "plan": [
        ("", "--config FILE is needed"),
        (
            "--config run.yaml --flag",
            "there is no option --flag; did you mean --flags?",
        ),
        ("--version", "there is no option --version.\n"),
        (
            "--config run.yaml --gant -",
            "there is no option --gant; did you mean --gantt?",
        ),
        (
            "--config run.yaml --search --devices -3",
            "argument --devices: '-3' is not a whole number of at least 1",
        ),
        ("--config run.yaml --search --devices " + "9" * 5000, "'999"),
    ],
    "data": [
        ("", "a command is missing; legal are prepare, show, train-tokenizer, verify."),
        ("prepar", "there is no command prepar; did you mean prepare?"),
        (
            "zebra --input x",
            "there is no command zebra; legal are prepare, show, train-tokenizer, verify.",
        ),
        ("--inptu x", "there is no option --inptu"),
        (
            "prepare --inptu x --output y",
            "there is no option --inptu; did you mean --input?",
        ),
        (
            "prepare --output y",
            "the following arguments are required: --input; see python -m meshtrain.data prepare --help.",
        ),
        (
            "prepare --input x --output y --bad skp",
            "argument --bad: invalid choice: 'skp'",
        ),
    ],
    "checkpoint": [
        ("", "a command is missing; legal are ls, show, verify, diff."),
        ("lss runs/x", "there is no command lss; did you mean ls?"),
        ("ls", "the following arguments are required: directory"),
        (
            "diff a b --no-value",
            "there is no option --no-value; did you mean --no-values?",
        ),
    ],
    "evaluate": [
        ("", "the following arguments are required: RUN"),
        ("runs/x --txt a", "there is no option --txt; did you mean --text?"),
        (
            "runs/x --text a --tasks b",
            "argument --tasks: not allowed with argument --text",
        ),
        (
            "runs/x --stride 0",
            "argument --stride: '0' is not a whole number of at least 1",
        ),
        (
            "runs/x --tasks a --shots -1",
            "argument --shots: '-1' is not a whole number from 0 to 9999",
        ),
        (
            "runs/x --step last",
            "argument --step: 'last' is not a step; it must be a number, best or newest",
        ),
    ],
    "generate": [
        ("", "the following arguments are required: RUN"),
        ("runs/x --promt hello", "there is no option --promt; did you mean --prompt?"),
        (
            "runs/x --prompt hello --temperature -1",
            "argument --temperature: '-1' is not a number of at least 0",
        ),
        (
            "runs/x --prompt hello --temperature hot",
            "argument --temperature: 'hot' is not a number of at least 0",
        ),
        (
            "runs/x --prompt hello --top-p 1.5",
            "argument --top-p: '1.5' is not a number from 0 to 1",
        ),
        (
            "runs/x --prompt hello --top-k 0",
            "argument --top-k: '0' is not a whole number of at least 1",
        ),
        (
            "runs/x --prompt hello --seed=-3",
            "argument --seed: '-3' is not a whole number of at least 0",
        ),
        (
            "runs/x --prompt hello --step last",
            "argument --step: 'last' is not a step; it must be a number, best or newest",
        ),
        ("runs/x hello", "unexpected argument hello; did you mean --prompt hello?"),
    ],
    "serve": [
        ("--port 8000", "the following arguments are required: RUN"),
        ("runs/x --prot 8000", "there is no option --prot; did you mean --port?"),
        (
            "runs/x --port 65536",
            "argument --port: '65536' is not a whole number from 0 to 65535",
        ),
        (
            "runs/x --slots 0",
            "argument --slots: '0' is not a whole number of at least 1",
        ),
        (
            "runs/x --drain nan",
            "argument --drain: 'nan' is not a number from 0 to 1e+09",
        ),
        (
            "runs/x --step last",
            "argument --step: 'last' is not a step; it must be a number, best or newest",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(name, words, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[name](words.split())
    caught = capsys.readouterr()
    assert (stopped.value.code, caught.out) == (cli.USAGE, "")
    assert (
        caught.err.startswith("meshtrain: ")
        and caught.err.count("\n") == 1
        and caught.err[-2] in ".?"
    )
    assert says in caught.err and len(caught.err) < 500


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_argument_is_refused(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        COMMANDS[name](
            ["--config", ""] if name in ("train", "plan") else ["verify", ""]
        )
    assert "an argument is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_still_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        COMMANDS[name](["--help"])
    assert f"usage: python -m meshtrain.{name}" in capsys.readouterr().out


HELPS = """
import contextlib, io, runpy, sys
from meshtrain.commands import COMMANDS, MODULES
for name in COMMANDS:
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        runpy.run_module(f"meshtrain.{MODULES.get(name, name)}", run_name="__main__", alter_sys=True)
    print(name, printed.getvalue().startswith("usage: "), *{"jax", "flax", "optax", "orbax"} & sys.modules.keys())
"""


@pytest.mark.thorough
def test_no_help_waits_for_jax():
    done = subprocess.run(
        [sys.executable, "-c", HELPS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{name} True" for name in ALL]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("mesh.data is 3."), cli.USAGE, "mesh.data is 3."),
        (KeyboardInterrupt(), cli.STOPPED, "stopped."),
        (
            OSError(errno.ENOSPC, "No space left on device", "page.html"),
            cli.FAILED,
            "page.html: no space left on device.",
        ),
        # another one than the output
        (
            BrokenPipeError(errno.EPIPE, "Broken pipe"),
            cli.FAILED,
            "standard output cannot be written: broken pipe.",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            cli.FAILED,
            "standard output cannot be written: no space left on device.",
        ),
        (
            OSError(errno.EIO, "Input/output error"),
            cli.FAILED,
            "the system refused a call (test_cli.py, line {line}): input/output error.",
        ),
    ],
)
def test_a_command_ends_on_a_sentence_and_an_exit_code(error, code, says, capsys):
    @cli.command
    def main(arguments=None):
        raise error

    assert main([]) == code
    line = main.__wrapped__.__code__.co_firstlineno + 2
    assert capsys.readouterr().err == f"meshtrain: {says.format(line=line)}\n"


# Interrupts a process when it looks for a module for the first time.
INTERRUPTS = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
"""
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "at"),
    [
        *(
            (name, name)
            for name in (
                "meshtrain.train",
                *(
                    f"meshtrain.{p.parent.name}"
                    for p in ROOT.glob("meshtrain/*/__main__.py")
                ),
            )
        ),
        ("meshtrain.data", "meshtrain.cli"),
    ],
)
def test_an_interrupt_while_a_command_imports_is_a_sentence(module, at, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "INTERRUPTED_AT": at,
    }
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.stderr
        == "meshtrain: SIGINT: stopped; nothing is lost, run again to go on.\n"
    )
    assert done.returncode == cli.STOPPED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "meshtrain", "plan"),
        ("-m", "meshtrain.plan"),
        ("-c", "import sys; sys.argv = ['/bin/meshtrain']; import meshtrain.__main__"),
    ],
)
def test_an_interrupt_of_the_packages_first_import_ends_it_with_75_and_no_traceback(
    words, number, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(
        INTERRUPTS.replace("signal.SIGINT", str(int(number)))
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "INTERRUPTED_AT": "meshtrain.run",
    }
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (cli.STOPPED, "")


def test_an_interrupt_during_an_import_waits_for_its_end_since_extension_modules_make_another_error_of_it(
    tmp_path,
):
    (tmp_path / "theirs.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException: raise ImportError('your installation is bad')"
    )
    program = (
        "import time; from meshtrain import cli; from meshtrain.run import early; early.hear()\n"
        "def main(_):\n"
        "    import theirs\n"
        "    time.sleep(60)\n"
        "cli.command(main)()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (cli.STOPPED, "meshtrain: stopped.\n")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words",
    [
        "plan --config quickstart",
        "checkpoint verify nowhere",
        "train --config quickstart",
    ],
)
def test_a_command_ends_quietly_at_any_moment_of_its_start(words, number, tmp_path):
    """From its first import on: before that Python itself listens, and after its last word it does again."""
    (tmp_path / "sitecustomize.py").write_text("""
import sys
class Tells:
    def find_spec(self, name, path=None, target=None):
        if name == "meshtrain.run":
            print("begun", flush=True)
sys.meta_path.insert(0, Tells())
""")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "meshtrain", *words.split()]
    ends = not words.startswith("train")

    def said_undisturbed() -> tuple[str, str]:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.removeprefix("begun\n"), done.stderr

    whole = said_undisturbed() if ends else None
    for after in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "begun\n"
        time.sleep(after)
        process.send_signal(number)
        printed, said = process.communicate()
        finished = (printed, said) == whole and process.returncode in (0, 2, -number)
        assert finished or process.returncode == cli.STOPPED, (
            after,
            process.returncode,
            said,
        )
        assert "Traceback" not in said
        assert not list(tmp_path.glob("**/*.writing")) and not list(
            tmp_path.glob("**/*.part")
        )


def test_who_imports_the_package_is_interrupted_as_before(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import meshtrain.cli")
    (tmp_path / "theirs" / "__main__.py").write_text(
        "import signal; print(signal.getsignal(2), signal.getsignal(15))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "theirs", "--config", "meshtrain.yaml"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{signal.default_int_handler} {signal.SIG_DFL}\n"


def test_a_process_that_is_interrupted_ends_without_the_interpreters_end():
    """Which waits for what XLA compiles, and crashes on it."""
    program = (
        "import atexit, os, signal, time; from meshtrain import cli; from meshtrain.run import early\n"
        "atexit.register(os.abort); early.hear()\n"
        "def main(_):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "    finally: print('put in order')\n"
        "cli.command(main)()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        cli.STOPPED,
        "put in order\n",
        "meshtrain: stopped.\n",
    )


def test_a_command_that_is_ended_at_its_work_does_not_say_that_nothing_is_lost():
    program = (
        "import os, signal; from meshtrain import cli; from meshtrain.run import early; early.hear()\n"
        "cli.command(lambda _: os.kill(os.getpid(), signal.SIGTERM))()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        cli.STOPPED,
        "meshtrain: SIGTERM: stopped.\n",
    )


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
    assert (
        capsys.readouterr().err == "" and logging.getLogger("meshtrain").handlers == []
    )


def test_a_name_that_no_file_can_have_is_bad_input(capsys):
    assert cli.command(lambda arguments: Path("x" * 5000).is_file())([]) == cli.USAGE
    assert capsys.readouterr().err.endswith("x: file name too long.\n")


def test_what_a_command_makes_is_not_everybodys_to_write(tmp_path):
    before = os.umask(0)
    try:
        cli.command(
            lambda _: (tmp_path / "run" / "checkpoints").mkdir(parents=True) or cli.DONE
        )([])
    finally:
        after = os.umask(before)
    assert after == 0, "the caller keeps its mask"
    assert {
        path.stat().st_mode & 0o777
        for path in (tmp_path / "run", tmp_path / "run" / "checkpoints")
    } == {0o775}


def test_what_a_terminal_has_no_letters_for_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert (
        cli.command(lambda arguments: print("läufe/\udcff") or cli.DONE)([]) == cli.DONE
    )
    assert written.getvalue() == b"l\\xe4ufe/\\udcff\n"


@pytest.mark.thorough
def test_a_reader_that_has_had_enough_gets_no_traceback(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {layers: 4}")
    command = [
        sys.executable,
        "-m",
        "meshtrain.train",
        "--config",
        "run.yaml",
        "--print-config",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert (
            "meshtrain: " not in said
            and "Traceback" not in said
            and process.wait(60) == cli.FAILED
        )


def test_the_list_of_commands_has_every_command_with_a_line_and_runs_it(
    capsys, monkeypatch
):
    from meshtrain.__main__ import main

    rooms = {path.parent.name for path in ROOT.glob("meshtrain/*/__main__.py")}
    there = {room.replace("_", "-") for room in rooms} | {
        "train",
        "sweep",
        "completion",
        "config",
    }
    assert there == ALL.keys()
    monkeypatch.setattr("meshtrain.run.early.hear", lambda: None)
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(
        f"  {name:<11} {meaning}\n" in f"{printed}\n" for name, meaning in ALL.items()
    )
    assert main(["--version"]) == 0
    assert re.fullmatch(
        r"meshtrain \S+, JAX \d\S+, Python \d\S+, \d+ x \w+\n", capsys.readouterr().out
    )
    assert main(["trian"]) == 2
    assert (
        capsys.readouterr().err
        == "meshtrain: there is no command trian; did you mean train?\n"
    )


def test_a_mistake_in_a_config_is_answered_before_jax_is_imported(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX is imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def asked(config: str, text: str = "") -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "meshtrain", "train", "--config", config]
        return subprocess.run(
            command, env=environment, input=text, capture_output=True, text=True
        )

    (tmp_path / "run.yaml").write_text("model: {layer: 2}")
    done = asked(str(tmp_path / "run.yaml"))
    assert done.returncode == cli.USAGE and "did you mean model.layers?" in done.stderr
    assert "JAX is imported" in asked("quickstart").stderr
    # A pipe is left to the command, which could not read it again.
    assert "JAX is imported" in asked("/dev/stdin", "model: {layer: 2}").stderr


@pytest.mark.parametrize(
    ("called", "usage"),
    [
        ("/usr/bin/meshtrain", "meshtrain"),
        ("/x/meshtrain/__main__.py", "python -m meshtrain"),
    ],
)
@pytest.mark.parametrize("words", ["train", "data prepare", "survive status", "config"])
def test_help_and_refusals_name_the_command_as_it_was_typed(
    called, usage, words, capsys, monkeypatch
):
    from meshtrain.__main__ import main

    monkeypatch.setattr("meshtrain.run.early.hear", lambda: None)
    monkeypatch.setattr(cli, "typed", "")
    monkeypatch.setattr(sys, "argv", [called])
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {usage} {words} [-h]")


def _and_its_own(parser):
    yield parser
    for own in parser.commands.values():
        yield from _and_its_own(own)


@pytest.mark.parametrize("name", ALL)
def test_every_help_says_defaults_in_one_way(name):
    for parser in _and_its_own(parser_of(name)):
        said = " ".join(parser.format_help().split())
        assert said.startswith("usage: python -m meshtrain") and not re.search(
            "; default|default[^s]{2}is", said
        )
        for action in parser._actions:
            if action.help and action.default not in (
                None,
                False,
                [],
                argparse.SUPPRESS,
            ):
                shown = " ".join(
                    parser.formatter_class("")._expand_help(action).split()
                )
                assert shown.count("(default: ") == 1, shown


def test_a_shell_completes_commands_options_and_keys(tmp_path):
    pytest.importorskip("shtab")
    from meshtrain.completion import completion

    asks = """
compopt() { :; }
ask() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_meshtrain; echo "${COMPREPLY[*]}"; }
ask meshtrain tr; ask meshtrain train --co; ask meshtrain train --set mesh.te; ask meshtrain survive st
"""
    (tmp_path / "asks").write_text(completion("bash") + asks)
    done = subprocess.run(
        ["bash", "asks"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "train",
        "--config",
        "mesh.tensor=",
        "status stats",
    ]


def test_zsh_completes_commands_options_and_keys(tmp_path):
    pytest.importorskip("shtab")
    if shutil.which("zsh") is None:
        pytest.skip("needs zsh: apt-get install zsh")
    from meshtrain.completion import completion

    (tmp_path / "meshtrain.zsh").write_text(completion("zsh"))
    settings = (
        "autoload -Uz compinit; compinit -u -D; unsetopt prompt_sp prompt_cr; PS1='READY '; eval \"$(cat "
        f'{tmp_path}/meshtrain.zsh)"'
    )
    (tmp_path / ".zshrc").write_text(f"{settings}\n")
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"ZDOTDIR": str(tmp_path), "TERM": "dumb"}
        os.execvp("zsh", ["zsh", "-i"])
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        shown_until(terminal, "READY ")
        for typed, completed in (
            ("meshtrain tr", "meshtrain train "),
            ("meshtrain train --co", "meshtrain train --config "),
            ("meshtrain train --set mesh.ten", "meshtrain train --set mesh.tensor="),
            ("meshtrain survive statu", "meshtrain survive status "),
            ("meshtrain data ver", "meshtrain data verify "),
        ):
            os.write(terminal, f"{typed}\t".encode())
            shown_until(terminal, completed)
            os.write(terminal, b"\x15")  # empties the line
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def shown_until(terminal, wanted, seconds=60):
    """Reads what a terminal shows until it is what is wanted; fails if it does not come."""
    shown, until = "", time.monotonic() + seconds
    while wanted not in shown:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        assert time.monotonic() < until, shown


def test_the_reference_of_commands_has_every_command_with_its_own():
    from meshtrain.completion import markdown

    text = markdown()
    assert all(f"### meshtrain {name}\n" in text for name in ALL)
    assert (
        "usage: meshtrain survive inject" in text
        and "usage: meshtrain launch slurm" in text
    )
    assert "python -m meshtrain" not in text


def test_a_probe_that_is_asked_nothing_says_what_it_would_do(capsys, monkeypatch):
    from meshtrain.probe import __main__ as probe
    from meshtrain.probe.figures import PARTS

    assert probe.main([]) == 0
    said = capsys.readouterr().out
    assert (
        all(f"\n  {part} " in said for part in PARTS)
        and "minutes" in said
        and "--output cluster.yaml" in said
    )


@pytest.mark.thorough
@pytest.mark.parametrize("words", [["train", "--confg", "x"], ["telemetry", "catalog"]])
def test_a_command_by_its_name_alone_says_and_ends_as_its_module_does(words):
    run = lambda *line: subprocess.run(
        [sys.executable, "-m", *line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    short, long = run("meshtrain", *words), run(f"meshtrain.{words[0]}", *words[1:])
    assert (short.returncode, short.stdout, short.stderr) == (
        long.returncode,
        long.stdout,
        long.stderr,
    )
    assert short.returncode == cli.USAGE and short.stderr


BARE = ["train", "plan", "survive", "probe", "launch slurm", "launch local 2"]


@pytest.mark.parametrize("words", BARE)
@pytest.mark.parametrize("file", ["configs/x.yaml", "x.yml", "quickstart"])
def test_a_config_without_its_option_is_answered_with_the_right_spelling(
    words, file, capsys
):
    if file == "quickstart" and words == "launch local 2":
        pytest.skip("it takes words besides")
    name, *rest = words.split()
    with pytest.raises(SystemExit) as ended:
        parser = parser_of(name)
        if name == "survive":
            from meshtrain.survive.__main__ import main

            main([*rest, file])
        parser.parse_args([*rest, file])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"did you mean --config {file}?" in said


def test_a_file_that_another_option_takes_is_no_config():
    assert (
        parser_of("plan").parse_args(["--jobs", "configs/x.yaml"]).jobs
        == "configs/x.yaml"
    )
    assert parser_of("probe").parse_args(["--output", "x.yaml"]).output == "x.yaml"


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("batch_size", "train.global_batch_size"),
        ("lr", "optimizer.learning_rate"),
        ("num_layers", "model.layers"),
        ("n_layer", "model.layers"),
        ("hidden_size", "model.d_model"),
        ("n_heads", "model.heads"),
        ("seq_len", "train.sequence_length"),
        ("max_steps", "train.steps"),
        ("tp", "mesh.tensor"),
        ("pp", "mesh.pipeline"),
        ("dp", "mesh.data"),
        ("max_grad_norm", "optimizer.grad_clip"),
        ("gradient_checkpointing", "parallel.remat"),
        ("save_steps", "checkpoint.every"),
        ("output_dir", "run.directory"),
    ],
)
def test_what_others_call_a_key_is_answered_with_its_name_wherever_it_is_typed(
    word, path, tmp_path, capsys
):
    section = path.partition(".")[0]
    (tmp_path / "x.yaml").write_text(f"{section}: {{{word}: 3}}\n")
    said = []
    for main, words in (
        (keys_main, [word]),
        (keys_main, [f"{section}.{word}"]),
        (plan_main, ["--config", str(tmp_path / "x.yaml")]),
        (plan_main, ["--config", "quickstart", "--set", f"{section}.{word}=3"]),
        (plan_main, ["--config", "quickstart", "--set", f"{word}=3"]),
        (plan_main, ["--config", "quickstart", f"--{word}", "3"]),
        (plan_main, ["--config", "quickstart", f"--{word.replace('_', '-')}=3"]),
    ):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        said.append(capsys.readouterr().err)
        assert code == 2
    assert all(f"did you mean {path}?" in one for one in said[:4])
    assert all(f"did you mean --set {path}=3?" in one for one in said[4:])


def test_every_synonym_leads_to_a_key_and_is_none():
    paths = keys(Config)
    assert not set(SYNONYMS.values()) - set(paths)
    assert not {
        f"{path.rpartition('.')[0]}.{word}" for word, path in SYNONYMS.items()
    } & set(paths)
