# %% [markdown]
# # 13 Communication: islands, compression, and when each wins
# Every step of data parallelism ends with a sum over all devices. Within a machine that is cheap, between machines it
# is dear, between buildings it may be all that a step does. Here are three ways to send less over the slow links:
# islands that first sum among themselves; gradients as fewer bits; and islands that go on by themselves and meet now
# and then. Each is shown to have happened, by counting bytes in the compiled step, and each has a price, which stands
# beside it. At the end the planner says for 512 GPUs which one wins at which bandwidth.

# %%
import meshtrain as mt

mt.fake_devices(8)

# %%
import dataclasses

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from meshtrain.cluster import algorithms
from meshtrain.cluster.algorithms import ALL_REDUCE
from meshtrain.cluster.cluster import load_cluster, named
from meshtrain.plan import traffic

# %% [markdown]
# ## What is often said, and what is true
# | said | true |
# | --- | --- |
# | a ring takes $2 S \frac{n-1}{n} / B$ | and $2(n-1)$ latencies: of small arrays nothing else counts |
# | a tree takes $2 \log_2 n$ times the whole array | cut into pieces that follow each other, two trees send $2S$ in all (notebook 5) |
# | between machines one representative of each sums | then one network card of eight works: scatter first, sum an eighth on each card, gather |
# | NVLink has 25 GB/s | one link of an old generation has; an H100 sends 450 GB/s each way |
# | 100 Mbit/s are 100 · 1024² / 8 bytes | networks count in thousands: 12.5 MB/s |
# | ZeRO-1 shards gradients | the optimizer's state; stage 2 shards gradients |
# | top-k is a dense array with zeros | then nothing was saved; values and places are sent, and what was left out must come later |
# | overlap is what runs after the backward | it runs beside it, as soon as the first gradient is whole |
#
# The first row in numbers, on 128 machines of 8 H100s: the share of a ring's time that latencies are.

# %%
ring = named("h100", 128 * 8).group(128, 8)
for size in (1e5, 1e7, 1e9):
    share = 2 * 127 * ring.latency / algorithms.ring(ALL_REDUCE, ring, size)
    print(f"{size / 1e6:6.1f} MB: {share:4.0%} of the ring's time are latencies")
assert 2 * 127 * ring.latency / algorithms.ring(ALL_REDUCE, ring, 1e5) > 0.99

# %% [markdown]
# ## Islands
# Eight devices in two islands of four. ZeRO shards within an island, so that gathers and scatters stay inside; each
# device sums its shard with the one device of the other island that has the same (HSDP, Zhao et al. 2023):
#
# ```
# island 0              island 1
# 0    1    2    3      4    5    6    7        reduce-scatter within an island:   S 3/4   a device, on fast links
# ├────┴────┴────┘      ├────┴────┴────┘
# └─────────────────────┘                       all-reduce of a shard across:      S/4 · 2 · 1/2
#      └─────────────────────┘  ...
# ```
#
# `mesh.data` stays 8, `mesh.islands` says how many there are. What the compiled step sends, by axis and line of the
# source:

# %%
settings = {
    "model": {"layers": 2, "d_model": 64, "heads": 4, "d_ff": 192, "vocab_size": 264},
    "mesh": {"data": 8, "islands": 2},
    "parallel": {"zero_stage": 1, "microbatches": 1},
    "data": {"source": "stdlib", "tokenizer": "byte"},
    "train": {"global_batch_size": 16, "sequence_length": 32, "steps": 24},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 4},
}


def built(*overrides):
    return mt.Program(mt.load(settings, overrides))


islands = built()
found = islands.collectives()
found

# %% [markdown]
# Across islands a device sends $2\frac{R-1}{R}$ of a shard, $S / (N/R)$, and the planner knows it:

# %%
config, gradients = islands.config, 4 * islands.layout.parameters
R, shards = config.mesh.islands, config.mesh.shards
across = sum(c.sent * c.times for c in found if c.axes == ("island",))
planned = traffic.by_axis(mt.plan(config, "cpu").transfers)["island"]
print(
    f"across islands {across:,.0f} bytes, by formula {2 * (R - 1) / R * gradients / shards:,.0f}, planned {planned:,.0f}"
)
assert np.isclose(across, 2 * (R - 1) / R * gradients / shards, rtol=0.01)
assert np.isclose(across, planned, rtol=0.01)

# %% [markdown]
# Islands alone send hardly less over the slow links than a ring over all eight that keeps to the islands: the ring's
# scatter in float32 and gather are as many bytes as the all-reduce of shards. What islands win is that weights are
# gathered inside, which with ZeRO-3 is done twice or more a step, and that the slow part stands by itself: it can be
# sent as something else.
#
# ## Fewer bits
# Each codec, first on numbers alone. An int8 block of 256 has one float32 scale, so that it is $256 + 4$ bytes in
# place of 1,024; the error of a number is at most half a step of its block.

