# %% [markdown]
# # 3 ZeRO 0 to 3: bytes by formula, by compiler, by live arrays
# Plain data parallelism keeps the whole model on every device. ZeRO (Rajbhandari et al. 2020) shards it over the data
# ranks: first the optimizer's state, then the gradients, then the parameters. What does each stage save, and what does
# it send for that? At the end you will have seen the bytes four times, by formula, in the live arrays, in the compiled
# program and in the planner; the traffic twice; and when stage 3 costs many times what the paper says.

# %%
import jax
import numpy as np
from jax.sharding import PartitionSpec

import meshtrain as mt
from meshtrain.hlo import CompiledCollectives, collectives, live_bytes
from meshtrain.parallel.parallelize import Gradients

mt.fake_devices(8)

# %% [markdown]
# ## What the paper counts
# Of each of $\Psi$ parameters a device holds, with Adam in mixed precision: 2 bytes of the weight and 2 of its
# gradient in half precision, and 12 of its float32 master and two moments (section 3.1). Stage 1 shards the 12 over
# $N$ data ranks, stage 2 also the gradient's 2, stage 3 also the weight's 2. The paper's figure 1 has 7.5 billion
# parameters on 64 ranks.

# %%
published = [120, 31.4, 16.6, 1.9]
for stage, gigabytes in enumerate(published):
    weight, gradient, state = (64 if stage >= level else 1 for level in (3, 2, 1))
    found = 7.5 * (2 / weight + 2 / gradient + 12 / state)
    print(f"stage {stage}: {found:6.2f} GB, in figure 1 {gigabytes}")
    assert abs(found - gigabytes) < 0.05

# %% [markdown]
# ## Here
# A small model on eight data ranks, computing in float32 to begin with, so that the weight is the master. `lower`
# needs no state and no batch: the step is compiled from their shapes. Each stage is one program, compiled once and
# used all through the notebook.

# %%
settings = {
    "model": {"layers": 8, "d_model": 64, "heads": 8, "d_ff": 192, "vocab_size": 264},
    "mesh": {"data": 8},
    "data": {"source": "synthetic"},
    "train": {"steps": 6, "global_batch_size": 8, "sequence_length": 8},
    "optimizer": {"warmup_steps": 2},
}


def built(*overrides):
    program = mt.Program(mt.load(settings, overrides))
    return program, program.lower().compile()


stages = [built(f"parallel.zero_stage={stage}") for stage in range(4)]
states = [program.init() for program, _ in stages]
config, psi = stages[0][0].config, stages[0][0].layout.parameters
N = config.mesh.data
print(f"{psi:,} parameters")
assert all(program.layout.parameters == psi for program, _ in stages)

# %% [markdown]
# From stage 1 on the masters are sharded too, not only the moments. Of the embedding, 264 rows, every device holds all
# in stage 0 (stripes), and 33 in the others.

# %%
mt.show(
    {f"stage {stage}": states[stage].params["embedding"]["tokens"] for stage in (0, 1)}
)

# %% [markdown]
# ## Between the steps
# So between two steps a device holds $12\Psi$ bytes in stage 0, and $12\Psi/N$ in all others: what tells 1, 2 and 3
# apart happens within a step. Four ways to know the bytes, which agree to the byte: beyond the formula the live arrays
# have three counters, and the compiled program's arguments the batch too.

# %%
print("stage  formula     live arrays  compiled program  planner")
for stage, ((program, step), state) in enumerate(zip(stages, states, strict=True)):
    formula = 12 * psi // (N if stage else 1)
    live = live_bytes(state)
    arguments = step.memory_analysis().argument_size_in_bytes
    planned = sum(
        item.nbytes
        for item in mt.plan(program.config, "cpu").memory
        if item.between_steps
    )
    print(f"{stage:5}  {formula:9,}  {live:12,}  {arguments:16,}  {planned:7,}")
    counters, batch = (
        3 * 4,
        2 * 4 * config.train.global_batch_size // N * config.train.sequence_length,
    )
    assert formula == planned == live - counters == arguments - counters - batch

# %% [markdown]
# ## Within a step
# Now the stages differ. In float32, bytes a parameter:
#
# | stage | masters, moments | whole weights | gradients | sum, $N = 8$ |
# | --- | --- | --- | --- | --- |
# | 0 | 12 | the masters | 4 | 16 |
# | 1 | 12/N | 4 | 4 | 9.5 |
# | 2 | 12/N | 4 | 4/N | 6 |
# | 3 | 12/N | layer by layer | 4/N | 2 |
#
# Beside these stand activations and what one layer needs for a moment, about the same in all stages. The planner has a
# name for each byte; the compiler has buffers. At the fullest moment they agree within 8 % in stages 1 to 3. In stage
# 0 they do not: the planner's fullest moment is in the backward, the compiler's in the optimizer's update, which on
# whole gradients makes 4 bytes a parameter more (on shards an eighth of that). Compiled alone, the update says so.

