"""What balance does to the load of experts on a skewed corpus, and what a mixture's step takes beside a dense one's of as many active parameters.

python -m experiments.experts balance
python -m experiments.experts speed
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

import meshtrain as mt

EXPERTS = {"experts": 8, "top_k": 2, "d_ff": 64}
MESH = {"data": 4, "expert": 4, "pipeline": 2}


def configuration(moe: dict[str, Any], mesh: dict[str, int], length: int = 64, **model: Any) -> mt.Config:
    return mt.load(
        {
            "model": {"layers": 4, "d_model": 64, "heads": 4, "vocab_size": 256, "moe": moe} | model,
            "mesh": mesh, "parallel": {"zero_stage": 2, "microbatches": 2 if mesh else 1},
            "train": {"steps": 200, "global_batch_size": 64 if not mesh else 16, "sequence_length": length},
            "optimizer": {"learning_rate": 1e-3},
        }
    )  # fmt: skip


def batch(random: np.random.Generator, config: mt.Config) -> dict[str, np.ndarray]:
    """A batch of a corpus in which a word is as frequent as its rank says (Zipf), and often follows the same one."""
    shape, words = (config.train.global_batch_size, config.train.sequence_length + 1), config.model.vocab_size
    frequency = 1 / np.arange(1, words + 1)
    text = random.choice(words, shape, p=frequency / frequency.sum())
    follows = random.random(shape) < 0.3
    text[:, 1:] = np.where(follows[:, 1:], (7 * text[:, :-1] + 3) % words, text[:, 1:])
    text = text.astype(np.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def balance(steps: int) -> None:
    print("balance            largest load   mean of the last 20   loss")
    rules: list[dict[str, Any]] = [{"balance": "none"}, {"balance": "sequence", "balance_weight": 0.02}]
    rules += [{"balance": "bias", "bias_rate": rate} for rate in (0.002, 0.005)]
    for rule in rules:
        # as DeepSeek-V3 scores; in one place, since no mesh changes what comes out
        program = mt.Program(configuration(EXPERTS | {"router": "sigmoid"} | rule, {}, layers=2))
        state, random = program.init(), np.random.default_rng(0)
        rows = []
        for _ in range(steps):
            state, metrics = program.train_step(state, program.place(batch(random, program.config)))
            rows.append({name: float(value) for name, value in metrics.items()})
        loads = [row["expert_load"] for row in rows]
        early, late = max(loads), statistics.mean(loads[-20:])
        name = " ".join(str(value) for value in rule.values())
        print(f"{name:18} {early:12.2f} {late:21.2f} {rows[-1]['loss']:6.3f}", flush=True)


def speed(rounds: int) -> None:
    """Steps of the two in turns, so that both see what else the machine does."""
    width, kinds = 256, {}
    for name, moe, d_ff in (("dense", {}, 2 * width), ("experts", EXPERTS | {"d_ff": width}, None)):
        mesh = MESH if moe else {"data": 4, "pipeline": 2}
        config = configuration(moe, mesh, length=256, d_model=256, **({"d_ff": d_ff} if d_ff else {}))
        program = mt.Program(config)
        kinds[name] = program, program.init(), program.place(batch(np.random.default_rng(0), config))
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 2):
        for name, (program, state, placed) in kinds.items():
            began = time.perf_counter()
            state, _ = jax.block_until_ready(program.train_step(state, placed))
            kinds[name] = program, state, placed
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    for name, value in middle.items():
        print(f"{name:8} {value:.3f} s a step")
    print(f"ratio    {middle['experts'] / middle['dense']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["balance", "speed"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    mt.fake_devices(8)
    balance(arguments.steps) if arguments.what == "balance" else speed(arguments.rounds)
