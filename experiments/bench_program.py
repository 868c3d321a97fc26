"""What the compiled program of large layouts moves, sends and waits for, beside what it must: compiled for described H100s, never run.

    python experiments/bench_program.py                                  three layouts, one to two minutes each
    python experiments/bench_program.py 8b --set parallel.remat=full     one, with keys of its config changed
    python experiments/bench_program.py --json after.json --against before.json    kept, and beside what was kept before

Needs XLA's CUDA compiler (pip install 'meshtrain[compile]') and no GPU. Of each layout:

Outside the layers: bytes that a steady clock reads from memory and writes there outside the loops over layers, in GB (10^9). A clock is
steady where the program does a forward and a backward; with chunks only some of these have a loss head or an embedding, so the figure is
the mean over them. Each instruction of the clock counts what it reads and writes (`experiments.plan.work`).

Must: what no program could spare whose matrix products take operands from memory and leave results there, and which does in a clock only
what the table's row needs (the shares of the clocks with a head and with an embedding are the table's). With s the bytes of a microbatch's
residual stream on a device, g those of it gathered over tensor, L those of the device's share of its logits in float32, l in the compute
dtype, W and G those of the device's share of the vocabulary's weight in the compute dtype and in float32, r those of g in float32:

    forward's input          chosen from inbox or embedding                                          2s
    messages                 sent, received, put into their inboxes; activation and cotangent        2 (2s + 2s)
    embedding                rows, scattered over tensor, summed over the pipeline                   2g + (g + s) + 2s
    embedding's gradient     masked, summed, gathered; rows added to                                 2s + 2s + (s + g) + (g + 2r)
    head                     last output masked, summed, normalised, gathered                        2s + 2s + 2s + (s + g)
                             logits; their largest, their sum; their cotangent                       (g + W + L) + 2L + (L + l)
                             the input's cotangent, scattered, of the norm, summed, into the inbox   (l + W + g) + (g + s) + 3s + 2s + 2s
                             the weight's gradient, added to the sum so far                          g + l + 2G

Not in it, since the loops over layers can do them in passing: residuals written and read, weights of the chunk read, their gradients
added to the sum so far. The layers' loops are listed beside, by iteration: bytes, the part of them that computes nothing (fills and
copies), and FLOPs of matrix products, which are more than needed where XLA computes again what it would not keep.

Collectives: how many a steady clock has (the mean) and a step, and how many the table needs: what `meshtrain.plan.traffic` charges for
as many passes as the table has operations, none of them idle. Of messages the busiest stage's.

Under products: share of the bytes of messages whose start and done stand, in the order of issue, around matrix products of at least the
message's time; likewise of the gathers and scatters of sequence parallelism in the layers' loops. A product takes its FLOPs over 0.7 of
the peak, a message or a collective what the planner takes it for (`meshtrain.cluster`, h100).
"""

import argparse
import json
import math
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from experiments.plan.work import IssuedCollective, Moved, Work
from meshtrain.cluster.algorithms import ALL_GATHER, PERMUTE, REDUCE_SCATTER, best
from meshtrain.config import Config, load
from meshtrain.hlo import collectives
from meshtrain.hlo.module import Module, Operation, replica_groups
from meshtrain.mesh import PIPELINE, TENSOR, make_mesh
from meshtrain.plan import named, shapes
from meshtrain.plan.compiled import described_devices
from meshtrain.plan.gradient_traffic import Iterations
from meshtrain.plan.traffic import transfers
from meshtrain.schedule.table import B, F
from meshtrain.step import Program