# %%
states_only = [12 + 4, 12 / N + 4 + 4, 12 / N + 4 + 4 / N, 12 / N + 4 / N]
plans = [mt.plan(program.config, "cpu") for program, _ in stages]
peaks = []
print("bytes a parameter\nstage  formula  planner  compiled program")
for stage, (plan, (_, step)) in enumerate(zip(plans, stages, strict=True)):
    of = step.memory_analysis()
    new = of.output_size_in_bytes - of.alias_size_in_bytes
    peaks.append(of.argument_size_in_bytes + new + of.temp_size_in_bytes)
    print(
        f"{stage:5}  {states_only[stage]:7.2f}  {plan.bytes / psi:7.2f}  {peaks[-1] / psi:7.2f}"
    )
    assert stage == 0 or abs(plan.bytes / peaks[-1] - 1) < 0.08

program = stages[0][0]
update = jax.jit(
    program.update, donate_argnums=0, out_shardings=(program.state_shardings, None)
)
gradients, loss = program.layout.masters, jax.ShapeDtypeStruct((), "float32")
more = (
    update.lower(program.state_shapes, Gradients(loss, gradients))
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
)
print(f"stage 0: {states_only[0]} and the update's own {more / psi:.2f}")
assert abs((states_only[0] * psi + more) / peaks[0] - 1) < 1e-3

# %% [markdown]
# ## Half precision
# With `precision.compute=bfloat16` the step works on a bfloat16 copy of the weights, 2 bytes a parameter, which stage
# 3 never holds whole. `Zero.open` makes that copy at the start of a step; here it is called alone, and what it makes
# is counted on each device.


# %%
def opened(program, masters):
    """Bytes of what a step computes with, on one device."""

    def local(shards):
        weights = program.local.zero.gather_params(shards)
        read = (
            weights.constant
            if jax.tree.leaves(weights.constant)
            else weights.differentiated
        )
        return jax.tree.map(lambda x: x[None], read)

    each = PartitionSpec(("data", "tensor", "pipeline"))
    mapped = jax.shard_map(
        local, mesh=program.mesh, in_specs=(program.layout.shards,), out_specs=each
    )
    return live_bytes(jax.jit(mapped)(masters))


for stage, state in enumerate(states):
    half = mt.load(
        settings, [f"parallel.zero_stage={stage}", "precision.compute=bfloat16"]
    )
    nbytes = opened(mt.Program(half), state.params)
    print(f"stage {stage}: {nbytes:9,} bytes, {nbytes / psi:.2f} a parameter")
    assert nbytes == 2 * psi // (N if stage == 3 else 1)

# %% [markdown]
# ## The traffic
# A ring sends $\frac{N-1}{N}$ of an array for a gather or a scatter, twice that for an all-reduce. Stage 0 sums
# gradients by an all-reduce. The others scatter gradients and gather weights: the same two halves with the optimizer's
# update between them, so that the sharding costs no traffic. Stage 3 gathers the weights twice, for the forward and
# for the backward: $3\Psi$ instead of $2\Psi$ (section 7).

# %%
sent = [collectives(step, program.mesh, program.taken) for program, step in stages]


def by_kind(found):
    """Bytes sent over data by kind, in units of (N-1)/N x 4 bytes x parameters."""
    total = dict.fromkeys(["all-reduce", "reduce-scatter", "all-gather"], 0)
    for c in found:
        if "data" in c.axes:
            total[c.kind] += c.sent * c.times / (4 * psi * (N - 1) / N)
    return total


print("stage  all-reduce  reduce-scatter  all-gather     sum")
for stage, found in enumerate(sent):
    shares = list(by_kind(found).values())
    print(
        "{:5}  {:10.4f}  {:14.4f}  {:10.4f}  {:6.4f}".format(
            stage, *shares, sum(shares)
        )
    )

# %% [markdown]
# Stages 0 to 2 are as in the paper, but for a hundredth of a percent: sums for the norm of sharded gradients. Stage 3
# sends *less* than $3\Psi$: only the layers' weights are gathered again. The embedding's backward needs no weight, and
# the head's follows at once on its forward.

