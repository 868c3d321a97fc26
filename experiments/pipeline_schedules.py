"""Schedules compared by simulation: time, idle time, memory; and what spreading the vocabulary over the stages gains.

    python experiments/pipeline_schedules.py [--stages 8] [--microbatches 32] [--chunks 4]

The unit of time is the forward of one microbatch through a whole stage; I and W take as long each.
"""

import argparse
import time

from meshtrain.schedule.buffers import allocate
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.phases import phases
from meshtrain.schedule.simulation import Durations, simulate


def compare(stages: int, microbatches: int, chunks: int, message: float) -> None:
    print(f"{stages} stages, {microbatches} microbatches, F = I = W = 1, a message takes {message}")
    print(
        f"{'schedule':16}{'chunks':>7}{'clocks':>7}{'bodies':>8}{'lockstep':>10}{'idle':>7}{'alone':>9}{'idle':>7}{'stages held':>13}"
    )
    for schedule in SCHEDULES:
        v = legal_chunks(schedule) or chunks
        table = make_table(schedule, stages, microbatches, v)
        durations = Durations(1 / v, 1 / v, 1 / v, message=message)
        lockstep, alone = simulate(table, durations, "lockstep"), simulate(table, durations, "asynchronous")
        print(
            f"{schedule:16}{v:7}{table.clocks:7}{sum(len(phase.body) for phase in phases(table)):8}"
            f"{lockstep.makespan:10.2f}{lockstep.bubble_fraction:7.1%}{alone.makespan:9.2f}{alone.bubble_fraction:7.1%}"
            f"{lockstep.peak_in_flight.max() / v:13.2f}"
        )
    print()


def vocabulary(stages: int, microbatches: int, chunks: int) -> None:
    """Llama-3 8B at 8,192 tokens: 32 layers, width 4,096, 128,256 tokens. Ops in floating-point operations."""
    layers, width, vocabulary, tokens = 32, 4096, 128256, 8192
    weights = width * (2 * width + 2 * 1024 + 3 * 14336)  # of a layer: attention with 8 key-value heads, feed-forward
    attention = 2 * tokens * width  # per token and layer, causal: scores and their use
    matmul = 2 * weights
    share = layers / stages
    head = 3 * 2 * width * vocabulary
    print(
        f"Llama-3 8B, {stages} stages, {microbatches} microbatches: the head is {head / (3 * (matmul + attention)):.1f} layers"
    )
    print(f"{'schedule':16}{'vocabulary':>12}{'lockstep':>10}{'idle':>7}{'alone':>9}{'idle':>7}")
    for schedule in SCHEDULES:
        v = legal_chunks(schedule) or chunks
        table = make_table(schedule, stages, microbatches, v)
        base = None
        for spread in (False, True):
            chunk = share / v
            durations = Durations(
                chunk * (matmul + attention),
                chunk * (matmul + 2 * attention),
                chunk * matmul,
                head=head,
                head_spread=spread,
            )
            lockstep, alone = simulate(table, durations, "lockstep"), simulate(table, durations, "asynchronous")
            base = base or (lockstep.makespan, alone.makespan)
            print(
                f"{schedule:16}{'spread' if spread else 'edge':>12}{lockstep.makespan / base[0]:10.3f}"
                f"{lockstep.bubble_fraction:7.1%}{alone.makespan / base[1]:9.3f}{alone.bubble_fraction:7.1%}"
            )
    print()


def cost(stages: int, microbatches: int, chunks: int) -> None:
    start = time.perf_counter()
    table = make_table("zb_interleaved", stages, microbatches, chunks)
    made = time.perf_counter()
    allocate(table)
    allocated = time.perf_counter()
    simulate(table, Durations(), "lockstep")
    lockstep = time.perf_counter()
    simulate(table, Durations(), "asynchronous")
    alone = time.perf_counter()
    spent = (made - start, allocated - made, lockstep - allocated, alone - lockstep)
    words = ("table", "buffers", "lockstep", "asynchronous")
    figures = ", ".join(f"{word} {1e3 * seconds:.1f} ms" for word, seconds in zip(words, spent, strict=True))
    print(f"zb_interleaved, {stages} stages, {microbatches} microbatches, {chunks} chunks: {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--message", type=float, default=0.0)
    arguments = parser.parse_args()
    compare(arguments.stages, arguments.microbatches, arguments.chunks, arguments.message)
    vocabulary(4, 16, 2)
    cost(16, 256, 4)


if __name__ == "__main__":
    main()
