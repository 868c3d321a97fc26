"""The command: what it writes where, what it refuses, and what a person at a terminal meets."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused, tells
from tiny_models import SPECIAL, hugging_face

pytest.importorskip("safetensors")
pytest.importorskip("jinja2")

from meshtrain.config import ConfigError
from meshtrain.generate import command
from meshtrain.generate.__main__ import main
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import Sampling

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """tiny: with a template; plain: without, of learned positions."""
    directory = tmp_path_factory.mktemp("models")
    hugging_face(directory / "tiny")
    hugging_face(directory / "plain", "gpt2", chat=False)
    return directory


@pytest.fixture
def here(models, monkeypatch):
    """In the directory of the models, with a standard input that is empty and no terminal."""
    monkeypatch.chdir(models)

    def typed(text: str | bytes = b"") -> None:
        raw = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")
        )

    typed()
    return typed


def said(words: str, capsys) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main(words.split())
    caught = capsys.readouterr()
    return code, caught.out, caught.err


@pytest.mark.thorough
def test_standard_output_holds_the_answer_alone(here, capsys):
    here("hello\n")
    code, out, err = said("tiny --tokens 9", capsys)
    assert (code, err) == (0, "") and 3 < len(out) <= 10 and out.endswith("\n")


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_which_is_not_the_likeliest(here, capsys):
    code, out, err = said("tiny --prompt hello --tokens 20 --seed 3", capsys)
    assert (code, err) == (0, "") and len(out) > 3
    assert (
        said("tiny --prompt hello --tokens 20 --seed 3 --temperature 1", capsys)[1]
        == out
    )
    # the likeliest, where nothing says otherwise
    assert said("tiny --prompt hello --tokens 20", capsys)[1] != out


def test_how_tokens_are_chosen_is_the_models_own_where_nothing_is_asked():
    def how(usual, **asked):
        options = dict.fromkeys(("temperature", "top_k", "top_p", "seed")) | asked
        return command.sampling(Namespace(**options), usual)

    usual = Sampling(0.6, 20, 0.9)
    assert how(usual) == usual and how(usual, seed=4) == Sampling(0.6, 20, 0.9, 4)
    assert how(usual, temperature=0.0).temperature == 0 and how(
        usual, top_k=5, top_p=1.0
    ) == Sampling(0.6, 5)
    assert how(Sampling()) == Sampling() and how(Sampling(), seed=4) == Sampling(
        1.0, seed=4
    )


@pytest.mark.slow
def test_prompts_run_together_and_are_answered_in_their_order(here, capsys):
    code, out, err = said("tiny --prompt aaa --prompt zz --tokens 5", capsys)
    alone = [
        said(f"tiny --prompt {prompt} --tokens 5", capsys)[1]
        for prompt in ("aaa", "zz")
    ]
    assert code == 0 and out == "".join(alone)
    assert err == "meshtrain: 'aaa' goes on:\nmeshtrain: 'zz' goes on:\n"


@pytest.mark.thorough
def test_a_conversation_keeps_its_history(here, capsys, monkeypatch):
    asked = []
    submit = Engine.submit
    noting = lambda self, r, hear: (
        asked.append(r.tokens.tolist()) or submit(self, r, hear)
    )
    monkeypatch.setattr(Engine, "submit", noting)
    here("one\n\n  \ntwo\n")
    code, out, err = said("tiny --chat --system be.kind --tokens 4", capsys)
    assert (code, err) == (0, "") and out.count("\n") == 2 and len(asked) == 2
    user, model, end = (SPECIAL.index(t) for t in ("<|user|>", "<|model|>", "<|end|>"))
    assert asked[0].count(user) == 2 and asked[0][-1] == model
    # what was answered stands in what is asked next, between its marks
    assert (
        asked[1][: len(asked[0])] == asked[0]
        and asked[1].count(user) == 3
        and asked[1].count(model) == 2
    )
    answer = asked[1][len(asked[0]) :]
    assert answer.index(end) >= len(out.splitlines()[0].strip())


@pytest.mark.thorough
def test_a_conversation_that_grows_too_long_loses_its_oldest_messages_and_says_so(
    here, capsys
):
    here("a" * 20 + "\n" + "b" * 30 + "\n" + "c" * 70 + "\nd\n")
    code, out, err = said("tiny --chat --tokens 8", capsys)
    oldest, long = err.splitlines()
    assert code == 0 and out.count("\n") == 3
    assert tells(oldest, "the oldest 2 messages ... 64 positions ... left out")
    # and nothing for one that could not fit anyhow
    assert re.search(
        r"conversation \d+ tokens long, .* 64 positions",
        long,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "nowhere --prompt x",
            "directory nowhere; give a run, ... Hugging Face",
        ),
        ("tinny --prompt x", "directory tinny; did you mean tiny?"),
        (
            "org/Model-8B --prompt x",
            "directory org/Model-8B, ... hf download org/Model-8B --local-dir Model-8B",
        ),
        ("tiny --chat --prompt x", "--prompt and --chat are given"),
        (
            "tiny --prompt x --system y",
            "--system ... give --chat too",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, says, here, capsys):
    assert tells(refused(main, capsys, *words.split()), says)


def test_on_a_terminal_without_anything_to_go_on_with_it_says_what_to_give(
    here, capsys, monkeypatch
):
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal, os.fdopen(master, "wb"):
        monkeypatch.setattr(sys, "stdin", terminal)
        sentence = "give --prompt TEXT, --chat, or ... standard input."
        assert tells(refused(main, capsys, "tiny"), sentence)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tiny --prompt x --mesh tensor=9", "legal are"),
        ("tiny --prompt x --mesh data=2,data=2", "data is given twice."),
        (
            "plain --chat",
            "--chat needs ... conversations need a chat template",
        ),
        (
            "plain --prompt " + "x" * 80,
            "prompt is 82 tokens ... learned 64 positions",
        ),
        (
            "plain --prompt hi --length 90",
            "90 positions ... learned 64.",
        ),
        (
            "tiny --prompt " + "x" * 80,
            "prompt is 82 tokens ... 64 positions; --length N takes",
        ),
        (
            "tiny --prompt hello --length 5",
            "--length is 5, of the 64 positions",
        ),
    ],
)
def test_what_a_model_cannot_is_one_sentence_and_exit_code_2(words, says, here, capsys):
    sentence = refused(main, capsys, *words.split())
    assert tells(sentence, says) and len(sentence) < 500


def test_what_is_no_text_is_refused(here, capsys):
    here(b"\xff\xfe")
    assert (
        refused(main, capsys, "tiny")
        == "meshtrain: standard input is not text in UTF-8.\n"
    )
    assert "is not text in UTF-8." in refused(
        main, capsys, "tiny", "--prompt", "a\udcff"
    )


@pytest.mark.thorough
def test_an_answer_that_ends_with_an_error_is_exit_code_1(here, capsys, monkeypatch):
    def fail(self, state, likeliest):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(command.Engine, "__init__", _with(Engine.__init__, fail))
    code, _, err = said("tiny --prompt hello --tokens 4", capsys)
    assert (
        code == 1 and "program failed: out of memory" in err and "Traceback" not in err
    )


def _with(init, decode):
    def patched(self, *given, **named):
        init(self, *given, **named)
        self._decoding.decode = lambda state, likeliest: decode(self, state, likeliest)

    return patched


# --- a process of its own, on a terminal


class Terminal:
    """The command on a pseudo terminal, as a person has it."""

    def __init__(self, words: str, directory: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshtrain.generate", *words.split()],
            cwd=directory,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown, self._seen = "", 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """What is shown behind what was waited for before, to the end of the pattern."""
        until, begin = time.monotonic() + seconds, self._seen
        while not (found := re.search(pattern, self.shown[begin:])):
            assert time.monotonic() < until, f"no {pattern} in {self.shown!r}"
            if select.select([self.master], [], [], 0.5)[0]:
                try:
                    self.shown += os.read(self.master, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(
                        f"it ended, without {pattern}: {self.shown!r}"
                    ) from None
        self._seen = begin + found.end()
        return self.shown[begin : self._seen]

    def ended(self, seconds: float = 60) -> int:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.master, 4096).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(10)


@pytest.mark.thorough
def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(models):
    terminal = Terminal(
        "tiny --chat --tokens 100000 --length 200000 --temperature 1 --stop never",
        models,
    )
    try:
        terminal.wait_for("Ctrl-C stops an answer")
        terminal.wait_for("Ctrl-D ends the conversation")
        terminal.wait_for("> ")
        # a line that is thought better of
        terminal.type("abc")
        terminal.wait_for("abc")
        # readline hears of a signal where it waits for a key, and not while it still shows the last one
        time.sleep(1)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("> ")
        terminal.type("tell me\r")
        terminal.wait_for("tell me\r\n")
        terminal.wait_for(r"[^>]{3}")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("\n> ")
        terminal.type("\x04")
        assert terminal.ended() == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@contextlib.contextmanager
def endless(models):
    """The command at an answer that does not end, once it has begun to say it."""
    words = [
        sys.executable,
        "-m",
        "meshtrain.generate",
        "tiny",
        "--prompt",
        "a",
        "--temperature",
        "1",
    ]
    words += ["--tokens", "100000", "--length", "200000"]
    how = {
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(words, cwd=models, **how) as process:
        assert process.stdout.read(3)
        yield process


@pytest.mark.thorough
def test_a_reader_that_has_had_enough_ends_it_quietly(models):
    with endless(models) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 1


@pytest.mark.thorough
def test_an_interrupt_ends_prompts(models):
    with endless(models) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75


@pytest.mark.parametrize(
    ("length", "says"),
    [
        (4, "--length is 4, of the 8 positions"),
        (8, "was made for 8 positions; --length N"),
        (16, "--length is 16."),
    ],
)
def test_a_prompt_that_leaves_no_position_is_told_how_many_there_are(length, says):
    model = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(family="llama"))
    )
    with pytest.raises(ConfigError, match=says):
        command.check_fits(SimpleNamespace(longest=8, model=model), 20, length)
