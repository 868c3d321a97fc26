# %% [markdown]
# # 8 The planner: what fits, what it costs, where scaling ends
# What will a run of 8, 70 or 175 billion parameters hold, send and take on hundreds or thousands of GPUs? The planner
# answers on a laptop, without a device, from the model's shapes, the same placement and schedule that a run uses, and
# a description of a cluster. You will see a layout that does not fit and what mends it, the best of all layouts, where
# more devices stop helping and why, what failures cost, and how far all this is from what others have measured.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np

import meshtrain as mt
from meshtrain.plan import advice, failures, scaling
from meshtrain.plan.report import layout
from meshtrain.plan.search import reason, search
from meshtrain.units import size

# %% [markdown]
# ## A plan
# Llama-3 8B on 64 H100s, eight to a node. On the left what the fullest device holds, on the right where a step's time
# goes.

# %%
small = mt.load("../configs/llama3_8b.yaml")
plan = mt.plan(small, "h100")
plan

# %% [markdown]
# How much of this can one derive? With $N$ parameters, mixed precision and ZeRO-1 (Rajbhandari et al. 2020, section
# 3.1): float32 masters and two moments, $12N$ bytes, over *all* devices; weights in bfloat16, $2N$, and gradients in
# float32, $4N$, over tensor and pipeline only. And of floating-point operations a token takes $6N + 12\,L\,H\,Q\,T$
# (Chowdhery et al. 2022, PaLM, appendix B), the embedding not counted, being no product.

# %%
held = {item.name: item.nbytes for item in plan.memory}
N, mesh, model, train = plan.parameters, small.mesh, small.model, small.train
state = held["float32 masters"] + held["adamw state"]
assert np.isclose(state, 12 * N / mesh.devices, rtol=1e-3)
assert np.isclose(
    held["weights in compute dtype"], 2 * N / (mesh.tensor * mesh.pipeline), rtol=1e-3
)
assert np.isclose(
    held["float32 gradient sums"], 4 * N / (mesh.tensor * mesh.pipeline), rtol=1e-3
)

tokens = train.global_batch_size * train.sequence_length
products = N - model.vocab_size * model.d_model
flops = tokens * (
    6 * products + 12 * model.layers * model.d_model * train.sequence_length
)
peak = plan.cluster.accelerator.flops("bfloat16")
print(
    f"MFU {flops / plan.seconds / mesh.devices / peak:.1%} by the formula, {plan.mfu:.1%} by the planner"
)
assert np.isclose(flops / plan.seconds / mesh.devices / peak, plan.mfu, rtol=1e-3)
assert np.isclose(sum(seconds for _, seconds in plan.time.parts()), plan.seconds)

# %% [markdown]
# ## What does not fit
# 70 billion parameters on 512 H100s, only tensor parallel within the nodes and data parallel between them. The state
# fits easily. What does not are the activations that 80 layers keep for the backward.

# %%
large = {
    "model": {
        "layers": 80,
        "d_model": 8192,
        "heads": 64,
        "kv_heads": 8,
        "d_ff": 28672,
        "vocab_size": 128256,
    },
    "mesh": {"data": 64, "tensor": 8},
    "parallel": {"zero_stage": 1, "sequence_parallel": True},
    "precision": {"compute": "bfloat16"},
    "train": {"global_batch_size": 512, "sequence_length": 8192},
}
too_much = mt.plan(mt.load(large), "h100")
assert (
    not too_much.fits
    and max(too_much.memory, key=lambda item: item.nbytes).kind == "activations"
)
too_much

# %% [markdown]
# `advice` tries the steps that tend to help (a higher ZeRO stage, recomputation, more microbatches, another mesh),
# alone and combined, and names the cheapest that fit. The command `python -m meshtrain.plan` says the same.

# %%
changes = advice.cheapest(too_much)
mended = mt.plan(mt.load(large, list(changes[0].settings)), "h100")
assert mended.fits
print(advice.sentence(too_much, changes))

# %% [markdown]
# But small steps from a bad place lead to a mediocre one. `search` goes through *all* layouts of these devices:
# meshes, schedules, microbatches, ZeRO stages, recomputation. It takes seconds, since what a choice does not change is
# computed once.

# %%
found = search(mended.config, mended.cluster, devices=512)
print(f"{found.legal:,} legal layouts, {found.fitting:,} of them fit")
for best in found.plans[:4]:
    print(
        f"{best.seconds:.2f} s, {size(best.bytes)}: {layout(best.config)}\n    {reason(best, found.plans[0])}"
    )
assert found.plans[0].fits and found.plans[0].seconds < mended.seconds
print(
    f"\nthe mended layout takes {mended.seconds / found.plans[0].seconds:.2f} times as long as the best"
)

