"""python -m meshtrain.data: what it prints, and its exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mounts import exit_code_of, may_mount, mount, own_mounts
from refusals import refused, tells

from meshtrain.data.__main__ import main
from meshtrain.data.manifest import read_manifest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("validation", ["0.1", "0"])
def test_prepare_then_verify_then_damage(validation, text, tmp_path, capsys):
    out = tmp_path / "shards"
    arguments = [
        "prepare",
        "--input",
        str(text),
        "--output",
        str(out),
        "--workers",
        "1",
        "--validation",
        validation,
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    manifest = read_manifest(out)
    assert (
        f"train: {manifest.count('train', 'documents')} documents" in said
        and manifest.digest[:16] in said
    )
    assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    assert main(["verify", str(out), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert (
        verified["intact"]
        and verified["tokenizer"] == "byte"
        and len(verified["digest"]) == 64
    )
    assert (
        verified["train"]["documents"] > 0
        and verified["train"]["tokens"] > verified["train"]["shards"] > 0
    )
    shard = out / "train-00000.tokens"
    shard.write_bytes(b"\0\0" + shard.read_bytes()[2:])
    assert "has been altered" in refused(main, capsys, "verify", str(out))


def test_prepare_of_documents_that_are_all_held_out_ends_with_a_sentence(
    tmp_path, capsys
):
    (tmp_path / "d.txt").write_text("words")  # its name is in the half that is held out
    arguments = [
        "prepare",
        "--input",
        str(tmp_path / "d.txt"),
        "--output",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert main([*arguments, "--validation", "0.5"]) == 2
    said = capsys.readouterr().err
    assert tells(said, "no document ... left to train ... --validation 0.5 ")


@pytest.mark.parametrize(("validation", "warned"), [("0.01", True), ("0", False)])
def test_prepare_says_that_it_held_out_nothing_though_asked_to(
    validation, warned, tmp_path, capsys
):
    (tmp_path / "one.txt").write_text("words")
    arguments = [
        "prepare",
        "--input",
        str(tmp_path / "one.txt"),
        "--output",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert main([*arguments, "--validation", validation]) == 0
    caught = capsys.readouterr()
    assert "validation: 0 documents" in caught.out
    assert tells(caught.err, "no document is held out ... --validation 0.01 ") == warned


def test_a_tokenizer_can_be_trained_and_used(text, tmp_path):
    file, out = tmp_path / "made" / "tokenizer.json", tmp_path / "shards"
    assert (
        main(
            [
                "train-tokenizer",
                "--input",
                str(text),
                "--vocab-size",
                "300",
                "--output",
                str(file),
            ]
        )
        == 0
    )
    arguments = [
        "prepare",
        "--input",
        str(text),
        "--tokenizer",
        str(file),
        "--output",
        str(out),
        "--workers",
        "1",
    ]
    assert main(arguments) == 0
    assert read_manifest(out).vocab_size == 300
    assert (out / "tokenizer.json").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["prepare", "--input", "x", "--output", "y", "--workers", "0"],
            "'0' is not a whole number ... 1",
        ),
        (
            ["prepare", "--input", "x", "--output", "y", "--validation", "2"],
            "'2' is not a number from 0 to 0.5",
        ),
        (
            ["prepare", "--input", "x", "--output", "y", "--validation", "nan"],
            "'nan' is not a number from 0 to 0.5",
        ),
        (
            ["train-tokenizer", "--input", "x", "--output", "y", "--vocab-size", "٣"],
            "'٣' is not a whole number",
        ),
        (["verify", __file__], "test_data_command.py"),
        (
            ["prepare", "--input", "/no/such", "--output", "y"],
            "no file or directory /no/such",
        ),
        (["verify", "/no/such"], "holds no prepared shards"),
        (["prepare", "--input", "", "--output", "y"], "an argument is empty"),
        (
            ["prepare", "--input", "x", "--output="],
            "argument is empty; give --output a value",
        ),
        (
            ["prepare", "--input", "/dev/null", "--output", "y"],
            "/dev/null is neither a file nor",
        ),
        (
            ["prepare", "--input", str(ROOT / "tests"), "--output", __file__],
            "is a file; the output is a directory",
        ),
        (
            ["prepare", "--input", "x", "--output", "y", "--workers", "9" * 5000],
            "'" + "9" * 119 + "…' is not a whole number",
        ),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert tells(refused(main, capsys, *arguments), said)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_exit_code_75_and_it_goes_on(how, tmp_path):
    big, out = tmp_path / "big.jsonl", tmp_path / "out"
    big.write_text(
        "".join(f'{{"text": "{i}{"." * 180}"}}\n' for i in range(42_000))
    )  # two units of 4 MiB
    words = ["prepare", "--input", str(big), "--output", str(out), "--workers"]
    command = [sys.executable, "-m", "meshtrain.data", *words, "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (out / "plan.json").exists() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0.1)
    process.send_signal(how)
    assert process.communicate(timeout=60)[1].endswith(
        "meshtrain: stopped; run the same command again to go on.\n"
    )
    assert process.returncode == 75 and not (out / "manifest.json").exists()
    assert not list(out.glob(".*.tokens.*"))
    assert main([*words, "1"]) == 0
    manifest = read_manifest(out)
    assert (
        manifest.count("train", "documents") + manifest.count("validation", "documents")
        == 42_000
    )


def without_seconds(said: str) -> str:
    """Leaves out how long the command took, which it must say once."""
    left, count = re.subn(r", \d+\.\d s$", "", said, flags=re.M)
    assert count == 1, said
    return left


@pytest.mark.parametrize(
    "name, says",
    [
        ("loop", "loop"),
        ("link", "link"),
        ("file/shards", "file/shards"),
        ("text", "text"),
        ("x" * 300, "name too long"),
        ("/dev/null", "/dev/null"),
    ],
)
def test_what_cannot_be_an_output_is_one_sentence(name, says, text, tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("/nonexistent/place")
    (tmp_path / "file").touch()
    given = shutil.copytree(text, tmp_path / "text")
    before = sorted(tmp_path.rglob("*"))
    output = f"{tmp_path / name}"
    words = ["prepare", "--input", f"{given}", "--output", output, "--workers", "1"]
    assert main(words) in (1, 2)
    said = capsys.readouterr().err
    (sentence,) = [line for line in said.splitlines() if " files, " not in line]
    assert sentence.startswith("meshtrain: ") and says in sentence
    left = [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"]
    assert left == before


def test_the_output_may_lie_in_the_input(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    command = [
        "prepare",
        "--input",
        ".",
        "--output",
        "./shards",
        "--workers",
        "1",
        "--validation",
        "0",
    ]
    assert main(command) == 0
    first = without_seconds(capsys.readouterr().out)
    assert main(command) == 0
    again = capsys.readouterr()
    assert without_seconds(again.out) == first and "train: 1 documents" in again.out
    assert (
        f"Left out: directories of prepared shards: 1 ({tmp_path.name}/shards)"
        in again.err
    )
    (tmp_path / "c.txt").write_text("more")
    assert main(command) == 2 and "made from different input" in capsys.readouterr().err


def test_a_full_disk_is_reported_with_the_directory_and_leaves_no_halves(tmp_path):
    if not may_mount():
        pytest.skip("this process may not mount")
    out, said = tmp_path / "out", tmp_path / "said"
    out.mkdir()
    (tmp_path / "a.txt").write_text("words " * 100_000)

    def on_a_small_disk() -> None:
        own_mounts()
        mount("tmpfs", out, options="size=64k")
        with said.open("w") as sys.stderr:
            code = main(
                [
                    "prepare",
                    "--input",
                    str(tmp_path / "a.txt"),
                    "--output",
                    str(out),
                    "--workers",
                    "1",
                ]
            )
        os._exit(code + 10 * len(list(out.glob(".*.tokens.*"))))

    assert exit_code_of(on_a_small_disk) == 1
    (_, sentence) = said.read_text().splitlines()
    assert tells(
        sentence, f"meshtrain: {out} cannot be written: no space ... --output."
    )


def test_a_tokenizer_that_cannot_be_written_is_reported(text, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "t.json", tmp_path):
        assert (
            main(
                [
                    "train-tokenizer",
                    "--input",
                    str(text),
                    "--vocab-size",
                    "300",
                    "--output",
                    str(output),
                ]
            )
            == 1
        )
        assert f"meshtrain: {output} cannot be written: " in capsys.readouterr().err


def test_a_tokenizer_is_not_trained_on_nothing(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "words"}\n')
    command = [
        "train-tokenizer",
        "--input",
        str(tmp_path),
        "--output",
        str(tmp_path / "t.json"),
        "--vocab-size",
    ]
    assert main([*command, "300"]) == 2
    assert tells(capsys.readouterr().err, "no documents: 1 skipped: 1 without text.")
    (tmp_path / "b.txt").write_text("words")
    assert main([*command, "999999999"]) == 2
    assert tells(capsys.readouterr().err, "--vocab-size ... from 257, ... to 16777216")
    assert (
        main([*command, "300"]) == 0
        and "1 skipped: 1 without text" in capsys.readouterr().err
    )


def test_standard_output_that_is_full_is_reported(text, tmp_path):
    command = [
        sys.executable,
        "-m",
        "meshtrain.data",
        "prepare",
        "--input",
        str(text),
        "--output",
        str(tmp_path / "o"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    (_, said) = done.stderr.splitlines()
    assert tells(said, "output cannot be written: no space left")
