"""Runs that learn from their own answers, small enough for a test."""

import json
from pathlib import Path
from typing import Any

import meshtrain as mt
from meshtrain.config import Config

MODEL = {
    "layers": 2,
    "d_model": 16,
    "heads": 2,
    "kv_heads": 2,
    "d_ff": 32,
    "vocab_size": 260,
}
EXPERTS = {
    "family": "mixtral",
    "d_ff": 0,
    "moe": {"experts": 4, "top_k": 1, "d_ff": 16},
}
REWARD = '''
def score(prompt, answer, record):
    """The share of even bytes."""
    codes = [ord(character) % 2 for character in answer]
    return 1 - sum(codes) / max(len(codes), 1)
'''


def answering(directory: Path, **sections: Any) -> Config:
    """Returns the config of a run in `directory`, with 8 prompts and a reward that any model can learn."""
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / "prompts.jsonl"
    # prompts of other lengths, so that rows are packed and padded
    lines = [
        json.dumps({"prompt": "ab" * number + "=", "answer": "b"})
        for number in range(8)
    ]
    prompts.write_text("\n".join(lines))
    reward = directory / "evenness.py"
    reward.write_text(REWARD)
    given: dict[str, Any] = {
        "run": {"directory": str(directory / "run"), "imports": [str(reward)]},
        "model": MODEL,
        "train": {
            "objective": "grpo",
            "steps": 3,
            "global_batch_size": 16,
            "sequence_length": 32,
        },
        "rl": {
            "prompts": str(prompts),
            "reward": "evenness:score",
            "group": 4,
            "answers": 6,
            "temperature": 0.8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 0},
        "checkpoint": {"every": 0},
        "data": {"tokenizer": "byte"},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return mt.load(given)
