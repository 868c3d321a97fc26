"""Runs of a small model for tests of engines: their settings, and what they have written."""

import json
from pathlib import Path

# The quickstart, smaller: what is tried is who starts what again.
SMALL = (
    "model.layers=2",
    "model.d_model=32",
    "model.d_ff=64",
    "mesh.data=2",
    "mesh.tensor=1",
    "mesh.pipeline=1",
    "train.global_batch_size=4",
    "train.sequence_length=32",
    "parallel.microbatches=1",
    "parallel.schedule=auto",
    "eval.every=0",
    "run.fake_devices=0",
    "survive.node_timeout=8",
    "checkpoint.every=20",
)


def overrides(run: Path, steps: int, **settings: object) -> list[str]:
    """Returns words of a command for the run in a directory."""
    own = {"run.directory": run, "train.steps": steps} | settings
    return [
        word
        for each in (*SMALL, *(f"{key}={value}" for key, value in own.items()))
        for word in ("--set", each)
    ]


def rows(run: Path) -> list[dict]:
    """Returns the rows of training steps."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [
        row
        for row in (json.loads(line) for line in lines if line.endswith("\n"))
        if "loss" in row
    ]


def step(run: Path) -> int:
    """Returns the newest step."""
    return max((row["step"] for row in rows(run)), default=0)


def losses(run: Path) -> list[float]:
    """Returns the losses; AssertionError unless every step is there once, in order."""
    assert [row["step"] for row in rows(run)] == list(range(1, step(run) + 1))
    return [row["loss"] for row in rows(run)]
