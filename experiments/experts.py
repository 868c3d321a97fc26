"""What balance does to the load of experts on a skewed corpus, and what a mixture's step takes beside a dense one's of as many active parameters.

python -m experiments.experts balance
python -m experiments.experts speed
python -m experiments.experts bytes     what crosses expert and tensor for the experts of a layer, in the compiled program
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
    """Steps of all kinds in turns, so that they see the same of what else the machine does; and the processor time of each, which other work
    hardly changes."""
    width, kinds, seconds = 256, {}, dict[str, list[tuple[float, float]]]()
    capacity = ["parallel.experts.capacity=1.5", "parallel.experts.dispatch=all_to_all"]
    for name, moe, mesh, words in (
        ("dense", {}, {"data": 4, "pipeline": 2}, []),
        ("experts, each rank all", EXPERTS, {"data": 4, "pipeline": 2}, []),
        ("over 4 ranks, dropless", EXPERTS, MESH, []),
        ("over 4, capacity 1.5", EXPERTS, MESH, capacity),
    ):
        sizes = {"d_model": 256} | ({} if moe else {"d_ff": 2 * width})
        config = mt.load(configuration(moe and moe | {"d_ff": width}, mesh, length=256, **sizes), words)
        program = mt.Program(config)
        kinds[name] = program, program.init(), program.place(batch(np.random.default_rng(0), config))
        seconds[name] = []
    for turn in range(rounds + 2):
        for name, (program, state, placed) in kinds.items():
            began = time.perf_counter(), time.process_time()
            state, _ = jax.block_until_ready(program.train_step(state, placed))
            kinds[name] = program, state, placed
            if turn >= 2:
                seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    of_kind = {
        name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in seconds.items()
    }
    for name, (wall, processor) in of_kind.items():
        dense = of_kind["dense"]
        print(
            f"{name:24} {wall:.3f} s a step, {wall / dense[0]:.2f} x dense; processor {processor:.3f} s, {processor / dense[1]:.2f} x"
        )


def crossing(tokens: int = 1024) -> None:
    """With sequence parallelism, of layers whose experts lie over expert alone and over tensor too: 12 experts do not divide by 8 ranks, 16 do."""
    print(
        f"{tokens} tokens of {64} numbers on a data rank, expert 4, tensor 2: kB that a device sends in a layer and step"
    )
    print(f"{'dispatch':12}{'experts over':16}{'tensor':>8}{'expert':>8}{'together':>10}")
    for dispatch, capacity, experts in (("all_gather", None, 16), ("all_to_all", 1.25, 12), ("all_to_all", 1.25, 16)):
        model = {
            "layers": 2,
            "d_model": 64,
            "heads": 4,
            "vocab_size": 256,
            "moe": {"experts": experts, "top_k": 4, "d_ff": 64},
        }
        parallel = {
            "sequence_parallel": True,
            "zero_stage": 0,
            "microbatches": 1,
            "experts": {"dispatch": dispatch, "capacity": capacity},
        }
        mesh = {"data": 4, "expert": 4, "tensor": 2}
        train = {"global_batch_size": 16, "sequence_length": tokens // 4}
        program = mt.Program(mt.load({"model": model, "mesh": mesh, "parallel": parallel, "train": train}))
        over, sent = (
            program.local.forward.collectives.expert_axes,
            dict.fromkeys(("tensor", "expert", "expert+tensor"), 0.0),
        )
        for c in program.collectives():
            # of a layer, and not the sums of gradients after all of them
            if c.axis in sent and "layer" in c.source and c.kind != "all-reduce":
                sent[c.axis] += c.sent * c.times / 2e3
        rows = sent["expert"] + sent["expert+tensor"]
        print(
            f"{dispatch:12}{' x '.join(over):16}{sent['tensor']:8.0f}{rows:8.0f}{sent['tensor'] + rows:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["balance", "speed", "bytes"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    mt.fake_devices(8)
    {"balance": lambda: balance(arguments.steps), "speed": lambda: speed(arguments.rounds), "bytes": crossing}[
        arguments.what
    ]()
