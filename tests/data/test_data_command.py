"""python -m meshtrain.data: what it prints, and its exit codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.data.__main__ import main
from meshtrain.data.shards import read_manifest

ROOT = Path(__file__).parents[2]


def test_prepare_then_verify_then_damage(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shards"
    assert main(["prepare", "--input", str(text), "--output", str(out), "--workers", "1", "--validation", "0.1"]) == 0
    said = capsys.readouterr().out
    manifest = read_manifest(out)
    assert f"train: {manifest.count('train', 'documents')} documents" in said and manifest.digest[:16] in said
    assert main(["verify", str(out)]) == 0
    shard = out / "train-00000.tokens"
    shard.write_bytes(b"\0\0" + shard.read_bytes()[2:])
    assert main(["verify", str(out)]) == 2
    assert "has been altered" in capsys.readouterr().err


def test_a_tokenizer_can_be_trained_and_used(text: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "made" / "tokenizer.json", tmp_path / "shards"
    assert main(["train-tokenizer", "--input", str(text), "--vocab-size", "300", "--output", str(file)]) == 0
    assert (
        main(["prepare", "--input", str(text), "--tokenizer", str(file), "--output", str(out), "--workers", "1"]) == 0
    )
    assert read_manifest(out).vocab_size == 300
    assert (out / "tokenizer.json").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "arguments are required: COMMAND"),
        (["prepar"], "choose from"),
        (["prepare", "--output", "x"], "required: --input"),
        (["prepare", "--inptu", "x", "--output", "y"], "there is no option --inptu; did you mean --input"),
        (["prepare", "--input", "x", "--output", "y", "--workers", "0"], "'0' is not a whole number of at least 1"),
        (["prepare", "--input", "x", "--output", "y", "--validation", "2"], "'2' is not a number from 0 to 0.5"),
        (["prepare", "--input", "/no/such", "--output", "y"], "there is no file or directory /no/such"),
        (["verify", "/no/such"], "holds no prepared shards"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2 and said in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_exit_code_75_and_it_goes_on(how: signal.Signals, tmp_path: Path) -> None:
    big, out = tmp_path / "big.jsonl", tmp_path / "out"
    big.write_text("".join(f'{{"text": "{i}{"." * 180}"}}\n' for i in range(42_000)))  # two units of 4 MiB
    command = [
        sys.executable,
        "-m",
        "meshtrain.data",
        "prepare",
        "--input",
        str(big),
        "--output",
        str(out),
        "--workers",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "2"], env=environment, stderr=subprocess.PIPE, text=True)
    while not (out / "plan.json").exists() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0.1)
    process.send_signal(how)
    assert process.communicate(timeout=60)[1].endswith("meshtrain: stopped; run the same command again to go on.\n")
    assert process.returncode == 75 and not (out / "manifest.json").exists()
    assert not list(out.glob(".*.tokens.*"))
    assert main([*command[3:], "1"]) == 0
    manifest = read_manifest(out)
    assert manifest.count("train", "documents") + manifest.count("validation", "documents") == 42_000