# %% [markdown]
# ## What it costs
# GPT-3's shape (Brown et al. 2020, table 2.1) on 8,192 GPUs, 300 billion tokens, with a batch of 1,536 sequences
# (Narayanan et al. 2021, section 5.1).

# %%
gpt3 = {
    "model": {
        "family": "gpt2",
        "layers": 96,
        "d_model": 12288,
        "heads": 96,
        "vocab_size": 51200,
    },
    "mesh": {"data": 128, "tensor": 8, "pipeline": 8},
    "parallel": {
        "schedule": "interleaved",
        "virtual_stages": 3,
        "microbatches": 12,
        "sequence_parallel": True,
    },
    "precision": {"compute": "bfloat16"},
    "train": {"global_batch_size": 1536, "sequence_length": 2048},
}
on = {name: mt.plan(mt.load(gpt3), name) for name in ("a100-80", "h100")}
for name, p in on.items():
    days = 300e9 / p.tokens_per_second / 86400
    hours = days * 24 * p.devices / 1e6
    print(
        f"{name:8} {p.seconds:.2f} s a step, MFU {p.mfu:.1%}, {days:.1f} days, {hours:.2f} million device-hours"
    )
peaks = {name: p.cluster.accelerator.flops("bfloat16") for name, p in on.items()}
faster, richer = (
    on["a100-80"].seconds / on["h100"].seconds,
    peaks["h100"] / peaks["a100-80"],
)
print(f"the H100 has {richer:.2f} times the peak, and is {faster:.2f} times as fast")
assert all(p.fits for p in on.values()) and faster < richer

# %% [markdown]
# ## Where scaling ends
# Llama-3 8B again, with its batch of 128 sequences, on more and more devices. Amdahl (1967): if a share $s$ of the
# first step does not shrink, $n$ times as many devices reach an efficiency of $1 / (1 + s(n-1))$. The plan names that
# share: collectives over data, bubble, optimizer.

# %%
points = scaling.strong(small, plan.cluster)
n = np.array([point.devices / points[0].devices for point in points])
reached = np.array([point.efficiency for point in points])
amdahl = 1 / (1 + points[0].serial * (n - 1))
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(n * 64, amdahl, "k--")
axes.plot(n * 64, reached, "k-o")
axes.legend([f"Amdahl, s = {points[0].serial:.3f}", "plan"])
axes.set(xlabel="devices", ylabel="throughput a device", ylim=(0, 1.05))
for point, law in zip(points, amdahl, strict=True):
    print(f"{point.devices:4} devices: plan {point.efficiency:.3f}, Amdahl {law:.3f}")
assert (
    np.allclose(reached[:3], amdahl[:3], rtol=0.015) and reached[3] < 0.75 * amdahl[3]
)

# %% [markdown]
# One number of the first plan foretells two doublings to a percent. Then the law breaks: something that stood still
# has begun to *grow*. Count in device-seconds a step, and useful work stays level:

# %%
useful = ("matmul", "attention", "memory", "head")
for point in points:
    time = point.plan.time
    parts = {"useful": sum(getattr(time, key) for key in useful), "bubble": time.bubble}
    parts |= {"data": time.data, "tensor, pipeline": time.tensor + time.pipeline}
    told = ", ".join(f"{k} {s * point.devices:.0f}" for k, s in parts.items())
    print(f"{point.devices:4} devices: {told}; microbatches", end=" ")
    print(point.plan.config.parallel.microbatches)
bubbles = [point.plan.time.bubble for point in points]
assert np.allclose(bubbles[:3], bubbles[0], rtol=0.03)
assert bubbles[3] > 3 * bubbles[2]
assert points[3].plan.config.parallel.microbatches == 1 < mesh.pipeline

# %% [markdown]
# It is the bubble. With fewer microbatches than stages (here one for two) every one of the 4 chunks of a stage waits
# for the other stage, not only the first: $p - 1 + (v-1)\max(0, p-m)$ chunks of idleness, 4 in place of 1. So the end
# is one of *this layout*, not of the model. Let us search again, on 512:

# %%
again = search(small, scaling.grown(plan.cluster, 512), devices=512).plans[0]
each = again.tokens_per_second / again.devices / (plan.tokens_per_second / plan.devices)
print(f"{layout(again.config)}\nefficiency {each:.2f} in place of {reached[-1]:.2f}")
assert reached[-1] + 0.2 < each < 1

# %% [markdown]
# ## Failures
# Each device fails rarely, thousands together often. With a mean time $M$ between failures and a checkpoint that stops
# training for $C$, little is lost at $\tau = \sqrt{2CM}$ (Young 1974); Daly (2006, equation 37) has further terms.
# First the rate: Llama 3 (Dubey et al. 2024, section 3.3.4) counted 419 unexpected interruptions in 54 days on 16,384
# GPUs, and the planner takes it from there.