# %%
weights = stages[0][0].layout.flat
of_layers = [w for w in weights if w.stacked]
layers = sum(np.prod(w.shape) for w in of_layers)
expected = [2, 2, 2, 2 + layers / psi]
for stage, found in enumerate(sent):
    assert abs(sum(by_kind(found).values()) / expected[stage] - 1) < 5e-4
print(f"stage 3 by formula: {expected[3]:.4f}")

# %% [markdown]
# Where does it happen? In stage 3 in `zero.py`, in the loop over the layers: each weight is gathered once a layer in
# the forward and once in the backward, and its gradient is scattered. The largest ones, with their lines:

# %%
CompiledCollectives(c for c in sent[3] if c.bytes >= 40_000)

# %%
expected = {
    ("all-gather", False): len(of_layers),
    ("all-gather", True): len(of_layers),
    ("reduce-scatter", True): len(of_layers),
}
for (kind, backward), arrays in expected.items():
    found = [
        c
        for c in sent[3]
        if (c.kind, c.backward, c.loops) == (kind, backward, (config.model.layers,))
    ]
    where = "backward" if backward else "forward"
    print(
        f"{kind:14} in the {where:8}: {len(found)} arrays a layer, {config.model.layers} layers"
    )
    assert len(found) == arrays

# %% [markdown]
# ## The same losses
# All this is bookkeeping. The four programs that were compiled above, on the same batches: what is left is float32's
# rounding, less than 1 in a million.

# %%
data, _ = mt.open_data(config)
losses = np.zeros((4, 3))
for stage, (program, step) in enumerate(stages):
    state, states[stage] = states[stage], None
    for k in range(3):
        state, metrics = step(state, program.place(data.batch(k)))
        losses[stage, k] = float(metrics["loss"])
    print(f"stage {stage}:", *(f"{loss:.5f}" for loss in losses[stage]))
np.testing.assert_allclose(losses, np.broadcast_to(losses[0], (4, 3)), rtol=1e-6)

# %% [markdown]
# ## When stage 3 costs more
# The $3\Psi$ are for one microbatch. With gradient accumulation over $m$ of them, stage 2 scatters its gradients $m$
# times and stage 3 also gathers its layers $2m$ times: about $(1+m)\Psi$ and $3m\Psi$. (Embedding and head stay at one
# gather: they stand in no loop but that over the microbatches, and XLA lifts what does not change out of a loop.)
# `parallel.zero_hold` keeps whole gradients and weights over the step instead. Four microbatches, each as large as
# above:

# %%
m = 4
gathered = 2 * m * layers + (psi - layers)
formulas = {
    (1, False): 2,
    (2, False): 1 + m,
    (2, True): 2,
    (3, False): gathered / psi + m,
    (3, True): 2,
}
temporaries = {}
print("stage  hold   sent: formula  compiled program   temporaries, bytes a parameter")
for (stage, hold), formula in formulas.items():
    program, step = built(
        f"parallel.zero_stage={stage}",
        f"parallel.zero_hold={str(hold).lower()}",
        f"parallel.microbatches={m}",
        f"train.global_batch_size={8 * m}",
    )
    found = sum(by_kind(collectives(step, program.mesh, program.taken)).values())
    temporaries[stage, hold] = step.memory_analysis().temp_size_in_bytes / psi
    print(
        f"{stage:5}  {hold!s:5}  {formula:13.2f}  {found:16.2f}  {temporaries[stage, hold]:31.1f}"
    )
    assert abs(found / formula - 1) < 5e-4
assert temporaries[2, True] == temporaries[3, True] == temporaries[1, False]

# %% [markdown]
# Holding brings the traffic back to $2\Psi$, and the memory up: stages 2 and 3 are stage 1 then, and for the sums over
# microbatches whole gradients are held, with each microbatch's new ones beside them. By default neither holds, since
# who asks for them wants the memory. A pipeline is the same trade, with its microbatches.

# %% [markdown]
# ## Things to try
# - `optimizer.name=sgd` in `settings`: one momentum instead of two moments. Which 12 become 8, and which assertions
#   notice?
# - `train.sequence_length=128`: activations grow, and what ZeRO saves becomes a smaller share of a step.
# - `model.d_model=60`, `model.heads=6`: eight ranks cannot divide some weights.
#   `meshtrain.parallel.placement.notes(config)` says how they are padded; which assertions notice?
# - `precision.compute=bfloat16` and `precision.reduce=bfloat16` in `built`: half the traffic on a GPU. XLA's CPU
#   backend sends float32 all the same: look at `dtype` in `sent`.
