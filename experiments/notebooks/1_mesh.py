# %% [markdown]
# # 1 The mesh: what lies where
# Eight devices train one model. Which of them holds which part of which weight, which rows of the batch does it see,
# and what does it send? A mesh of three axes, data × tensor × pipeline, answers all of it. At the end you will have
# seen where every array lies, counted its bytes on each device, trained the same model on five meshes with the same
# losses, and read a checkpoint on another mesh than its own.

# %%
import math
import tempfile

import numpy as np

import meshtrain as mt

mt.fake_devices(8)

# %% [markdown]
# A config is a dictionary or a YAML file; whatever it leaves out has a default. This one is a small Llama-style model
# on random bytes, on 2 × 2 × 2 devices. `microbatches` are the pieces that each data rank's share of a batch is cut
# into.

# %%
settings = {
    "model": {"layers": 8, "d_model": 64, "heads": 8, "d_ff": 128, "vocab_size": 264},
    "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
    "parallel": {"schedule": "1f1b", "microbatches": 4},
    "data": {"source": "synthetic"},
    "train": {"steps": 6, "global_batch_size": 32, "sequence_length": 32},
    "optimizer": {"warmup_steps": 2},
}

# %% [markdown]
# The whole library in ten lines. Nothing in them says how many devices there are: with other sizes in `mesh` the same
# lines run on one device or on a cluster. (Reading the loss waits for the step. Fake devices need that, since they
# share one machine's threads; others do not.)

# %%
config = mt.load(settings)
program = mt.Program(config)
data, held_out = mt.open_data(config)
state = program.init()
losses = []
for k in range(3):
    state, metrics = program.train_step(state, program.place(data.batch(k)))
    losses.append(float(metrics["loss"]))
print(*(f"{loss:.4f}" for loss in losses))

# Nothing can be learned from random bytes: the loss of a guess is ln V, and the first one lies near.
assert abs(losses[0] - math.log(config.model.vocab_size)) < 0.05

# %% [markdown]
# ## The devices
# A program shows its mesh: a block is a pipeline stage, a row a data rank, a column a tensor rank. Every device has a
# colour, which the pictures below use again. Under it stands the pipeline's schedule, who does what in which clock;
# notebook 4 is about that.

# %%
program

# %% [markdown]
# Device numbers count along tensor first, then data, then pipeline: $\text{device}(d, t, p) = (p\,D + d)\,T + t$.
# Neighbours have the fastest links, and tensor ranks talk in every layer; stages talk least and are farthest apart.

# %%
D, T, P = program.mesh.devices.shape
for (d, t, p), device in np.ndenumerate(program.mesh.devices):
    assert device.id == (p * D + d) * T + t
print(f"data {D} x tensor {T} x pipeline {P}")

# %% [markdown]
# ## The weights
# Each axis of a weight has a name, and the name says over which mesh axis it is split: layers over pipeline, heads and
# `mlp` over tensor, the vocabulary over both. ZeRO then splits one axis more over data.

# %%
program.layout

# %% [markdown]
# That was the plan. Is it so? Take the query projection $[\text{layers}, \text{embed}, \text{heads}, \text{head}]$
# from the state that was just trained, say which slice each device should hold, and ask the array.