# %%
thousands = on["h100"]
cluster = thousands.cluster
rate = cluster.failures_per_device_hour
assert np.isclose(failures.mean_time_between(rate, 16384), 54 * 86400 / 419, rtol=0.02)

between, restart = (
    failures.mean_time_between(rate, thousands.devices),
    cluster.restart_seconds,
)
cost = failures.faults(thousands)
copy, whole = cost.copy, cluster.save_seconds + cost.write
intervals = np.geomspace(2, 2e4, 2001)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.axhline(math.exp(-restart / between), color="k", linewidth=1, linestyle=":")
axes.set(
    xlabel="seconds between checkpoints",
    ylabel="share of time that counts",
    ylim=(0.8, 1),
)
for write, style, name in (
    (copy, "k-", "copied to the host"),
    (whole, "k--", "written to storage"),
):
    share = np.array([failures.goodput(i, write, restart, between) for i in intervals])
    young, best = failures.young(write, between), failures.daly(write, between)
    assert np.isclose(intervals[share.argmax()], best, rtol=0.02)
    assert all(
        share.max() - failures.goodput(best * k, write, restart, between) < 0.01
        for k in (0.5, 2)
    )
    axes.semilogx(intervals, share, style, label=name)
    axes.plot(best, share.max(), "ko")
    print(
        f"{name}: {write:.3f} s each; Young {young:.0f} s, Daly {best:.0f} s, goodput {share.max():.4f}"
    )
axes.legend()
plt.show()

# %% [markdown]
# The curve is flat: twice too often or too seldom costs less than a percent, so that the plan advises the longest
# interval that costs half of one: the store is shared. And the ceiling (dotted), $e^{-R/M}$, is not the checkpoints'
# at all: the restart, $R$ = 300 s, costs as much as they do. So what would make it 90%, the "effective training time"
# that Llama 3's team reports to exceed?

# %%
allowed = -math.log(0.9) * failures.mean_time_between(rate, 16384)
print(
    f"16,384 devices: a failure every {failures.mean_time_between(rate, 16384) / 3600:.1f} h; "
    f"90% is left if a restart takes {allowed / 60:.0f} minutes"
)
lost = 1 - failures.goodput(failures.daly(copy, between), copy, restart, between)
print(f"{(1 - math.exp(-restart / between)) / lost:.0%} of what is lost are restarts")
assert (1 - math.exp(-restart / between)) / lost > 0.4 and allowed > restart

# %% [markdown]
# ## How far off is it?
# Six numbers of each GPU generation (`cluster/accelerators.py`: what share of the peak a product reaches, of a link a
# collective, ...) were *fitted* on published rows, 8 a source at most. `python -m experiments.plan.sources` leaves out
# each source in turn: median 4.8%, worst 42%. And that is still of single steps. Meta's model card of Llama 3 (April
# 2024) gives 1.3 million H100-hours for 8B and 6.4 million for 70B, over 15 trillion tokens:

# %%
for name, p, told in (("8B", plan, 1.3e6), ("70B", found.plans[0], 6.4e6)):
    hours = 15e12 / p.tokens_per_second / 3600 * p.devices
    print(
        f"{name}: {hours / 1e6:.2f} million device-hours planned, {told / 1e6:.1f} reported, x {told / hours:.2f}"
    )
    assert told > hours

# %% [markdown]
# So read a plan as what undisturbed steps of this program take. It knows nothing of restarts, evaluations, experiments
# or slow data, and who trains 8B may care for other things than MFU. Memory is more certain than time: against XLA's
# own analysis of compiled steps mostly within a few percent; packed sequences under a pipeline are planned a fifth too
# high (`docs/benchmarks.md`, "Planner").
#
# ## Things to try
# - `mt.plan(small, "a100-40")` and `mt.plan(small, "b200")`: the same layout elsewhere. One does not fit;
#   `advice.cheapest` mends it. The other is faster, but by less than its peak.
# - Put a price on it: `dataclasses.replace(plan.cluster, price_per_device_hour=2.0)` as the second argument of
#   `mt.plan`, then `.cost`.
# - Load `small` with `["parallel.schedule=1f1b", "parallel.virtual_stages=1"]` and draw the strong scaling again. The
#   serial share is twice as large from the start, but the bubble no longer grows: on 512 devices this is the better of
#   the two.
# - The layout of `gpt3` was a guess. `search(on["h100"].config, on["h100"].cluster, devices=8192)` finds one that is a
#   fifth faster. What did it change?
