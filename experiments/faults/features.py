"""Features that meet: a resume under another precision, exchanges of islands, padding, evaluation, replicas; and data
that change under a run.
"""

import json
import os
import random
import re
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

from experiments.faults.bases import folder, text
from experiments.faults.harness import (
    STEPS,
    Place,
    Silent,
    Unclear,
    done,
    failed,
    fault,
    kind,
    last_line,
    refused,
    resumed,
    told_or_done,
)

ROOM = "features"
LLAMA = (
    "model.family=llama",
    "model.heads=4",
    "model.kv_heads=1",
    "model.d_ff=24",
    "model.vocab_size=257",
    "checkpoint.every=4",
)

# --- another precision at a resume

kind("precision-changed")


def precision(old: str, new: str, *settings: str) -> None:
    @fault(ROOM, f"{old} goes on as {new}{', ' if settings else ''}{', '.join(settings)}")
    def _(p: Place) -> None:
        done(p.train(f"precision.compute={old}", "train.steps=4", *settings))
        ended = p.train(f"precision.compute={new}", *settings)
        done(ended, "precision.compute")
        resumed(ended, 4)
        if [row["step"] for row in p.rows()] != list(range(1, STEPS + 1)) or any(
            row["loss"] is None for row in p.rows()
        ):
            raise Silent("not each step once with a loss")


ZERO = ("mesh.data=2", "parallel.zero_stage=3")
for old, new in (("float32", "float16"), ("bfloat16", "float16"), ("float16", "float32")):
    precision(old, new)
precision("float32", "float16", "mesh.data=2")
precision("bfloat16", "float16", *ZERO)
precision("float16", "bfloat16", *ZERO)

# --- islands

kind("islands-compressed")