LLAMA = {"family": "llama", "vocab_size": 128256, "kv_heads": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "8b": {
        "model": LLAMA | {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 14336},
        "mesh": {"tensor": 2, "pipeline": 4},
        "parallel": {"schedule": "1f1b", "microbatches": 16},
        "train": {"global_batch_size": 16},
    },
    "70b": {
        "model": LLAMA | {"layers": 80, "d_model": 8192, "heads": 64, "d_ff": 28672},
        "mesh": {"data": 16, "tensor": 8, "pipeline": 4},
        "parallel": {"schedule": "interleaved", "virtual_stages": 4, "microbatches": 16},
        "train": {"global_batch_size": 256},
    },
    # Llama 3's, section 3.3.2 of its paper; 126 layers fill 63 of 64 chunks of two
    "405b": {
        "model": LLAMA | {"layers": 126, "d_model": 16384, "heads": 128, "d_ff": 53248},
        "mesh": {"data": 128, "tensor": 8, "pipeline": 16},
        "parallel": {"schedule": "interleaved", "virtual_stages": 4, "microbatches": 16},
        "train": {"global_batch_size": 2048},
    },
}
TOKENS = 8192
REACHED = 0.7  # share of the peak that matrix products reach here
LARGEST = 5


def config_of(layout: str, changes: list[str]) -> Config:
    given = {**LAYOUTS[layout], "precision": {"compute": "bfloat16"}}
    given["parallel"] = {"sequence_parallel": True, "remat": "none"} | given["parallel"]
    given["train"] = {"sequence_length": TOKENS} | given["train"]
    return load(given, changes)


def measured(layout: str, changes: list[str], keep: Path | None) -> dict[str, Any]:
    """All figures of a layout; the program's text is taken from `keep` where it lies there."""
    config = config_of(layout, changes)
    mesh = make_mesh(config, described_devices("h100", config.mesh.devices))
    program = Program(config, mesh)
    assert program.local.executor is not None, "a layout has stages"
    text, facts = compiled(layout, program, keep)
    module = Module(text)
    work = Work(module)
    clocks = steady(module, work)
    turns = {body: math.prod(n or 1 for n in loops) for body, loops in clocks.items()}
    must = needed_bytes(program)
    outside = sum(work.total(body).bytes * n for body, n in turns.items()) / sum(turns.values())
    return {
        "outside": outside,
        "must": sum(must.values()),
        "ratio": outside / sum(must.values()),
        "musts": must,
        "largest": largest(work, turns),
        "loops": layer_loops(work, list(clocks)),
        "needs_flops": needed_flops(config),
        "collectives": sends(config, module, mesh, turns),
        "under_products": under_products(config, work),
        **facts,
    }


def compiled(layout: str, program: Program, keep: Path | None) -> tuple[str, dict[str, Any]]:
    """The text of the compiled step, and what the compiler says of it: bytes, and seconds on the wall and of the processor."""
    kept = keep / f"{layout}.hlo" if keep else None
    if kept and kept.exists():
        return kept.read_text(), json.loads(kept.with_suffix(".json").read_text())
    clocks = [(time.perf_counter(), time.process_time())]
    lowered = program.lower()
    clocks.append((time.perf_counter(), time.process_time()))
    executable = lowered.compile()
    clocks.append((time.perf_counter(), time.process_time()))
    memory, text = executable.memory_analysis(), executable.as_text()
    assert memory is not None and text is not None, "XLA's GPU compiler tells both"
    facts = {
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "lower_seconds": [b - a for a, b in zip(clocks[0], clocks[1], strict=True)],
        "compile_seconds": [b - a for a, b in zip(clocks[1], clocks[2], strict=True)],
    }
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
        kept.with_suffix(".json").write_text(json.dumps(facts))
    return text, facts


# --- the steady clock


def steady(module: Module, work: Work) -> dict[str, tuple[int | None, ...]]:
    """Bodies of the loops over clocks with a forward and a backward, with the turns of the loops around: they hold loops over layers,
    and send both activations and cotangents, which is to say up and down the pipeline."""
    found = {}
    for body, loops in module.bodies():
        ops = module.computations[body]
        ways = {_way(op) for op in ops if op.kind == "collective-permute"}
        if loops and len(ways) == 2 and any(op.opcode == "while" and work.flops(body, op) for op in ops):
            found[body] = loops
    if not found:
        raise SystemExit("No loop of the compiled program has a forward, a backward and loops over layers.")
    return found


