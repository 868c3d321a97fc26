# %% [markdown]
# # 5 All-reduce by hand: ring, tree, butterfly, hierarchical, and when each wins
# Data parallelism ends every step with an all-reduce: each rank has a gradient, and all ranks need the sum. Here four
# ways to do it are written out as messages between neighbours, `jax.lax.ppermute`, and compared with `jax.lax.psum`:
# what comes out, how many messages one waits for, and how many bytes they carry, counted from the compiled program. A
# model of two numbers, latency and bandwidth, then says which way is fastest at which size, and where the planner of
# this project changes from one to another.

# %%
import meshtrain as mt

mt.fake_devices(8)

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.lax import axis_index, axis_size, ppermute
from jax.sharding import Mesh, PartitionSpec

devices = np.array(jax.devices()[:8])
flat = Mesh(devices, ("rank",))
two_nodes = Mesh(devices.reshape(2, 4), ("node", "local"))

N = 8 * 512  # numbers on each rank
S = 4 * N  # bytes of them
vectors = np.random.default_rng(0).standard_normal((8, N)).astype(np.float32)

# %% [markdown]
# ## Ring
# Cut the vector into $n$ parts. In the first half, reduce-scatter, part after part travels once around the ring, and
# each rank that it passes adds its own: after $n-1$ messages rank $i$ holds part $i$ of the sum. In the second half,
# all-gather, the finished parts travel around once more. Each message is $S/n$ (Patarasuk & Yuan 2009).


# %%
def ring_scatter(x, axis):
    """Rank i ends with part i of the sum: [N] -> [N / n]."""
    n, me = axis_size(axis), axis_index(axis)
    parts = x.reshape(n, -1)
    moving = parts[(me - 1) % n]
    for step in range(2, n + 1):
        moving = (
            ppermute(moving, axis, [(i, (i + 1) % n) for i in range(n)])
            + parts[(me - step) % n]
        )
    return moving


def ring_gather(part, axis):
    """Every rank ends with all parts: [N / n] -> [N]."""
    n, me = axis_size(axis), axis_index(axis)
    met = [part]
    for _ in range(n - 1):
        met.append(ppermute(met[-1], axis, [(i, (i + 1) % n) for i in range(n)]))
    # what came i messages ago began i ranks before
    return jnp.stack(met)[(me - jnp.arange(n)) % n].reshape(-1)


def ring(x, axis="rank"):
    return ring_gather(ring_scatter(x, axis), axis)


# %% [markdown]
# ## Tree
# Pairs of ranks 1 apart add, then those 2 apart, then 4: rank 0 has the sum after $k = \lceil \log_2 n \rceil$
# messages. The same way back down tells everybody. Each message is the whole vector, and a rank that is not named in
# `ppermute` receives zeros.


# %%
def distances(n):
    return [2**i for i in range((n - 1).bit_length())]


def tree(x, axis="rank"):
    n, me = axis_size(axis), axis_index(axis)
    for far in distances(n):
        x += ppermute(x, axis, [(i + far, i) for i in range(0, n - far, 2 * far)])
    for far in reversed(distances(n)):
        told = ppermute(x, axis, [(i, i + far) for i in range(0, n - far, 2 * far)])
        x = jnp.where(me % (2 * far) == far, told, x)
    return x


# %% [markdown]
# ## Butterfly
# Recursive halving, then recursive doubling. Partners $n/2$ apart exchange halves: each keeps one half and adds the
# partner's to it. Then partners $n/4$ apart do so with what is left, and so on: $k$ messages of $S/2, S/4, \dots$ make
# the same reduce-scatter as the ring's $n-1$. Doubling goes the way back (Thakur, Rabenseifner & Gropp 2005, section
# 4.5).


