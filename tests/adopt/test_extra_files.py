"""A run's tokenizer is found where the run has it, or where it began; a directory is complete under its name, or not
there.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest

from meshtrain.adopt.extra_files import (
    LOCK,
    WRITING,
    check_tokenizer,
    copy_tokenizer,
    find_hf_config,
    find_tokenizer,
    merged_config,
    written_aside,
)
from meshtrain.config import load
from meshtrain.config.follow import put
from meshtrain.errors import ConfigError


def directory(path, **files):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(content)
    return path


def config(**sections):
    return put(load({}), **sections)


def test_the_one_that_it_was_trained_with_comes_first(tmp_path):
    weights = directory(tmp_path / "hf", tokenizer="theirs", tokenizer_config="{}")
    run = directory(tmp_path / "run")
    began = {"weights": str(weights)}
    # Which only says more of a tokenizer
    (run / "generation_config.json").write_text("{}")
    assert find_tokenizer(run, config()) == {}
    assert (
        find_tokenizer(run, config(model=began))["tokenizer_config.json"].parent
        == weights
    )
    own = directory(tmp_path / "own", mine="ours") / "mine.json"
    found = find_tokenizer(run, config(model=began, data={"tokenizer": str(own)}))
    assert {name: path.read_text() for name, path in found.items()} == {
        "tokenizer.json": "ours"
    }


@pytest.mark.parametrize("path", ["out", "out/checkpoints", "out/checkpoints/0"])
def test_a_run_that_began_with_an_import_has_what_was_kept_there(tmp_path, path):
    out = directory(
        tmp_path / "out",
        tokenizer="kept",
        hf_config='{"model_type": "llama", "eos_token_id": 2}',
    )
    (out / "checkpoints" / "0").mkdir(parents=True)
    began = config(checkpoint={"resume": str(tmp_path / path)})
    assert (
        find_tokenizer(tmp_path / "run", began)["tokenizer.json"].read_text() == "kept"
    )
    assert find_hf_config(tmp_path / "run", began)["eos_token_id"] == 2
    # of the step itself
    assert (
        find_tokenizer(tmp_path / path, config())["tokenizer.json"].read_text()
        == "kept"
    )
    assert find_hf_config(tmp_path / "run", put(began, model={"family": "gpt2"})) == {}


ADDED = {"model": {"vocab": {}}, "added_tokens": [{"id": 45, "content": "<s>"}]}


@pytest.mark.parametrize(
    "content",
    [{"model": {"vocab": {"a": 0, "b": 45}}}, {"model": {"vocab": ["a"] * 46}}, ADDED],
)
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, content):
    at = directory(tmp_path / "t", tokenizer=json.dumps(content))
    check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 46)
    with pytest.raises(ConfigError, match=r"id 45, but .* vocabulary is 45"):
        check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 45)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"model": 3}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": 1}}',
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, content):
    at = directory(tmp_path / "t", tokenizer=content)
    with pytest.raises(
        ConfigError, match=r"is not a tokenizer\.json: it has no vocabulary\.$"
    ):
        check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 45)


def test_a_models_longest_sequence_is_never_made_shorter():
    theirs = {"max_position_embeddings": 4096, "vocab_size": 3, "pad_token_id": None}
    for given, longest in ((256, 4096), (8192, 8192)):
        config = json.loads(merged_config({"max_position_embeddings": given}, theirs))
        assert config == {"max_position_embeddings": longest}


def test_the_chat_template_of_the_run_goes_with_it(tmp_path):
    run = directory(tmp_path / "run", tokenizer="t", tokenizer_config="theirs")
    (run / "chat_template.jinja").write_text("theirs")
    (tmp_path / "mine.jinja").write_text("mine")
    found = find_tokenizer(run, config(data={"template": str(tmp_path / "mine.jinja")}))
    assert (
        found["chat_template.jinja"].read_text() == "mine"
        and found["tokenizer_config.json"].read_text() == "theirs"
    )
    mine = (
        directory(tmp_path / "own", tokenizer_config="mine") / "tokenizer_config.json"
    )
    found = find_tokenizer(run, config(data={"template": str(mine)}))
    assert (
        "chat_template.jinja" not in found
        and found["tokenizer_config.json"].read_text() == "mine"
    )


def test_templates_by_name_go_with_a_tokenizer_unless_the_run_had_one_of_its_own(
    tmp_path,
):
    run = directory(tmp_path / "run", tokenizer="t")
    more = run / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    (tmp_path / "out").mkdir()
    copy_tokenizer(find_tokenizer(run, config()), tmp_path / "out")
    copied = tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "tools"
    (tmp_path / "mine.jinja").write_text("mine")
    found = find_tokenizer(run, config(data={"template": str(tmp_path / "mine.jinja")}))
    assert found.keys() == {"tokenizer.json", "chat_template.jinja"}


def write(to):
    with written_aside(to) as aside:
        (aside / "held").mkdir()
        (aside / "held" / "file").write_text("all of it")
        assert not to.exists()


def left_by_a_killed_process(to):
    aside = to.with_name(to.name + WRITING)
    (aside / "held").mkdir(parents=True)
    (aside / LOCK).touch()
    (aside / "half").write_text("ha")
    return aside


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    left_by_a_killed_process(tmp_path / "out")
    write(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["held"]


KILLED_AT_EACH_CALL = """
import os, sys
from pathlib import Path
from meshtrain.adopt.extra_files import written_aside

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock", "os.listdir", "os.scandir")

