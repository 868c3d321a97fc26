"""Where a step's time goes, from a trace: seconds by kind, what of the wall has one, whether every event names an
instruction, whether as many collectives ran as the program has, and what tracing itself costs.

    python -m experiments.watch.trace --config configs/quickstart.yaml [--set key=value]

Exit code 1 if less than 98% of the wall has a kind, an event names no instruction, or other collectives ran than the
program has.
"""

import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from jax.sharding import AbstractMesh

from meshtrain import xla
from meshtrain.cli import DONE, FAILED, Parser
from meshtrain.config import Config, load
from meshtrain.hlo import collectives
from meshtrain.report.diagnosis.tracing import steps_traced
from meshtrain.report.trace import MEANING, Attribution, Trace, attribute, read_trace
from meshtrain.schedule.generators import make_table

WANTED = 0.98


def main() -> int:
    parser = Parser(
        prog="python -m experiments.watch.trace",
        description="Where a step's time goes.",
    )
    parser.add_config()
    options = parser.parse_args()
    config = load(options.config, options.set)
    work = Path(tempfile.mkdtemp(prefix="traced-"))
    try:
        place = steps_traced(config, work)
        size = sum(file.stat().st_size for file in place.iterdir())
        began = time.perf_counter()
        trace = read_trace(place)
        read = time.perf_counter() - began
        found = attribute(trace)
        seconds = time.perf_counter() - began
    finally:
        shutil.rmtree(work)
    print(table(found))
    print(
        f"attributed {found.attributed:.2%} of {found.wall_seconds:.3f} s a step",
        end="; ",
    )
    print(f"{found.unjoined} of {found.events:,} events unjoined")
    print(
        f"read in {read:.2f} s and attributed in {seconds - read:.2f} s, from {size / 1e6:.1f} MB"
    )
    if found.untraced_seconds:
        ratio = found.wall_seconds / found.untraced_seconds
        print(
            f"traced over untraced: {ratio:.2f} ({found.untraced_seconds:.3f} s a step untraced)"
        )
    program = counted(trace, config)
    for key in sorted({*found.collectives, *program}):
        ran = f"{found.collectives[key]:g} a step and device, {program.get(key, 0):g} in the program"
        print(f"  {' over '.join(key)}: {ran}")
    same = found.collectives == {key: round(times, 6) for key, times in program.items()}
    for sentence in found.cannot_tell:
        print(sentence)
    return (
        DONE if found.attributed >= WANTED and not found.unjoined and same else FAILED
    )


def counted(trace: Trace, config: Config) -> dict[tuple[str, str], float]:
    """What the program has, by the share of the clocks in which a stage has work: right for tables of one chunk a
    stage.

    The first embedding and the last one's gradient, before and after all clocks, are among the clocks' already.
    """
    mesh = AbstractMesh(tuple(trace.facts.mesh.values()), tuple(trace.facts.mesh))
    parallel = config.parallel
    stages = config.mesh.pipeline
    busy = 1.0
    if stages > 1:
        schedule = make_table(
            parallel.schedule, stages, parallel.microbatches, parallel.virtual_stages
        )
        busy = schedule.microbatches * schedule.chunks / schedule.clocks
    found: dict[tuple[str, str], float] = defaultdict(float)
    for one in collectives(trace.module, mesh, lambda source: busy):
        if f"shard_map/{xla.EMBEDDING}/cond/" not in one.source:
            found[one.kind, one.axis] += one.times
    return found


def table(found: Attribution) -> str:
    """A row a kind, the largest first."""
    rows = []
    for kind, seconds in sorted(found.seconds.items(), key=lambda one: -one[1]):
        waits = found.waiting.get(kind, 0.0) / found.wall_seconds
        told = f"{waits:6.1%} waiting" if kind in found.waiting else ""
        rows.append(
            f"{kind:14} {found.share(kind):6.1%} {1e3 * seconds:9.1f} ms  {told:15}  {MEANING[kind]}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
