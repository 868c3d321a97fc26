"""Times layers of linear attention: a hybrid's gradients beside plain JAX with the same chunked rule, and rows over
context beside rows over data.

    python -m experiments.linear_attention
    python -m experiments.linear_attention --compile h100    memory over context ranks, of described devices

What chunks move in memory, and each rule, beside the plan of it, is held by `tests/model/test_gpu_rule.py`.

The first prints two tables, of seconds of a gradient's forward and backward, in float32 on a CPU; those of the processor
bear other work on the machine. The rule of plain JAX is one `lax.scan` over chunks behind batched products,
differentiated by JAX.
"""

import math
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("PJRT_NPROC", "16")

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import bench, plain_jax
from experiments.bench import config_of
from experiments.plan.__main__ import planned_and_compiled
from experiments.plan.work import Work
from meshtrain.config import Config
from meshtrain.config.model import LinearConfig
from meshtrain.hlo.module import Module, byte_count
from meshtrain.model.attention import Heads
from meshtrain.model.collectives import Collectives
from meshtrain.model.delta_rule import Documents, RuleInputs, chunk_terms, delta_rule
from meshtrain.model.linear_attention import Kernels, Projected, rule_inputs
from meshtrain.plan import shapes
from meshtrain.plan.activations import AT_HAND
from meshtrain.plan.compiled import described_devices
from meshtrain.plan.compute import RULE_MOVES
from meshtrain.step import Program

Tree = Any
CHUNK = 64
LONG = 131072  # tokens


def config(length: int, rows: int, pattern: list[str], mesh: dict[str, int]) -> Config:
    sizes = {"layers": 4, "d_model": 512, "heads": 8, "kv_heads": 8, "d_ff": 1376}
    linear = {
        "key_heads": 4,
        "value_heads": 4,
        "key_dim": 64,
        "value_dim": 128,
        "chunk": CHUNK,
    }
    model = sizes | {"vocab_size": 512, "pattern": pattern, "linear": linear}
    parallel = {"context_strategy": "all_gather"}
    return config_of(model, mesh, rows, length, parallel, "float32")


def gradients(config: Config) -> tuple[Program, Any]:
    """Returns a program, and the function that computes its gradients once."""
    program = Program(config)
    shape = (config.train.global_batch_size, config.train.sequence_length)
    tokens = np.random.default_rng(0).integers(0, 512, shape, np.int32)
    batch = program.place({"tokens": tokens, "labels": tokens})
    params = program.init().params
    compiled = jax.jit(program.gradients).lower(
        params, batch, jnp.int32(0), jnp.float32(1)
    )
    run = compiled.compile()
    return program, lambda: jax.block_until_ready(
        run(params, batch, jnp.int32(0), jnp.float32(1))
    )


# --- plain JAX


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (len(kernel) - 1, 0), (0, 0), (0, 0)))
    terms = (padded[:, at : at + x.shape[1]] * w for at, w in enumerate(kernel))
    return jax.nn.silu(sum(terms))


def inverse(system: jax.Array) -> jax.Array:
    """Returns the inverse of a unit lower triangle, given without its diagonal, by products: `solve_triangular` of many
    small systems takes 13 times the step on a CPU.
    """
    power = -system
    found = jnp.eye(CHUNK) + power
    for _ in range(int(math.log2(CHUNK)) - 1):
        power = power @ power
        found = found + found @ power
    return found


def rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> jax.Array:
    rows, length, heads, width = v.shape
    chunked = lambda x: jnp.moveaxis(
        x.reshape(rows, -1, CHUNK, *x.shape[2:]), (1, 3), (0, 2)
    )
    q, k, v, decay, beta = map(chunked, (q, k, v, decay, beta))
    total = jnp.cumsum(decay, axis=3)
    seen = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    weights = jnp.exp(
        jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf)
    )
    system = jnp.tril(
        jnp.einsum("...ik,...jk->...ij", k, k) * weights * beta[..., None], -1
    )
    given = [v * beta[..., None], k * (beta * jnp.exp(total))[..., None]]
    solved = inverse(system) @ jnp.concatenate(given, -1)
    u, w = jnp.split(solved, [width], axis=-1)
    scores = jnp.einsum("...ik,...jk->...ij", q, k) * weights
    queries = q * jnp.exp(total)[..., None]
    keys = k * jnp.exp(total[..., -1:] - total)[..., None]
    keep = jnp.exp(total[..., -1])[..., None, None]

    def step(
        state: jax.Array, here: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        u, w, scores, queries, keys, keep = here
        new = u - w @ state
        return keep * state + keys.swapaxes(
            -1, -2
        ) @ new, queries @ state + scores @ new

    start = jnp.zeros((rows, heads, k.shape[-1], width))
    out = lax.scan(step, start, (u, w, scores, queries, keys, keep))[1]
    return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(rows, length, heads, width)


def mixed(x: jax.Array, w: Tree) -> jax.Array:
    q, k, v, z = (jnp.einsum("btd,dhk->bthk", x, w[n]) for n in ("q", "k", "v", "z"))
    q, k, v = (convolved(a, w[f"{n}_conv"]) for n, a in (("q", q), ("k", k), ("v", v)))
    q, k = (
        a * lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + 1e-6) for a in (q, k)
    )
    decay = -jnp.exp(w["decay_log"]) * jax.nn.softplus(x @ w["decay"] + w["decay_bias"])
    o = rule(q * q.shape[-1] ** -0.5, k, v, decay, jax.nn.sigmoid(x @ w["beta"]))
    o = plain_jax.rms(o, w["norm"]["scale"]) * jax.nn.silu(z)
    return jnp.einsum("bthk,hkd->btd", o, w["out"])


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    x = params["embedding"]["tokens"][tokens]

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = x + mixed(plain_jax.rms(x, w["attention_norm"]["scale"]), w["attention"])
        m = plain_jax.rms(x, w["mlp_norm"]["scale"])
        mlp = w["mlp"]
        return x + (jax.nn.silu(m @ mlp["gate"]) * (m @ mlp["up"])) @ mlp["down"], None

    x, _ = lax.scan(layer, x, params["linear_blocks"])
    full = jax.tree.map(lambda a: a[0], params["blocks"])
    norms = {
        "norm1": full["attention_norm"]["scale"],
        "norm2": full["mlp_norm"]["scale"],
    }
    x = plain_jax.block(x, full["attention"] | full["mlp"] | norms)
    head = params["head"]
    return plain_jax.head_loss(
        {"norm": head["norm"]["scale"], "head": head["weight"]}, x, tokens
    )


def memory(target: str) -> None:
    """Prints what a step with two layers holds at once besides its state, over more and more context ranks."""
    table = bench.Table(
        "context",
        "compiled MiB",
        "of one rank",
        title=f"{target}, rows of {LONG:,} tokens",
    )
    first = 0.0
    for ranks in (1, 2, 4, 8):
        model = {"layers": 2, "d_model": 1024, "heads": 8, "d_ff": 1024}
        model |= {"vocab_size": 512, "pattern": ["linear"]}
        linear = {"linear": {"key_heads": 4, "value_heads": 8}}
        parallel = {"zero_stage": 0}
        step = config_of(model | linear, {"context": ranks}, 1, LONG, parallel)
        found = planned_and_compiled(step, target)
        assert found is not None, "it does not compile"
        held = found["compiled"]["temp_bytes"]
        first = first or held
        table.row(ranks, f"{held / 2**20:,.0f}", f"1 / {first / held:.2f}")


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", metavar="TARGET", help="a100, h100, h200 or b200")
    options = parser.parse_args()
    if options.compile:
        memory(options.compile)
        return
    rounds = options.rounds
    program, ours = gradients(
        config(1024, 2, ["linear", "linear", "linear", "full"], {})
    )
    params = program.layout.canonical(program.init().params)
    tokens = np.random.default_rng(0).integers(0, 512, (2, 1024), np.int32)
    plain = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
    theirs = lambda: jax.block_until_ready(plain(params, tokens))
    difference = abs(float(ours()[0]) - float(theirs()[0]))
    found = bench.turns({"meshtrain": ours, "plain JAX": theirs}, rounds)
    _print("a hybrid of 4 layers, 2 rows of 1,024 tokens, one device", found)
    print(f"\ntheir losses differ by {difference:.1e}")

    runs = {}
    for name, mesh in (("context 4", {"context": 4}), ("data 4", {"data": 4})):
        runs[name] = gradients(config(4096, 4, ["linear"], mesh))[1]
    _print(
        "4 layers of linear attention, 4 rows of 4,096 tokens",
        bench.turns(runs, rounds),
    )


# --- compiled for a described H100

UNMOVED = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