def _way(op: Operation) -> bool:
    """Whether a message goes to a device with a larger number, as most of its pairs do: the pipeline's ends may be joined."""
    pairs = replica_groups(op.attributes, 0)
    return sum(1 if to > of else -1 for of, to in pairs) > 0


def needed_bytes(program: Program) -> dict[str, float]:
    """The bytes that a steady clock must move outside the layers' loops, by what they are for (see the module's docstring)."""
    config, executor = program.config, program.local.executor
    assert executor is not None
    size, tokens = shapes.itemsize(config.precision.compute), shapes.tokens(config)
    rows, width = shapes.resident(config).output.full // config.model.d_model, config.model.d_model
    s, g, r = shapes.stream(config) * size, tokens * width * size, tokens * width * 4
    logits, cotangent = tokens * rows * 4, tokens * rows * size
    weight, gradient = rows * width * size, rows * width * 4
    when, clocks = executor.table.when(), steady_clocks(executor.phases)
    share = lambda of: len(clocks & set(of.tolist())) / len(clocks)  # noqa: E731
    embeds, heads, leaves = share(when[F, 0]), share(when[F, -1]), share(when[B, 0])
    return {
        "forward's input": 2 * s,
        "messages": 2 * (2 * s + 2 * s),
        "embedding": embeds * (2 * g + (g + s) + 2 * s),
        "embedding's gradient": leaves * (2 * s + 2 * s + (s + g) + (g + 2 * r)),
        "head's input": heads * (2 * s + 2 * s + 2 * s + (s + g)),
        "logits and loss": heads * ((g + weight + logits) + 2 * logits + (logits + cotangent)),
        "head's cotangent": heads * ((cotangent + weight + g) + (g + s) + 3 * s + 2 * s + 2 * s),
        "head's gradient": heads * (g + cotangent + 2 * gradient),
    }


def steady_clocks(phases: list[Any]) -> set[int]:
    """The clocks in which the program does a forward and a backward."""
    found: set[int] = set()
    for phase in phases:
        clock = phase.first
        for _ in range(phase.repeats):
            for clocks, work in phase.body:
                found |= set(range(clock, clock + clocks)) if work.forward and work.backward else set()
                clock += clocks
    return found


def largest(work: Work, turns: dict[str, int]) -> list[dict[str, Any]]:
    """What moves most outside the layers' loops in the mean steady clock; instructions alike are taken together."""
    total: dict[str, float] = defaultdict(float)
    times: dict[str, float] = defaultdict(float)
    for body, n in turns.items():
        for op in work.module.computations[body]:
            if moved := work.moved(body, op).bytes:
                total[label(work, op)] += moved * n / sum(turns.values())
                times[label(work, op)] += n / sum(turns.values())
    most = sorted(total, key=lambda what: -total[what])[:LARGEST]
    return [{"what": what, "times": times[what], "bytes": total[what]} for what in most]


def label(work: Work, op: Operation) -> str:
    """What an instruction does, to what, and the line of Python that it came from."""
    does = re.sub(r"(\.remat\d*|\.clone|[._]?\d+)+$", "", op.name).removesuffix("_fusion").removeprefix("loop_")
    array = re.search(r"\w+\[[\d,]*\]", op.result)
    lines = [line for line in work.module.lines(op) if "meshtrain" in line.file]
    return f"{does} {array.group() if array else ''} {lines[0] if lines else ''}".strip()


