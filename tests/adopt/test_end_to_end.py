"""A model of transformers, imported, tuned on three axes through a kill, merged and exported: its text is ours, and so
is theirs.

Where torch and transformers are (extra parity; a stage of CI), transformers reads what was exported and says the same.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from golden import GOLDEN

import meshtrain as mt
from meshtrain.checkpoint.steps import committed_in
from meshtrain.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role[0] + ':' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz :?.0123456789"
STEPS = 120


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The golden Llama 3 with a tokenizer of letters and a chat template."""
    import shutil

    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    directory = Path(
        shutil.copytree(GOLDEN / "llama3", tmp_path_factory.mktemp("base") / "llama3")
    )
    words = ["<pad>", "<s>", "</s>", *LETTERS]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in words[:3]]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    told = {
        "chat_template": TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    return directory


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [
        ("colour of grass?", "green."),
        ("colour of sky?", "blue."),
        ("two and two?", "4."),
        ("name?", "mesh."),
    ]
    pairs = [
        ({"role": "user", "content": q}, {"role": "assistant", "content": a})
        for q, a in turns * 40
    ]
    path.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in pairs))
    return path


def environment() -> dict[str, str]:
    """In which a process finds what the one before it compiled."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)
    }


def run(module: str, *arguments: object) -> str:
    words = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def continued(logits, tokens: list[int], end: int, most: int = 12) -> list[int]:
    """The likeliest tokens after `tokens`, up to an end."""
    said: list[int] = []
    while len(said) < most and (not said or said[-1] != end):
        row = np.array([tokens + said + [0] * (48 - len(tokens) - len(said))], np.int32)
        said.append(int(np.argmax(logits(row)[0, len(tokens) + len(said) - 1])))
    return said


@pytest.mark.thorough
def test_import_lora_kill_resume_merge_export_and_the_same_text_everywhere(
    base, chats, tmp_path
):
    run("meshtrain.adopt", "import", base, tmp_path / "imported")
    keys = {
        "run.directory": tmp_path / "tuned", "run.fake_devices": 8, "model.weights": base, "lora.rank": 8, "lora.alpha": 32,
        "mesh.data": 2, "mesh.tensor": 2, "mesh.pipeline": 2, "parallel.microbatches": 2, "parallel.zero_stage": 2,
        "data.source": chats, "data.format": "chat", "data.tokenizer": base / "tokenizer.json", "data.validation": 0.1,
        "train.steps": STEPS, "train.global_batch_size": 8, "train.sequence_length": 48, "checkpoint.every": 20, "eval.every": 100,
        "eval.batches": 1, "optimizer.learning_rate": 0.03, "optimizer.weight_decay": 0.0,
    }  # fmt: skip
    (tmp_path / "empty.yaml").write_text("run: {}\n")
    command = [
        sys.executable,
        "-m",
        "meshtrain.train",
        "--config",
        str(tmp_path / "empty.yaml"),
    ]
    command += [
        part for name, value in keys.items() for part in ("--set", f"{name}={value}")
    ]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )
    deadline = time.monotonic() + 300
    while not any(
        20 <= step < STEPS for step in committed_in(tmp_path / "tuned" / "checkpoints")
    ):
        assert first.poll() is None and time.monotonic() < deadline, (
            first.stdout and first.stdout.read()
        )
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert second.returncode == 0, second.stderr
    assert "going on after step" in second.stdout + second.stderr
    rows = [
        json.loads(line)
        for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()
    ]
    # 0.56 is the least that the frozen head, whose logits are small, can come to
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and rows[-1][
        "loss"
    ] < 0.7 < 3 < rows[0]["loss"]

    run(
        "meshtrain.adopt",
        "merge",
        tmp_path / "tuned",
        tmp_path / "merged",
        "--dtype",
        "float32",
    )
    run(
        "meshtrain.adopt",
        "export",
        tmp_path / "imported",
        tmp_path / "again",
        "--dtype",
        "float32",
    )
    tokenizer = load_tokenizer(str(base / "tokenizer.json"))
    asked = [
        1,
        *tokenizer.encode(["u:colour of sky?"])[0],
        2,
        1,
        *tokenizer.encode(["a:"])[0],
    ]
    asked = [int(token) for token in asked]
    tuned, merged, untouched = (
        mt.read_model(tmp_path / name) for name in ("tuned", "merged", "again")
    )
    said = continued(tuned, asked, end=2)
    assert tokenizer.decode(np.array(said)).startswith("blue.")
    assert continued(merged, asked, end=2) == said != continued(untouched, asked, end=2)
    tokens = np.array([asked], np.int32)
    # by the norm: where a position's stream is nearly zero, its norm makes much of the last bits
    one, other = merged(tokens), tuned(tokens)
    assert np.linalg.norm(one - other) < 1e-4 * np.linalg.norm(other)
    theirs(tmp_path / "merged", asked, said)


def theirs(directory: Path, asked: list[int], said: list[int]) -> None:
    """transformers, where it is, says the same of the exported directory, and misses no key of it."""
    try:
        import torch
        import transformers
    except ImportError:
        return
    of_text = transformers.AutoModelForCausalLM
    model, told = of_text.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not (
        told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]
    )
    with torch.no_grad():
        ends = {"max_new_tokens": len(said), "eos_token_id": 2, "pad_token_id": 0}
        found = model.generate(torch.tensor([asked]), do_sample=False, **ends)
    assert found[0, len(asked) :].tolist() == said
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt = [{"role": "user", "content": "colour of sky?"}]
    assert (
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        == asked
    )
