"""Features that meet: a resume under another precision, exchanges of islands, padding, evaluation, replicas; and data
that change under a run.
"""

import json
import random
import re
from itertools import combinations, product

from experiments.faults.bases import folder
from experiments.faults.harness import (
    STEPS,
    Place,
    Silent,
    Unclear,
    done,
    fault,
    kind,
    last_line,
    refused,
    resumed,
    told_or_done,
)

LLAMA = [
    "model.family=llama",
    "model.heads=4",
    "model.kv_heads=1",
    "model.d_ff=24",
    "model.vocab_size=257",
    "checkpoint.every=4",
]

# --- another precision at a resume

kind("precision-changed")


def precision(old: str, new: str, *settings: str) -> None:
    @fault(f"{old} goes on as {new}{', ' if settings else ''}{', '.join(settings)}")
    def _(p: Place) -> None:
        done(p.train(f"precision.compute={old}", "train.steps=4", *settings))
        ended = p.train(f"precision.compute={new}", *settings)
        done(ended, "precision.compute")
        resumed(ended, 4)
        steps = [row["step"] for row in p.rows() if row["loss"] is not None]
        if steps != list(range(1, STEPS + 1)):
            raise Silent("not each step once with a loss")


ZERO = ("mesh.data=2", "parallel.zero_stage=3")
for old, new in (
    ("float32", "float16"),
    ("bfloat16", "float16"),
    ("float16", "float32"),
):
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
    whole = [
        json.loads(line)
        for line in (p.dir / "whole/metrics.jsonl").read_text().splitlines()
    ]
    for key in ("loss", "grad_norm", "sync_drift"):
        found, expected = ([row.get(key) for row in rows] for rows in (p.rows(), whole))
        if found != expected:
            raise Silent(f"{key} differs: {found}, {expected}")


def islands(name: str, *settings: str) -> None:
    @fault(f"islands, compressed, weights whole on several ranks: {name}")
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
    by = f"parallel.reduce.compression={compression}"
    islands(f"{compression}, llama, tensor", by, "mesh.tensor=2", *LLAMA)
by = "parallel.reduce.compression=int8"
islands("int8, gpt2, pipeline", by, "mesh.pipeline=2", "checkpoint.every=4")

kind("islands-padded")


@fault("an island that has padding alone: the loss is that of the batch")
def padded(p: Place) -> None:
    common = ("train.uneven_batch=pad", "train.steps=2")
    done(p.train(*common, "run.directory=plain"))
    expected = json.loads((p.dir / "plain/metrics.jsonl").read_text().splitlines()[0])[
        "loss"
    ]
    ended = p.train(*common, "mesh.data=3", "mesh.islands=3", "parallel.sync.every=2")
    if told_or_done(ended, "island"):
        found = p.rows()[0]["loss"]
        if abs(found - expected) > 1e-4 * expected:
            raise Silent(f"loss {found}, where the batch's is {expected}")


# --- evaluation

kind("held-out-small")


def held_out(batches: int) -> None:
    @fault(f"{batches} batches are to be evaluated, and fewer are held out")
    def _(p: Place) -> None:
        folder(p)
        p.config(
            data={"source": "text", "validation": 0.2},
            eval={"every": 4, "batches": batches},
        )
        ended = p.train()
        done(ended)
        loss = [
            row["eval_loss"] for row in p.rows() if row.get("eval_loss") is not None
        ]
        whole = p.command("evaluate", "run")
        done(whole)
        told = re.search(r"([\d,]+) (?:held-out )?tokens", whole.out)
        if not told or not loss:
            raise Unclear(f"it does not say of how many tokens: {last_line(whole.out)}")
        if (
            "fewer" not in ended.said + whole.said
            and "eval.batches" not in ended.said + whole.said
        ):
            raise Silent("it does not say that there are fewer")


held_out(1000)
held_out(100)

# --- adapters that come later

kind("resume-advice")


@fault("lora.rank at a resume: what is advised can be done, or nothing is")
def rank(p: Place) -> None:
    p.base()
    ended = p.train("lora.rank=4")
    refused(ended, "lora")
    if "lora.rank]" in ended.err:
        refused_again = p.train("lora.rank=4", "checkpoint.allow=[lora.rank]")
        if refused_again.code:
            raise Unclear(
                f"the advice cannot be followed: {last_line(refused_again.err)}"
            )


# --- every two of them, together

kind("features-crossed")
FACTORS = {
    "mesh": (
        "mesh.data=2",
        "mesh.tensor=2",
        "mesh.pipeline=2",
        "mesh.data=2 mesh.tensor=2",
    ),
    "zero": tuple(f"parallel.zero_stage={stage}" for stage in (0, 1, 3)),
    "compression": (
        "",
        *(f"parallel.reduce.compression={c}" for c in ("int8", "powersgd", "topk")),
    ),
    "islands": (
        "",
        "mesh.data=2 mesh.islands=2 parallel.sync.every=3 parallel.reduce.over=islands",
    ),
    "precision": ("", "precision.compute=bfloat16", "precision.compute=float16"),
    "optimizer": (
        "",
        *(f"optimizer.name={name}" for name in ("muon", "adafactor", "sgd")),
    ),
    "model": ("", " ".join(LLAMA[:-1]), "model.dropout=0.1"),
    "batch": (
        "",
        "parallel.microbatches=2",
        "train.uneven_batch=pad train.global_batch_size=5",
    ),
    "memory": ("", "parallel.remat=full", "parallel.offload_optimizer=true"),
    "tuned": ("", "lora.rank=2"),
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
            {(i, c[i], j, c[j]) for i, j in combinations(range(len(c)), 2)} & missing
            for c in tries
        ]
        best = max(range(len(tries)), key=lambda k: len(met[k]))
        missing -= met[best]
        if met[best]:
            chosen.append(tries[best])
    return chosen


def runs_and_goes_on(settings: list[str]) -> None:
    """It runs, and goes on with the same bits; or it is refused in one sentence."""

    @fault(f"crossed: {' '.join(s.rpartition('.')[2] for s in settings)}", long=True)
    def _(p: Place) -> None:
        constant = ("optimizer.schedule=constant", *settings)
        first = p.train(*constant, "train.steps=1", "run.directory=first")
        if first.code:
            refused(first)
        else:
            same_bits(p, "checkpoint.every=4", *constant)


for cell in crossed():
    levels = (level[at] for level, at in zip(FACTORS.values(), cell, strict=True))
    runs_and_goes_on(" ".join(levels).split())