def layer_loops(work: Work, bodies: list[str]) -> list[dict[str, Any]]:
    """The loops over layers of the steady clocks: what one iteration moves and multiplies, and how much of it computes nothing."""
    found = []
    for body in bodies:
        for op in work.module.computations[body]:
            if op.opcode == "while" and work.flops(body, op):
                inner, _, turns = work.module.loop(op)
                ops = work.module.computations[inner]
                idle = sum((work.moved(inner, o) for o in ops if work.only_moves(o)), start=Moved())
                found.append(
                    {
                        "body": inner,
                        "pass": "backward" if "transpose(" in op.source else "forward",
                        "turns": turns,
                        "bytes": work.total(inner).bytes,
                        "idle": idle.bytes,
                        "flops": work.products(inner),
                    }
                )
    return found


def needed_flops(config: Config) -> dict[str, float]:
    """FLOPs of the matrix products of one layer on a device, of attention the half that a causal mask leaves: two a weight and token
    forward and four backward; of attention two products forward and five backward, one of them the scores once more."""
    tokens, model = shapes.tokens(config), config.model
    weights = 2.0 * tokens * shapes.resident(config).block.full
    scores = 2.0 * tokens * config.train.sequence_length * model.head_dim * model.heads / config.mesh.tensor / 2
    return {"forward": weights + 2 * scores, "backward": 2 * weights + 5 * scores}


# --- what is sent


def sends(config: Config, module: Module, mesh: Mesh, turns: dict[str, int]) -> list[dict[str, Any]]:
    """Collectives by kind and axis: how many in the mean steady clock, in a step, and needed for the table's operations alone."""
    clock: dict[tuple[str, str], float] = defaultdict(float)
    step: dict[tuple[str, str], float] = defaultdict(float)
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for body, n in turns.items():
        for c in collectives(module, mesh, body=body):
            clock[c.kind, c.axis] += c.times * n / sum(turns.values())
    for c in collectives(module, mesh):
        step[c.kind, c.axis] += c.times
        sent[c.kind, c.axis] += c.times * c.sent
    needs: dict[tuple[str, str], float] = defaultdict(float)
    needs_sent: dict[tuple[str, str], float] = defaultdict(float)
    for flow in transfers(config, needed_iterations(config)):
        # the planner's word for a message is shorter than HLO's
        kind = "collective-permute" if flow.kind == PERMUTE else flow.kind
        needs[kind, flow.axis] += flow.count
        needs_sent[kind, flow.axis] += flow.sent
    return [
        {
            "kind": kind,
            "axis": axis,
            "clock": clock[kind, axis],
            "step": step[kind, axis],
            "needs": needs[kind, axis],
            "sent": sent[kind, axis],
            "needs_sent": needs_sent[kind, axis],
        }
        for kind, axis in sorted(set(step) | set(needs), key=lambda key: (key[1], key[0]))
        if axis != "none"
    ]


def needed_iterations(config: Config) -> Iterations:
    """Passes of a device through chunks, head and embedding with no idle clock among them."""
    m = config.parallel.microbatches
    passes = m * config.parallel.virtual_stages
    return Iterations(passes, m, passes, embedding=m, unembedding=m, down=passes, up=passes)


def under_products(config: Config, work: Work) -> dict[str, float]:
    """Shares of the bytes of messages, and of the gathers and scatters in the steady clocks' loops over layers, that travel under
    matrix products of at least their time."""
    cluster = named("h100", config.mesh.devices)
    rate = REACHED * cluster.accelerator.flops(config.precision.compute)
    inside = {loop["body"] for loop in layer_loops(work, list(steady(work.module, work)))}

    def share(axis: str, moved: list[tuple[str, IssuedCollective]]) -> float:
        group = cluster.axis(axis, config.mesh)
        total = hidden = 0.0
        for kind, one in moved:
            # of the whole array: a scatter yields a part of it
            whole = one.bytes * (group.size if kind == REDUCE_SCATTER else 1)
            total += whole * math.prod(n or 1 for n in one.loops)
            if one.flops / rate >= best(kind, group, whole).seconds:
                hidden += whole * math.prod(n or 1 for n in one.loops)
        return hidden / total

    messages = [(PERMUTE, one) for one in work.issued("collective-permute")]
    layers = [(kind, t) for kind in (ALL_GATHER, REDUCE_SCATTER) for t in work.issued(kind) if t.body in inside]
    return {"messages": share(PIPELINE, messages), "layers": share(TENSOR, layers)}