# %%
from meshtrain.compression import codec_of

gradient = np.random.default_rng(0).standard_normal((1, 4096)).astype(np.float32) * 1e-3
gradient[0, 7] = 1.0  # one outlier takes the resolution of its whole block
errors = {}
for name in ("bfloat16", "float8", "int8", "int4"):
    codec = codec_of(
        mt.load(
            {"parallel": {"reduce": {"compression": name, "feedback": False}}}
        ).parallel.reduce
    )
    arrived = np.asarray(codec.decode(codec.encode(jnp.asarray(gradient)), 4096))
    off = np.abs(arrived - gradient)[0]
    errors[name] = np.sqrt((off[256:] ** 2).mean() / (gradient[0, 256:] ** 2).mean())
    zeros = (arrived[0, :256] == 0).mean()
    print(
        f"{name:9} {4 * 4096 / codec.nbytes(4096):5.2f} x smaller, relative error {errors[name]:7.2%}; "
        f"zeros beside the outlier {zeros:4.0%}"
    )
assert errors["bfloat16"] < errors["int8"] < errors["float8"] < errors["int4"]
assert errors["bfloat16"] < 2**-8

# %% [markdown]
# Now in the step. Sums of int8 would wrap, so there is no reduce-scatter of it: every rank sends each other rank its
# part, encoded once, in one all-to-all, and who receives them decodes and sums (ZeRO++, Wang et al. 2023). The
# compiled steps, and the bytes that a device sends for gradients; `int4` and `topk` keep what they left out for the
# next step.

# %%
ways = ("none", "int8", "int4", "topk")
programs = {
    way: built("mesh.islands=1", f"parallel.reduce.compression={way}") for way in ways
}
SUMMING = ("reduce-scatter", "all-to-all", "all-reduce")
sent = {}
for way, program in programs.items():
    # The weights' gather stays as it is, and a few bytes are the loss and other figures of the step.
    sent[way] = sum(
        c.sent * c.times
        for c in program.collectives()
        if c.kind in SUMMING and c.bytes > 128
    )
    flows = [
        flow
        for flow in mt.plan(program.config, "cpu").transfers
        if "gradient" in flow.what
    ]
    foreseen = sum(flow.sent for flow in flows)
    print(
        f"{way:9} {sent[way]:9,.0f} bytes, {sent['none'] / sent[way]:5.2f} x less, planned {foreseen:9,.0f}"
    )
    assert np.isclose(sent[way], foreseen, rtol=0.01)
assert sent["none"] / sent["int8"] > 3.9

# %% [markdown]
# On a model this small norms, which are not compressed, and short rows weigh more than in a large one.
#
# What does training make of it? The first 24 steps with int8, beside those with float32.

# %%
losses = {}
for way in ("none", "int8"):
    program = programs[way]
    state, (data, _) = program.init(), mt.open_data(program.config)
    losses[way] = []
    for k in range(program.config.train.steps):
        state, metrics = program.train_step(state, program.place(data.batch(k)))
        losses[way].append(float(metrics["loss"]))
for way, found_losses in losses.items():
    print(f"{way:6}", *(f"{loss:.3f}" for loss in found_losses[::4]))
assert (
    np.allclose(losses["none"], losses["int8"], atol=0.03)
    and losses["int8"][-1] < losses["int8"][0] - 1
)

# %% [markdown]
# ## Why what was left out must be kept
# The largest tenth of a gradient, step after step. Without feedback the other nine tenths are never sent if they are
# never large; with feedback they add up until they are. After any number of steps what was sent and what is owed are
# the whole gradient, which is why it works (Stich et al. 2018, Karimireddy et al. 2019) where updates are the gradient
# times a rate. AdamW divides by the size of recent gradients, and what comes late is then no longer what it was: in
# the quickstart top-k did worse with feedback than without (`experiments/README.md`).

# %%
from meshtrain.parallel.reduce.codecs import TopK

codec, dice = TopK(0.1), np.random.default_rng(1)
# the part of the gradient that is the same every step
steady = np.abs(dice.standard_normal((1, 500))).astype(np.float32)
arrived = {False: np.zeros_like(steady), True: np.zeros_like(steady)}
residual, whole = np.zeros_like(steady), np.zeros_like(steady)
for _ in range(60):
    g = steady + 0.1 * dice.standard_normal(steady.shape).astype(np.float32)
    whole += g
    for feedback in (False, True):
        given = g + residual if feedback else g
        through = np.asarray(
            codec.decode(codec.encode(jnp.asarray(given)), given.shape[1])
        )
        arrived[feedback] += through
        if feedback:
            residual = given - through
for feedback in (False, True):
    never = (arrived[feedback] == 0).mean()
    print(f"feedback {feedback!s:5}: {never:4.0%} of the numbers have never been sent")