def same_bits(p: Place, *settings: str) -> None:
    """A run that is stopped halfway and goes on has the rows of one that is not, bit for bit."""
    done(p.train(*settings, "run.directory=whole"))
    done(p.train(*settings, "train.steps=4"))
    ended = p.train(*settings)
    done(ended)
    resumed(ended, 4)
    whole = [json.loads(line) for line in (p.dir / "whole/metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "grad_norm", "sync_drift"):
        found, expected = ([row.get(key) for row in rows] for rows in (p.rows(), whole))
        if found != expected:
            step = (
                next(k for k, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b) + 1
            )
            raise Silent(
                f"{key} differs from step {step} on: {found[step - 1]}, {expected[step - 1]}"
            )


def islands(name: str, *settings: str) -> None:
    @fault(ROOM, f"islands, compressed, weights whole on several ranks: {name}")
    def _(p: Place) -> None:
        same_bits(
            p,
            "optimizer.schedule=constant",
            "mesh.data=2",
            "mesh.islands=2",
            "parallel.sync.every=2",
            "parallel.reduce.over=islands",
            *settings,
        )


for compression in ("int8", "float8", "int4"):
    islands(
        f"{compression}, llama, tensor",
        f"parallel.reduce.compression={compression}",
        "mesh.tensor=2",
        *LLAMA,
    )
islands(
    "int8, gpt2, pipeline",
    "parallel.reduce.compression=int8",
    "mesh.pipeline=2",
    "checkpoint.every=4",
)

kind("islands-padded")


@fault(ROOM, "an island that has padding alone: the loss is that of the batch")
def padded(p: Place) -> None:
    common = ("train.uneven_batch=pad", "train.steps=2")
    done(p.train(*common, "run.directory=plain"))
    expected = json.loads((p.dir / "plain/metrics.jsonl").read_text().splitlines()[0])["loss"]
    ended = p.train(*common, "mesh.data=3", "mesh.islands=3", "parallel.sync.every=2")
    if told_or_done(ended, "island"):
        found = p.rows()[0]["loss"]
        if abs(found - expected) > 1e-4 * expected:
            raise Silent(f"loss {found}, where the batch's is {expected}")


# --- evaluation

kind("held-out-small")


def held_out(batches: int) -> None:
    @fault(ROOM, f"{batches} batches are to be evaluated, and fewer are held out")
    def _(p: Place) -> None:
        for k in range(16):
            p.file(f"text/{k:02d}.txt", text(k))
        p.config(data={"source": "text", "validation": 0.2}, eval={"every": 4, "batches": batches})
        ended = p.train()
        done(ended)
        loss = [row["eval_loss"] for row in p.rows() if row.get("eval_loss") is not None]
        whole = p.command("evaluate.__main__", "run")
        done(whole)
        told = re.search(r"([\d,]+) (?:held-out )?tokens", whole.out)
        if not told or not loss:
            raise Unclear(f"it does not say of how many tokens: {last_line(whole.out)}")
        if "fewer" not in ended.said + whole.said and "eval.batches" not in ended.said + whole.said:
            raise Silent("it does not say that there are fewer")


held_out(1000)
held_out(100)

# --- replicas

kind("replica-flipped", "test_train.py::test_copies_that_differ_end_a_run_before_they_are_saved")


@fault(ROOM, "a bit of one replica flips in plain training: named at the next checkpoint")
def flipped(p: Place) -> None:
    def before() -> None:
        from meshtrain.survive import injector, supervision

        real = supervision.Supervision.at

        def at(
            self: Any, moment: Any, taken: int | None = None, inputs_of_step: Any = (None, None)
        ) -> Any:
            if moment == "dispatch" and taken == 3:
                inputs_of_step = injector._flip(None, inputs_of_step)  # type: ignore[arg-type]
            return real(self, moment, taken, inputs_of_step)

        supervision.Supervision.at = at  # type: ignore[method-assign, assignment]

    ended = p.train("mesh.data=2", "parallel.zero_stage=0", "checkpoint.every=2", before=before)
    failed(ended, silent="it trains on with replicas that differ")
    p.intact(2)


# --- adapters that come later

kind("resume-advice")


@fault(ROOM, "lora.rank at a resume: what is advised can be done, or nothing is")
def rank(p: Place) -> None:
    p.base()
    ended = p.train("lora.rank=4")
    refused(ended, "lora")
    if "lora.rank]" in ended.err:
        refused_again = p.train("lora.rank=4", "checkpoint.allow=[lora.rank]")
        if refused_again.code:
            raise Unclear(f"the advice cannot be followed: {last_line(refused_again.err)}")


# --- shards that change under a run

kind(
    "shard-while-running",
    "data/test_shards.py::test_a_shard_overwritten_in_place_while_it_is_read_ends_the_next_read",
    "data/test_shards.py::test_a_shard_cut_short_while_it_is_read_is_an_error",
    "data/test_shards.py::test_a_shard_whose_content_is_as_prepared_is_read_on_whatever_its_inode_says",
)


def in_place(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def under(name: str, act: Callable[[Path], object], goes_on: bool = False) -> None:
    """Its batches are those of the start, or it ends with a sentence that names the file; never others without a
    word.
    """

    @fault(ROOM, f"the tokens of a shard, while running, are {name}")
    def _(p: Place) -> None:
        folder(p, files=64)
        done(
            p.command(
                "data.__main__",
                "prepare",
                "--input",
                "text",
                "--output",
                "shards",
                "--workers",
                "1",
            )
        )
        settings = (
            "data.source=shards",
            "train.steps=200",
            "checkpoint.every=0",
            "optimizer.schedule=constant",
        )
        tokens = (p.dir / "shards/train-00000.tokens").read_bytes()
        running = p.training(*settings)
        running.until(lambda: p.last_step() >= 20)
        with running.frozen():
            act(max((p.dir / "shards").glob("train-*.tokens"), key=lambda f: f.stat().st_size))
        ended = running.end().checked()
        if ended.code == 0:
            unaltered = p.dir / "shards/train-00000.tokens"
            unaltered.write_bytes(tokens)
            done(p.train(*settings, "run.directory=whole"))
            expected = [
                json.loads(line)["loss"]
                for line in (p.dir / "whole/metrics.jsonl").read_text().splitlines()
            ]
            if differ := [
                row["step"] for row in p.rows() if row["loss"] != expected[row["step"] - 1]
            ]:
                raise Silent(
                    f"{len(differ)} of {len(expected)} losses differ from step {differ[0]} on"
                )
        if goes_on:
            done(ended)
        elif ended.code and (
            any(not line.startswith("meshtrain: ") for line in ended.sentences)
            or "train-00000.tokens" not in ended.err
        ):
            raise Unclear(last_line(ended.err))


under("overwritten with zeros", lambda path: in_place(path, bytes(path.stat().st_size)))
under(
    "overwritten with others",
    lambda path: in_place(path, random.Random(0).randbytes(path.stat().st_size // 2)),
)
under("overwritten in the last half", lambda path: in_place_from(path, path.stat().st_size // 2))
under("truncated", lambda path: os.truncate(path, 0))
under("removed", lambda path: path.unlink(), goes_on=True)
under("replaced by another file", lambda path: os.replace(copied(path), path), goes_on=True)


def in_place_from(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(path.stat().st_size - at))


def copied(path: Path) -> Path:
    copy = path.with_name("copy")
    copy.write_bytes(bytes(path.stat().st_size))
    return copy


# --- every two of them, together

kind("features-crossed")
FACTORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "mesh": (
        ("mesh.data=2",),
        ("mesh.tensor=2",),
        ("mesh.pipeline=2",),
        ("mesh.data=2", "mesh.tensor=2"),
    ),
    "zero": (("parallel.zero_stage=0",), ("parallel.zero_stage=1",), ("parallel.zero_stage=3",)),
    "compression": (
        (),
        ("parallel.reduce.compression=int8",),
        ("parallel.reduce.compression=powersgd",),
        ("parallel.reduce.compression=topk",),
    ),
    "islands": (
        (),
        ("mesh.data=2", "mesh.islands=2", "parallel.sync.every=3", "parallel.reduce.over=islands"),
    ),
    "precision": ((), ("precision.compute=bfloat16",), ("precision.compute=float16",)),
    "optimizer": (
        (),
        ("optimizer.name=muon",),
        ("optimizer.name=adafactor",),
        ("optimizer.name=sgd",),
    ),
    "model": ((), LLAMA[:-1], ("model.dropout=0.1",)),
    "batch": (
        (),
        ("parallel.microbatches=2",),
        ("train.uneven_batch=pad", "train.global_batch_size=5"),
    ),
    "memory": ((), ("parallel.remat=full",), ("parallel.offload_optimizer=true",)),
    "tuned": ((), ("lora.rank=2",)),
}


def crossed() -> list[tuple[int, ...]]:
    """Cells in which every two levels of every two factors meet."""
    levels = [range(len(level)) for level in FACTORS.values()]
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(levels)), 2)
        for a, b in product(levels[i], levels[j])
    }
    draw, chosen = random.Random(0), list[tuple[int, ...]]()
    while missing:
        tries = [tuple(draw.choice(level) for level in levels) for _ in range(300)]
        met = [
            {(i, c[i], j, c[j]) for i, j in combinations(range(len(c)), 2)} & missing for c in tries
        ]
        best = max(range(len(tries)), key=lambda k: len(met[k]))
        missing -= met[best]
        if met[best]:
            chosen.append(tries[best])
    return chosen


for cell in crossed():
    settings = tuple(
        word for level, at in zip(FACTORS.values(), cell, strict=True) for word in level[at]
    )

    @fault(ROOM, f"crossed: {' '.join(s.rpartition('.')[2] for s in settings)}", long=True)
    def _(p: Place, settings: tuple[str, ...] = settings) -> None:
        """It runs, and goes on with the same bits; or it is refused in one sentence."""
        first = p.train(
            "optimizer.schedule=constant", *settings, "train.steps=1", "run.directory=first"
        )
        if first.code:
            refused(first)
            return
        same_bits(p, "optimizer.schedule=constant", "checkpoint.every=4", *settings)