# %%
def part(n, rank, ranks):
    """The rank's share of n."""
    return slice(rank * n // ranks, (rank + 1) * n // ranks)


q = state.params["blocks"]["attention"]["q"]
layers, embed, heads, head = q.shape
held = {shard.device: shard for shard in q.addressable_shards}
for (d, t, p), device in np.ndenumerate(program.mesh.devices):
    expected = part(layers, p, P), part(embed, d, D), part(heads, t, T), slice(None)
    assert held[device].index == expected
    assert held[device].data.shape == (layers // P, embed // D, heads // T, head)
mt.show(q)

# %% [markdown]
# ## The bytes
# AdamW keeps two moments of each parameter, so with the float32 master a parameter takes 12 bytes. Let $w$ be the
# devices among which the model splits a weight (`ways`); ZeRO shares each of these parts among $D$ more. A device then
# holds
#
# $$12 \sum_{\text{weights}} \frac{\text{size}}{D\,w} \text{ bytes,}$$
#
# and three counters: of the step, of the moments and of the learning rate. The live arrays have exactly that, on every
# device.

# %%
from meshtrain.hlo import live_bytes

formula = (
    12 * sum(math.prod(w.shape) // (D * math.prod(w.ways)) for w in program.layout.flat)
    + 3 * 4
)
for device in program.mesh.devices.flat:
    assert live_bytes(state, device) == formula
ideal = 12 * program.layout.parameters / program.mesh.size
print(
    f"{formula:,} bytes a device; 12 bytes x parameters / devices would be {ideal:,.0f}"
)
assert 1 < formula / ideal < 1.01

# %% [markdown]
# The difference is the norms: tensor cannot split them, and the last one, which belongs to no layer, pipeline cannot
# split either.
#
# ## The batch
# Rows are split over data alone. The four devices of a data rank see the same rows: two stages pass them on, two
# tensor ranks share each layer.

# %%
batch = program.place(data.batch(0))
rows = config.train.global_batch_size
for shard in batch["tokens"].addressable_shards:
    (d, t, p) = np.argwhere(program.mesh.devices == shard.device)[0]
    assert shard.index[0] == part(rows, d, D)
mt.show(batch["tokens"])

# %% [markdown]
# ## Other meshes, the same losses
# A mesh is only a placement. The same three batches on one device, on eight data ranks, on eight tensor ranks, on
# eight stages, and again on 2 × 2 × 2. Each step is compiled once, and the compiled program is both run and read:
# `collectives` finds what a device sends in it.

# %%
from meshtrain.hlo import CompiledCollectives, collectives


def run(data_ranks, tensor_ranks, stages):
    shape = [
        f"mesh.data={data_ranks}",
        f"mesh.tensor={tensor_ranks}",
        f"mesh.pipeline={stages}",
    ]
    program = mt.Program(mt.load(settings, shape))
    step = program.lower().compile()
    state, losses = program.init(), []
    for k in range(3):
        state, metrics = step(state, program.place(data.batch(k)))
        losses.append(float(metrics["loss"]))
    return losses, live_bytes(state), collectives(step, program.mesh, program.taken)


runs = {
    shape: run(*shape)
    for shape in [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]
}
print("data tensor pipeline   losses                   state a device")
for shape, (found, nbytes, _) in runs.items():
    print(
        "{:4} {:6} {:8}".format(*shape),
        "  ",
        *(f"{loss:.5f}" for loss in found),
        f"{nbytes:>12,} bytes",
    )

# %% [markdown]
# The losses differ only by what float32 rounds when it adds in another order: less than 1 in a million (one unit of
# the last place is 1 in 8 to 16 million). The library's tests hold the gradients to account in the same way, against
# an independent reference.

# %%
alone = runs[1, 1, 1][0]
for shape, (found, _, _) in runs.items():
    np.testing.assert_allclose(found, alone, rtol=1e-6, err_msg=str(shape))
np.testing.assert_allclose(losses, alone, rtol=1e-6)

# %% [markdown]
# What differs is what a device sends. Data parallelism sends gradients and weights once a step; tensor parallelism
# sums activations in every layer; a pipeline passes activations on, one message a microbatch, and here all stages
# share the vocabulary, which costs sums over them.

# %%
for shape, (_, _, found) in runs.items():
    told = (f"{axis} {sent / 2**20:.1f}" for axis, sent in found.traffic.items())
    print(" × ".join(map(str, shape)), "MiB of a device:", ", ".join(told) or "nothing")
assert not runs[1, 1, 1][2].traffic

# %% [markdown]
# Notebooks 2 and 3 have the formulas. On 2 × 2 × 2 all three axes talk. These are the collectives of more than 10 kB a step, with the
# lines of Python that they come from.

# %%
sent = runs[2, 2, 2][2]
assert {axis for c in sent for axis in c.axes} == {"data", "tensor", "pipeline"}
CompiledCollectives(c for c in sent if c.sent * c.times > 10_000)

# %% [markdown]
# ## What does not divide
# Five layers on two stages, and a vocabulary of 259 over four devices. Both are padded: a stage has as many places for
# layers as the longest one (−1 is an empty place, which is skipped), and the vocabulary gets one row more, of zeros.

# %%
odd = mt.load(
    settings,
    ["model.layers=5", "model.vocab_size=259", f"run.directory={tempfile.mkdtemp()}"],
)
uneven = mt.Program(odd)
print("layers by stage:", uneven.layout.layer_at[:, 0].tolist())
for name in "blocks.attention.q", "embedding.tokens":
    weight = next(w for w in uneven.layout.flat if w.name == name)
    print(f"{name}: {weight.shape} lies in {weight.padded}")

live = uneven.init().params
assert (
    live["blocks"]["attention"]["q"].shape[0] == 6
    and live["embedding"]["tokens"].shape[0] == 260
)
assert not np.asarray(live["blocks"]["attention"]["q"])[5].any()
assert not np.asarray(live["embedding"]["tokens"])[259].any()
mt.show({"q": live["blocks"]["attention"]["q"], "tokens": live["embedding"]["tokens"]})

# %% [markdown]
# ## A checkpoint has no mesh
# `mt.train` is the command `python -m meshtrain.train`: a whole run, with a checkpoint at its end. Here it trains the
# uneven model on 2 × 2 × 2.

# %% tags=["varies"]
assert mt.train(odd).exit_code == 0

# %% [markdown]
# Two lines read it on any other mesh: four tensor ranks here, and one device. What was saved are the five layers and
# 259 rows, without padding and in order, so that any mesh can take its parts.

# %%
four = mt.make_mesh(mt.load({"mesh": {"tensor": 4}}))
logits = mt.read_model(odd.run.directory, mesh=four)([[72, 101, 108, 108, 111]])

model = mt.read_model(odd.run.directory)
np.testing.assert_allclose(model([[72, 101, 108, 108, 111]]), logits, rtol=0, atol=1e-6)
assert logits.shape == (1, 5, 259) and model.step == 6
assert model.weights["blocks.attention.q"].shape == (5, 64, 8, 8)
mt.show(logits)

# %% [markdown]
# ## Things to try
# - `mesh.data=4`, `mesh.tensor=2`, `mesh.pipeline=1` in `settings`: the layers lie in one block, and the losses stay.
# - `parallel.zero_stage=0` and look at `program.layout` again: nothing is split over data any more, and `formula` must
#   lose its $D$. Notebook 3 is about it.
# - `model.kv_heads=1`: one key/value head cannot be split over two tensor ranks. Which weights are whole on both now,
#   and what is sent for their gradients?
# - `parallel.sequence_parallel=true` in the run on (1, 8, 1): the all-reduces become gathers and scatters, with the
#   same bytes.