# --- printed


def printed(layout: str, now: dict[str, Any], before: dict[str, Any] | None) -> None:
    both = [before, now] if before else [now]

    def row(what: str, values: list[str]) -> None:
        print(f"  {what:44}" + "".join(f"{value:>16}" for value in values))

    print(f"\n{layout}")
    if before:
        row("", ["before", "after"])
    row("outside the layers, GB a clock", [f"{r['outside'] / 1e9:.2f}" for r in both])
    row("must, GB a clock", [f"{r['must'] / 1e9:.2f}" for r in both])
    row("ratio", [f"{r['ratio']:.2f}" for r in both])
    for name in ("forward", "backward"):
        loops = [[loop for loop in r["loops"] if loop["pass"] == name] for r in both]
        row(f"a layer {name}, GB", [several(found, "bytes", 1e9) for found in loops])
        row("  of it fills and copies", [several(found, "idle", 1e9) for found in loops])
        row("  TFLOP in products", [several(found, "flops", 1e12) for found in loops])
        row("  TFLOP needed", [f"{r['needs_flops'][name] / 1e12:.2f}" for r in both])
    row("messages under products", [f"{r['under_products']['messages']:.0%}" for r in both])
    row("layers' gathers and scatters under them", [f"{r['under_products']['layers']:.0%}" for r in both])
    row("temporaries, GiB", [f"{r['temp'] / 2**30:.2f}" for r in both])
    row("arguments, GiB", [f"{r['arguments'] / 2**30:.2f}" for r in both])
    row("seconds to lower, of a processor", [f"{r['lower_seconds'][0]:.1f}, {r['lower_seconds'][1]:.1f}" for r in both])
    row(
        "seconds to compile, of a processor",
        [f"{r['compile_seconds'][0]:.1f}, {r['compile_seconds'][1]:.1f}" for r in both],
    )
    print(f"  {'collectives':44}" + "  a clock, a step, needed".rjust(16 * len(both)))
    keys = list(dict.fromkeys((c["axis"], c["kind"]) for r in both for c in r["collectives"]))
    for axis, kind in keys:
        cells = []
        for r in both:
            one = next((c for c in r["collectives"] if (c["axis"], c["kind"]) == (axis, kind)), None)
            cells.append(f"{one['clock']:.1f}, {one['step']:.0f}, {one['needs']:.0f}" if one else "none")
        print(f"  {axis + ' ' + kind:44}" + "".join(f"{cell:>24}" for cell in cells))
    print("  what moves most outside the layers, GB a clock")
    for item in now["largest"]:
        print(f"    {item['bytes'] / 1e9:7.2f}  {item['times']:.3g} x {item['what']}")


def several(loops: list[dict[str, Any]], figure: str, unit: float) -> str:
    """A figure of loops that differ little: each value once."""
    return " ".join(sorted({f"{loop[figure] / unit:.2f}" for loop in loops}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}; all, if none is given")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="changes a key of every layout's config"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keeps the figures, with those that the file has of other layouts"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="prints the figures kept there beside")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keeps the compiled programs, and takes those that lie there: empty it when anything has changed",
    )
    options = parser.parse_args()
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"there is no layout {', '.join(sorted(unknown))}; legal are {', '.join(LAYOUTS)}.")
    against = json.loads(options.against.read_text()) if options.against else {}
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for layout in options.layouts or LAYOUTS:
        found[layout] = measured(layout, options.set, options.keep)
        printed(layout, found[layout], against.get(layout))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