def compiled() -> dict[str, dict[str, float]]:
    """Returns the bytes that XLA's operations for the terms of chunks read and write, those of their temporaries, and
    the kernels of ours, by halves and by the kernel.

    A kernel whose registers do not hold its numbers raises RuntimeError.
    """
    at = jax.sharding.SingleDeviceSharding(described_devices("h100", 1)[0])
    rows = lambda *shape: jax.ShapeDtypeStruct(
        (1, 8192, *shape), jnp.float32, sharding=at
    )
    ids = lambda length: jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=at)
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    found = {}
    for kind in ("gated_delta", "mamba2"):
        beta = rows(32) if kind == "gated_delta" else None
        inputs = RuleInputs(rows(16, 128), rows(16, 128), rows(32, 128), rows(32), beta)
        for how, platform in (("halves", "cpu"), ("kernel", "gpu")):
            run = jax.jit(partial(chunk_terms, platform, CHUNK))
            program = run.lower(Documents(ids(8192), ids(3)), inputs).compile(options)
            module = Module(program.as_text())
            named = module.named(module.entry)
            operations = [op for op in named.values() if op.opcode not in UNMOVED]
            arrays = [
                array
                for op in operations
                for array in (op, *(named[name] for name in op.operands))
            ]
            found[f"{kind}, {how}"] = {
                "moved": sum(
                    byte_count(a.result) for a in arrays if a.opcode != "constant"
                ),
                "temporaries": program.memory_analysis().temp_size_in_bytes,
                "kernels": sum("chunk_kernel" in op.attributes for op in operations),
            }
    return found


HEADS = 32


def rule_numbers(
    kind: str, chunk: int, key: int, value: int
) -> list[tuple[float, float]]:
    """Returns what the rule's forward moves and its backward has at hand, float32 a token and head of 8,192 tokens:
    compiled for a described H100, and planned.
    """
    at = jax.sharding.SingleDeviceSharding(described_devices("h100", 1)[0])
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=at)
    rows = partial(of, jnp.bfloat16, 1, 8192)
    held = partial(of, jnp.float32)
    sizes = LinearConfig(
        kind, HEADS // (1 + (kind != "kda")), HEADS, key, value, 4, chunk
    )
    keys = sizes.key_heads, key
    heads = lambda part: Heads(part(*keys), part(*keys), part(HEADS, value))
    decays = (HEADS, key) if kind == "kda" else (HEADS,)
    earlier = heads(partial(of, jnp.bfloat16, 1, 3))
    beta = rows(HEADS)
    kernels = Kernels(heads(partial(held, 4)), held(HEADS), held(*decays))
    if kind == "mamba2":
        beta = None
        kernels = kernels._replace(biases=heads(held), skip=held(HEADS))
    arrays = Projected(heads(rows), earlier, beta, rows(*decays)), kernels
    collectives = Collectives()
    collectives.platform = "gpu"
    rule = lambda arrays: delta_rule(rule_inputs, chunk, collectives, arrays, None)
    back = lambda arrays, cotangent: jax.vjp(rule, arrays)[1](cotangent)
    # its instructions and buffers are those of full optimization
    options = {"xla_backend_optimization_level": 0}
    forward = Module(jax.jit(rule).lower(arrays).compile(options).as_text())
    work = Work(forward)
    moved = sum(
        math.prod(turns or 1 for turns in loops) * work.moved(name, op).bytes
        for name, loops in forward.bodies()
        for op in forward.named(name).values()
        if op.opcode != "while"
    )
    backward = jax.jit(back).lower(arrays, held(1, 8192, HEADS, value)).compile(options)
    at_hand = backward.memory_analysis().temp_size_in_bytes
    numbers = 4 * 8192 * HEADS
    return [
        (moved / numbers, shapes.rule_numbers(RULE_MOVES[kind], sizes, value, value)),
        (at_hand / numbers, shapes.rule_numbers(AT_HAND[kind], sizes, value, value)),
    ]


def _print(title: str, found: dict[str, list[bench.Spent]]) -> None:
    """Prints the runs, and the first over the second."""
    table = bench.Table("run        ", "seconds", "processor", title=title)
    first, second = (bench.typical(times) for times in found.values())
    for name, times in found.items():
        typical = bench.typical(times)
        table.row(name, f"{typical.wall:.2f}", f"{typical.processor:.2f}")
    ratio = first.wall / second.wall, first.processor / second.processor
    table.row("ratio", *(f"{value:.2f}" for value in ratio))


if __name__ == "__main__":
    main()