# %%
def butterfly(x, axis="rank"):
    """Among ranks that are a power of two."""
    n, me = axis_size(axis), axis_index(axis)
    partners = {far: [(i, i ^ far) for i in range(n)] for far in distances(n)}
    for far in reversed(partners):
        mine, halves = me // far % 2, x.reshape(2, -1)
        x = halves[mine] + ppermute(halves[1 - mine], axis, partners[far])
    for far in partners:
        pair = jnp.stack([x, ppermute(x, axis, partners[far])])
        x = jnp.where(me // far % 2, pair[::-1], pair).reshape(-1)
    return x


# %% [markdown]
# ## Hierarchical
# Two nodes of four ranks: links within a node are fast, those between nodes slow. Reduce-scatter within each node,
# all-reduce of a quarter with the like rank of the other node, all-gather within the node. It is the ring's two
# halves, on two axes.


# %%
def hierarchical(x):
    return ring_gather(ring(ring_scatter(x, "local"), "node"), "local")


# %% [markdown]
# ## What comes out
# `run` compiles each as one program for all ranks, and keeps what every rank ends with.

# %%
from meshtrain.hlo import Module, byte_count, collectives, replica_groups


def run(all_reduce, mesh, x):
    """What every rank ends with [ranks, N], and the compiled program."""
    rows = PartitionSpec(mesh.axis_names)
    spread = jax.shard_map(
        lambda row: all_reduce(row[0])[None], mesh=mesh, in_specs=rows, out_specs=rows
    )
    compiled = jax.jit(spread).lower(x).compile()
    return np.asarray(compiled(x)), compiled


ways = {"ring": (ring, flat), "tree": (tree, flat), "butterfly": (butterfly, flat)}
ways["hierarchical"] = hierarchical, two_nodes
ended, programs = {}, {}
for name, (all_reduce, mesh) in ways.items():
    ended[name], programs[name] = run(all_reduce, mesh, vectors)
ended["psum"], programs["psum"] = run(
    lambda row: jax.lax.psum(row, "rank"), flat, vectors
)

# Seven additions in any order err by at most 7 u / (1 - 7 u) sum |x|, u = 2^-24 (Higham 2002, section 4.2).
exact, u = vectors.sum(0, dtype=np.float64), 2.0**-24
bound = 7 * u / (1 - 7 * u) * np.abs(vectors).sum(0, dtype=np.float64)
for name, sums in ended.items():
    assert (sums == sums[0]).all(), f"{name}: the ranks differ"
    assert (np.abs(sums[0] - exact) <= bound).all(), f"{name}: not the sum"
print(f"{', '.join(ended)}: the sum, and the same bits on all 8 ranks")

# %% [markdown]
# The same bits on all ranks is what training needs: replicas that differ by one bit drift apart. The same bits in all
# *ways* is more than one gets, since each adds in an order of its own and floating-point addition is not associative.

# %%
for name in ("tree", "butterfly", "hierarchical"):
    print(
        f"{name:12} other bits than the ring in {(ended[name][0] != ended['ring'][0]).sum():4} of {N} sums"
    )
assert any((ended[name][0] != ended["ring"][0]).any() for name in ways)

# %% [markdown]
# ## Who sends to whom
# The compiled program names each message's sender and receiver. Time goes down, a thicker arrow carries more bytes.


# %%
def messages(name):
    """Of each step of a program, in order: bytes of a message, and the (sender, receiver) pairs."""
    steps = [op for op, _, _ in Module(programs[name].as_text()).walk()]
    return [(byte_count(op.result), replica_groups(op.attributes, 8)) for op in steps]


figure, panels = plt.subplots(1, 4, figsize=(10, 4), sharey=True)
for panel, name in zip(panels, ways, strict=True):
    for step, (size, pairs) in enumerate(messages(name)):
        for sender, receiver in pairs:
            style = {"arrowstyle": "->", "lw": 0.6 + 2.4 * size / S}
            panel.annotate(
                "", (receiver, step + 0.85), (sender, step), arrowprops=style
            )
    panel.set(
        title=name, xlabel="rank", xlim=(-0.5, 7.5), ylim=(14, -0.4), xticks=range(8)
    )
panels[0].set_ylabel("step")
plt.tight_layout()
plt.show()
assert [len(messages(name)) for name in ways] == [14, 6, 6, 8]
assert all(
    sender != receiver
    for name in ways
    for _, pairs in messages(name)
    for sender, receiver in pairs
)

# %% [markdown]
# ## Steps and bytes
# A step costs latency; bytes cost time on the wire. Two counts of bytes matter: those that one waits for, a message of
# each step after the other, and those that the busiest rank sends. In no way can every rank send fewer than
# $2S\frac{n-1}{n}$ (Patarasuk & Yuan 2009); the tree's root sends the whole vector three times, while ever more ranks
# are idle.

# %%
n, k = 8, 3
theory = {  # steps, bytes one after the other, bytes of the busiest rank
    "ring": (2 * (n - 1), 2 * S * (n - 1) // n, 2 * S * (n - 1) // n),
    "tree": (2 * k, 2 * k * S, k * S),
    "butterfly": (2 * k, 2 * S * (n - 1) // n, 2 * S * (n - 1) // n),
    "hierarchical": (2 * 3 + 2 * 1, *[2 * S * 3 // 4 + 2 * (S // 4) // 2] * 2),
}
print(f"{'':14}{'steps':>6}{'waited for':>12}{'sent':>9}   in S = {S:,} bytes")
for name in ways:
    steps = messages(name)
    waited = sum(size for size, _ in steps)
    by_rank = [
        sum(size for size, pairs in steps for sender, _ in pairs if sender == i)
        for i in range(n)
    ]
    print(f"{name:14}{len(steps):6}{waited / S:12.2f}{max(by_rank) / S:9.2f}")
    assert (len(steps), waited, max(by_rank)) == theory[name]
    assert all(
        c.kind == "collective-permute"
        for c in collectives(programs[name], ways[name][1])
    )

# %% [markdown]
# The ring and the butterfly send the least there is; so does the hierarchical way, which only sends most of it where
# links are fast. `collectives` tells the same by mesh axis: of its bytes, a seventh crosses between the nodes.

# %%
sent = collectives(programs["hierarchical"], two_nodes)
assert sent.traffic == {"local": 1.5 * S, "node": 0.25 * S}
sent

# %% [markdown]
# ## Seconds
# The alpha-beta model (Thakur, Rabenseifner & Gropp 2005, section 3): a message takes $\alpha$ seconds and $\beta$
# more a byte, so a program takes $\text{steps} \cdot \alpha + \text{bytes} \cdot \beta$. The planner's formulas are in
# `meshtrain/cluster/algorithms.py`; here they meet what was just counted, on 8 H100s in one machine.

# %%
from meshtrain.cluster import algorithms
from meshtrain.cluster.algorithms import ALL_REDUCE
from meshtrain.cluster.cluster import named
from meshtrain.cluster.topology import Group, Hop

machine = named("h100", 8).group(8, 1)
alpha, beta = machine.latency, 1 / machine.bytes_per_second
print(
    f"alpha {alpha * 1e6:.1f} us, beta {beta * 1e12:.2f} ps a byte: {1e-9 / beta:.0f} GB/s, as collectives reach it"
)

for name in ("ring", "butterfly"):
    seconds = (
        len(messages(name)) * alpha + sum(size for size, _ in messages(name)) * beta
    )
    assert np.isclose(
        seconds, algorithms.ALGORITHMS[name](ALL_REDUCE, machine, S), rtol=1e-12
    )

# hierarchical: each axis at the latency and bandwidth of its own links
fast, slow = Hop("node", 4, 1e-6, 400e9, 1), Hop("rail", 2, 9e-6, 50e9, 4)
seconds = sum(
    h.latency + c.bytes / h.bytes_per_second
    for c in sent
    for h in [fast if c.axis == "local" else slow]
)
assert np.isclose(
    seconds, algorithms.hierarchical(ALL_REDUCE, Group(8, (fast, slow)), S), rtol=1e-12
)

# %% [markdown]
# ## When each wins
# Every formula is a straight line in $S$: a latency and a slope. Two lines cross at one size; ring and tree, for
# example, where $2(n-1)\alpha + 2S\frac{n-1}{n}\beta = 2k\alpha + 2S\beta$, so at $S = n\,(n-1-k)\,\alpha/\beta$.
# Left: 6 ranks in one machine. Right: 16 ranks on two machines, where the links between them are slower in both
# numbers.


# %%
def crossing(one, other, group):
    """The size at which two ways take the same time."""
    at = [
        [algorithms.ALGORITHMS[way](ALL_REDUCE, group, size) for size in (0, 2**40)]
        for way in (one, other)
    ]
    (a, a_far), (b, b_far) = at
    return 2**40 * (b - a) / ((a_far - a) - (b_far - b))


def free(ranks):
    """So many H100s with the choice of all four, which NCCL does not have."""
    return dataclasses.replace(named("h100", ranks).group(ranks, 1), library="")


six_ranks, sixteen = free(6), free(16)
marked = [
    (six_ranks, "6 ranks, 1 machine", "tree", "ring"),
    (sixteen, "16 ranks, 2 machines", "hierarchical", "butterfly"),
]
sizes = np.geomspace(2**16, 2**29, 80)
figure, panels = plt.subplots(1, 2, figsize=(10, 3.6))
looks = {"ring": "-", "butterfly": "--", "tree": ":", "hierarchical": "-."}
for panel, (group, title, one, other) in zip(panels, marked, strict=True):
    for way, look in looks.items():
        times = np.array(
            [algorithms.ALGORITHMS[way](ALL_REDUCE, group, size) for size in sizes]
        )
        if np.isfinite(times).all():
            panel.loglog(sizes, times * 1e6, look, color="black", lw=1.3, label=way)
    meet = crossing(one, other, group)
    panel.axvline(meet, color="grey", lw=0.8)
    panel.set(title=f"{title}: {other} from {meet / 1e6:.1f} MB", ylim=(10, 4e3))
    panel.set(xlabel="bytes of the vector", ylabel="microseconds")
    panel.legend()
plt.tight_layout()
plt.show()
assert np.isclose(
    crossing("tree", "ring", six_ranks), 6 * (6 - 1 - 3) * alpha / beta, rtol=1e-9
)

# %% [markdown]
# ## What the planner takes
# `algorithms.best` takes the lowest line. It changes where the lines cross, and not a byte before.

# %%
for group, _, one, other in marked:
    meet = crossing(one, other, group)
    assert algorithms.best(ALL_REDUCE, group, meet * 0.999).algorithm == one
    assert algorithms.best(ALL_REDUCE, group, meet * 1.001).algorithm == other

taken = [algorithms.best(ALL_REDUCE, free(8), 2.0**e).algorithm for e in range(10, 33)]
print("8 ranks, from 1 KiB to 4 GiB:", ", then ".join(dict.fromkeys(taken)))

# %% [markdown]
# ## Why one `psum` stays
# The compiled `psum` is one instruction. Which of the four it becomes is left to the one who knows the links and the
# size when it runs: NCCL on GPUs, the compiler on a TPU. XLA can also join it with others, and do other work between
# its start and its end; fourteen messages, each waiting for the one before, it must keep.

# %%
only = collectives(programs["psum"], flat)
assert (
    [c.kind for c in only] == ["all-reduce"]
    and only[0].bytes == S
    and only[0].sent == theory["ring"][1]
)
only

# %% [markdown]
# ## Things to try
# - Four nodes of two, `devices.reshape(4, 2)`: a rank sends $1.75\,S$ as before. How many of them cross between nodes,
#   and in how many steps?
# - Write recursive *doubling*: partners exchange their whole vectors, $x \leftarrow x + \text{partner's}$, for each
#   distance. $k$ steps and $k S$ bytes: half the latency of the butterfly. Below which size is it ahead of it? (Thakur
#   et al. use it for short vectors.)
# - Let the ring turn the other way in one half only, or swap two partners of the butterfly: which assert finds it?
# - Write the ring's messages as one in a `jax.lax.fori_loop`: `collectives` then shows one permute a half, and its
#   `trips`.