def write(to, fails):
    with written_aside(to) as aside:
        (aside / "deep").mkdir()
        (aside / "deep" / "half").write_text("x")
        (aside / "half").write_text("x")
        if fails:
            raise OSError(28, "No space left on device")

def killed(to, call, fails):
    process = os.fork()
    if not process:
        left = [call]
        def count(event, arguments):
            if event in CALLS:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
        sys.addaudithook(count)
        try:
            write(to, fails)
        except Exception:
            pass
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9

for fails in (False, True):
    call = 0
    while killed(to := Path(sys.argv[1]) / f"{fails}-{call}", call, fails):
        if not to.exists():
            write(to, False)
        call += 1
        assert (to / "half").read_text() == (to / "deep" / "half").read_text() == "x"
        assert not to.with_name(to.name + ".writing").exists()
    print(call)
"""


@pytest.mark.thorough
def test_a_process_that_is_killed_at_any_call_blocks_no_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_CALL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(int(calls) > 8 for calls in done.stdout.split())


def test_what_somebody_else_has_there_stays(tmp_path):
    (tmp_path / f"out{WRITING}").mkdir()
    (tmp_path / f"out{WRITING}" / "diary").write_text("dear")
    with pytest.raises(ConfigError, match="move it away"):
        write(tmp_path / "out")
    assert (tmp_path / f"out{WRITING}" / "diary").read_text() == "dear"


def test_two_processes_do_not_write_the_same(tmp_path):
    aside = left_by_a_killed_process(tmp_path / "out")
    with open(aside / LOCK) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing"):
            write(tmp_path / "out")
    assert (aside / "half").exists()


@pytest.mark.parametrize("name", ["", "a file"])
def test_nothing_is_written_over(tmp_path, name):
    (tmp_path / "out").write_text("mine") if name else (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        write(tmp_path / "out")


def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_as_safetensors_says_it(aside):
    class SafetensorError(Exception):
        pass

    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


@pytest.mark.parametrize("fails", [full, full_as_safetensors_says_it])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, fails):
    said = r"out cannot be written: no space left"
    with (
        pytest.raises(ConfigError, match=said),
        written_aside(tmp_path / "out") as aside,
    ):
        (aside / "half").write_text("ha")
        fails(aside)
    assert not list(tmp_path.iterdir())
    write(tmp_path / "out")