assert np.abs(arrived[True] + residual - whole).max() < 1e-5 * np.abs(whole).max()
assert (arrived[False] == 0).mean() > 0.8 and (arrived[True] == 0).mean() < 0.15

# %% [markdown]
# ## Islands by themselves
# DiLoCo (Douillard et al. 2023): each island takes `every` steps on its own, and then all of them take one common
# step, with momentum, along the mean of what they moved. The two compiled programs say what crosses: nothing in one,
# one all-reduce of a shard in the other.

# %%
from meshtrain.hlo import collectives

alone = built("parallel.sync.every=4", "parallel.sync.outer_momentum=0.5")
inner = collectives(alone.lower().compile(), alone.mesh)
outer = collectives(
    alone.steps.synchronize[0].lower(alone.state_shapes).compile(), alone.mesh
)
crossing = [
    sum(c.sent * c.times for c in program if "island" in c.axes)
    for program in (inner, outer)
]
print(
    f"across islands: {crossing[0]:,.0f} bytes in a step, {crossing[1]:,.0f} every fourth step; {across:,.0f} every step before"
)
assert crossing[0] == 0 and np.isclose(crossing[1], across, rtol=0.01)

# %% [markdown]
# ## When each wins
# An 8B model on 512 H100s in four islands, of which each GPU can send 400 Gbit/s out at best and 1/8 Gbit/s at worst.
# The planner's step, over the best there is.


# %%
def apart_by(gigabits):
    """64 machines in islands of 128 GPUs."""
    cluster = load_cluster("communicate/islands.yaml")
    spine = dataclasses.replace(cluster.links.spine, bandwidth=gigabits / 8)
    return dataclasses.replace(
        cluster, links=dataclasses.replace(cluster.links, spine=spine)
    )


large = mt.load("../configs/llama3_8b.yaml", [
    "mesh.data=512", "mesh.tensor=1", "mesh.pipeline=1", "parallel.schedule=gpipe", "parallel.virtual_stages=1",
    "parallel.microbatches=1", "parallel.sequence_parallel=false", "parallel.remat=selective", "train.global_batch_size=512",
])  # fmt: skip
over = ["mesh.islands=4", "parallel.reduce.over=islands"]
methods = {"no islands": [], "islands": over[:1]}
methods |= {
    way: [*over, f"parallel.reduce.compression={way}"]
    for way in ("bfloat16", "int8", "int4", "powersgd")
}
methods |= {
    f"DiLoCo, every {every}": [*over[:1], f"parallel.sync.every={every}"]
    for every in (10, 100)
}
gigabits = np.geomspace(1 / 8, 400, 15)
clusters = [apart_by(rate) for rate in gigabits]
times = {}
for way, overrides in methods.items():
    config = mt.load(large, overrides)
    times[way] = np.array([mt.plan(config, cluster).seconds for cluster in clusters])
best = min(t.min() for t in times.values())
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for way, look in zip(
    times, ("k-", "k--", "C1-", "C3-", "C5-", "C0-", "C2:", "C2--"), strict=True
):
    axes.semilogx(gigabits, best / times[way], look, label=way)
axes.set(xlabel="Gbit/s of a GPU out of its island", ylabel="share of the best speed")
axes.legend(frameon=False, fontsize=8)
plt.show()


def least(way):
    """Gbit/s down to which nine tenths of the speed are kept, between two points of the picture."""
    kept = np.log(best / times[way] / 0.9)
    return np.exp(np.interp(0, kept, np.log(gigabits)))


for way in times:
    print(f"{way:17} keeps 90% of the speed down to {least(way):5.1f} Gbit/s a GPU")
assert (
    least("islands")
    > least("bfloat16")
    > least("int8")
    > least("int4")
    > least("DiLoCo, every 100")
)

# %% [markdown]
# Read from right to left. In one building, with a card of 400 Gbit/s a GPU, nothing here is worth its trouble: all
# lines lie within a few per cent. Agarwal et al. (2022) found compression faster in 6 of more than 200 set-ups of data
# centres, and this is why. An order of magnitude below int8 pays, and costs nothing that can be measured in the loss;
# another one below, PowerSGD and int4, which need feedback and a whole float32 gradient of memory a device; then only
# fewer meetings help, which change what is trained: `experiments/README.md`, "Communication", has what the
# quickstart's loss says of each.
#
# ## Things to try
# - `built("mesh.islands=4")`: shards are twice as large, and across goes $2 \cdot 3/4$ of each. Where is the sum of
#   both axes least?
# - `parallel.reduce.over=islands` with `int8`: which of the two collectives is it now that sends bytes, and which
#   float32?
# - Set `parallel.sync.start` to 12 and train `alone` for 24 steps beside `islands`. Then with the published 0.7 and
#   0.9 from the first step on.
# - Give `apart_by` 10 ms of latency in place of 50 µs, as between continents. Which lines move?
