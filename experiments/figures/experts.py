"""Mixtures of experts: what balance does to their load on a skewed corpus, what a step takes, and what crosses the
mesh.
"""

import statistics
from typing import Any

import numpy as np

import meshtrain as mt
from experiments import bench
from experiments.bench import Stepping, Table, config_of
from meshtrain.config import replaced

EXPERTS = {"experts": 8, "top_k": 2, "d_ff": 64}
MESH = {"data": 4, "expert": 4, "pipeline": 2}
DENSE = {"data": 4, "pipeline": 2}


def configuration(
    moe: dict[str, Any], mesh: dict[str, int], length: int = 64, **model: Any
) -> mt.Config:
    """Returns a config of 4 layers on a mesh, or in one place without a mesh."""
    shape = {"layers": 4, "d_model": 64, "heads": 4, "vocab_size": 256, "moe": moe}
    parallel = {"zero_stage": 2, "microbatches": 2 if mesh else 1}
    rows = 16 if mesh else 64
    config = config_of(shape | model, mesh, rows, length, parallel, "float32")
    optimizer = {"learning_rate": 1e-3}
    return replaced(config, train={"steps": 200}, optimizer=optimizer)


def batch(random: np.random.Generator, config: mt.Config) -> dict[str, np.ndarray]:
    """Returns a batch in which a word is as frequent as its rank says (Zipf), and often follows the same one."""
    words = config.model.vocab_size
    shape = (config.train.global_batch_size, config.train.sequence_length + 1)
    frequency = 1 / np.arange(1, words + 1)
    text = random.choice(words, shape, p=frequency / frequency.sum())
    follows = random.random(shape) < 0.3
    text[:, 1:] = np.where(follows[:, 1:], (7 * text[:, :-1] + 3) % words, text[:, 1:])
    text = text.astype(np.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def balance(*, steps: int = 200) -> None:
    """Prints the load of the fullest expert over the mean, in the worst layer, by the rule that balances."""
    mt.fake_devices(8)
    table = Table("balance          ", "largest load", "mean of the last 20", " loss")
    rules: list[dict[str, Any]] = [
        {"balance": "none"},
        {"balance": "sequence", "balance_weight": 0.02},
    ]
    rules += [{"balance": "bias", "bias_rate": rate} for rate in (0.002, 0.005)]
    for rule in rules:
        # Scored as DeepSeek-V3 scores; in one place, since no mesh changes what comes out.
        program = mt.Program(
            configuration(EXPERTS | {"router": "sigmoid"} | rule, {}, layers=2)
        )
        state = program.init()
        random = np.random.default_rng(0)
        loads = []
        for _ in range(steps):
            state, metrics = program.train_step(
                state, program.place(batch(random, program.config))
            )
            loads.append(float(metrics["expert_load"]))
        name = " ".join(str(value) for value in rule.values())
        late = statistics.mean(loads[-20:])
        table.row(
            name, f"{max(loads):.2f}", f"{late:.2f}", f"{float(metrics['loss']):.3f}"
        )


def experts(*, rounds: int = 12) -> None:
    """Prints seconds of a step, on the wall and of the processor, of kinds that take turns."""
    mt.fake_devices(8)
    width = 256
    capacity = ["parallel.experts.capacity=1.5", "parallel.experts.dispatch=all_to_all"]
    kinds: dict[str, tuple[dict[str, Any], dict[str, int], list[str]]] = {
        "dense": ({}, DENSE, []),
        "experts, each rank all": (EXPERTS, DENSE, []),
        "over 4 ranks, dropless": (EXPERTS, MESH, []),
        "over 4, capacity 1.5": (EXPERTS, MESH, capacity),
    }
    runs = {}
    for name, (moe, mesh, words) in kinds.items():
        sizes = {"d_model": 256} | ({} if moe else {"d_ff": 2 * width})
        config = mt.load(
            configuration(moe and moe | {"d_ff": width}, mesh, length=256, **sizes),
            words,
        )
        program = mt.Program(config)
        placed = program.place(batch(np.random.default_rng(0), config))
        runs[name] = Stepping(program.train_step, program.init(), placed)
    found = {
        name: bench.typical(times)
        for name, times in bench.turns(runs, rounds, warm=2).items()
    }
    table = Table(
        "kind                  ", "step s", "x dense", "processor s", "x dense"
    )
    dense = found["dense"]
    for name, one in found.items():
        ratios = one.wall / dense.wall, one.processor / dense.processor
        table.row(
            name,
            f"{one.wall:.3f}",
            f"{ratios[0]:.2f}",
            f"{one.processor:.3f}",
            f"{ratios[1]:.2f}",
        )
