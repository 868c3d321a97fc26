# %% [markdown]
# # 4 Pipelines: bubble, memory, and a schedule of your own
# A pipeline cuts the layers into stages and the batch into microbatches. *Who does what when* is then open, and it decides two things:
# how long stages wait for each other, and how many microbatches they must remember. Here that answer is a table. You will see the
# well-known tables, what each costs, why one model of execution is not like the other, and in the end you will write one yourself, have it proved,
# drawn and simulated, and train with it.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import meshtrain as mt
from meshtrain.schedule import (
    Durations,
    Schedule,
    make_table,
    parse_csv,
    simulate,
    validate,
)

mt.fake_devices(4)

# %% [markdown]
# ## All forwards, then all backwards
# GPipe (Huang et al. 2019, section 2.3). A row is a stage, a column a clock; `F3` is the forward of microbatch 3, `B3` its backward.
# What a stage sends in a clock, its neighbour can read from the next clock on.

# %%
gpipe = make_table("gpipe", stages=4, microbatches=8)
gpipe

# %% [markdown]
# A stage has $m(F+B)$ to do. The last stage must wait $(p-1)F$ for its first input; and when it is done, $(p-1)B$ pass until the first
# stage has its last cotangent. Hence a step takes $(m+p-1)(F+B)$, and the share of the time in which a stage waits, the *bubble*, is
#
# $$\frac{p-1}{m+p-1}$$
#
# whatever $F$ and $B$ are. `simulate` knows nothing of this formula: it plays the table, op by op.

# %%
backward = {"input_grad": 1.0, "weight_grad": 1.0}  # in forwards: B = 2 F
for p in (1, 2, 3, 4, 8):
    for m in (1, 2, 4, 8, 32):
        for f in (1.0, 0.3):
            played = simulate(
                make_table("gpipe", p, m),
                Durations(forward=f, **backward),
                execution="asynchronous",
            )
            assert np.isclose(played.makespan, (m + p - 1) * (f + 2.0))
            assert np.isclose(played.bubble_fraction, (p - 1) / (m + p - 1))

simulate(gpipe, Durations(**backward), execution="asynchronous")

# %% [markdown]
# ## One forward, one backward
# The curve under that picture is the price: at the turn every stage remembers all $m$ microbatches. 1F1B (Narayanan et al. 2021,
# section 2.2.1) does a backward as soon as there is one. It waits exactly as long, but what it remembers no longer grows with $m$.

# %%
one = make_table("1f1b", stages=4, microbatches=8)
for p, m in [(2, 4), (4, 8), (4, 32), (8, 8)]:
    played = simulate(
        make_table("1f1b", p, m), Durations(**backward), execution="asynchronous"
    )
    assert np.isclose(played.bubble_fraction, (p - 1) / (m + p - 1))
    assert played.peak_in_flight.tolist() == [
        min(m, 2 * (p - 1 - s) + 1) for s in range(p)
    ]
    assert (
        simulate(make_table("gpipe", p, m), Durations()).peak_in_flight.tolist()
        == [m] * p
    )

one

# %% [markdown]
# The papers' 1F1B remembers $p-s$ microbatches on stage $s$, this one up to $2(p-1-s)+1$. The table shows why: a clock here has room for a
# forward *and* a backward, a hop takes a clock, and so microbatch 0 is back on stage 0 after $2(p-1)$ clocks, in each of which another
# forward is begun. Should one rather wait, and hold fewer? That depends on how stages execute.
#
# ## Two models of execution
# - `asynchronous`: each stage does its ops in the table's order, each as soon as its input has come. The model of the papers.
# - `lockstep`: meshtrain compiles *one* program for all devices. On an accelerator, if any stage has a forward in a clock, all compute
#   one (the idle ones mask the result away). So a clock costs the sum of the slots that *any* stage uses in it.
#
# For these tables the second is one matrix product:

# %%
for name, v in [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb_h1", 1),
    ("zb_interleaved", 2),
    ("v_1f1b", 2),
]:
    table = make_table(name, 4, 8, v)
    used = (
        (table.cells[..., 0] >= 0).any(axis=1).sum(axis=0)
    )  # clocks in which some stage has an F, a B, a W
    cost = np.array([1, 1, 1] if table.split else [1, 2, 0]) / v
    played = simulate(table, Durations(1 / v, 1 / v, 1 / v), execution="lockstep")
    assert np.isclose(played.makespan, used @ cost)
    print(
        f"{name:15} clocks with F, B, W: {used.tolist()!s:13} lockstep makespan {used @ cost:5.2f}"
    )

# %% [markdown]
# ## Smaller pieces: interleaved
# Give each stage $v$ chunks of $1/v$ of its layers (Narayanan et al. 2021, section 2.2.2). The stages wait for chunks now, not for whole
# stages: the wait is $(p-1)(F+B)/v$. `F3.1` is the forward of microbatch 3 through the stage's chunk 1 (the paler ones are chunk 0).

# %%
for v in (1, 2, 4):
    played = simulate(
        make_table("interleaved", 4, 8, v), Durations(1 / v, 1 / v, 1 / v)
    )
    assert np.isclose(played.idle, (4 - 1) * (1 + 2) / v).all()

make_table("interleaved", 4, 4, 2)

# %% [markdown]
# The price: $v$ times as many messages, on a ring, and each has less work to hide behind. Let a message take longer, in units of a
# whole stage's forward, and the order turns round.

# %%
messages = np.linspace(0, 1, 21)
spans = {}
for v in (1, 2, 4):
    table = make_table("interleaved", 4, 8, v)
    spans[v] = [
        simulate(table, Durations(1 / v, 1 / v, 1 / v, message=c)).makespan
        for c in messages
    ]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (v, span), style in zip(spans.items(), ("-", "--", ":"), strict=True):
    axes.plot(messages, span, "k" + style)
    axes.annotate(f"v = {v}", (1, span[-1]), xytext=(4, -3), textcoords="offset points")
axes.set(
    xlabel="one message, in forwards of a stage",
    ylabel="makespan, in forwards",
    xlim=(0, 1.12),
)
assert (
    spans[4][0] < spans[2][0] < spans[1][0]
    and spans[4][-1] > spans[2][-1] > spans[1][-1]
)

# %% [markdown]
# ## Zero bubble
# The backward is two products: the gradient of the input (`I`), for which the stage before waits, and that of the weights (`W`), for
# which nobody waits. Split them, and W can fill the holes (Qi et al. 2023, ZB-H1): the wait falls from $(p-1)(F+B)$ to $(p-1)(F+I-W)$.
# In our lockstep execution less is gained, $(p-1)(F+I)$: a clock in which *one* stage does a W costs all of them a W.

# %%
zero = make_table("zb_h1", 4, 8)
f, i, w = 1.0, 1.0, 0.8
alone, lockstep = (
    simulate(zero, Durations(f, i, w), execution)
    for execution in ("asynchronous", "lockstep")
)
assert np.isclose(alone.idle.max(), 3 * (f + i - w)) and np.isclose(
    lockstep.idle.max(), 3 * (f + i)
)
alone

# %% [markdown]
# The underlined cells are the *critical path*: only they are worth shortening.
#
# ## In a V
# With two chunks a stage one may also deal the layers out *there and back*: stage 0 has the first chunk and the last. A microbatch comes
# home to where it began, and every stage remembers the same (Qi et al. 2024, section 3): $2p$ halves, against $2p-1$ wholes of 1F1B.

# %%
for p in (2, 4, 8):
    assert (
        simulate(make_table("v_1f1b", p, 2 * p, 2), Durations()).peak_in_flight.tolist()
        == [2 * p] * p
    )

make_table("v_1f1b", 4, 4, 2)

# %% [markdown]
# All of them, side by side: 4 stages, 8 microbatches, $F = I = W = 1$. "Held" is the peak in flight of the fullest stage, in whole stages.

# %%
print(
    f"{'schedule':16}{'chunks':>6}{'clocks':>7}{'bubble: alone':>15}{'lockstep':>10}{'held':>6}"
)
bubbles, held = {}, {}
for name, entry in mt.schedule.SCHEDULES.items():
    v = entry.chunks or 2
    table = make_table(name, 4, 8, v)
    both = [
        simulate(table, Durations(1 / v, 1 / v, 1 / v), execution)
        for execution in ("asynchronous", "lockstep")
    ]
    bubbles[name], held[name] = (
        [played.bubble_fraction for played in both],
        both[0].peak_in_flight.max() / v,
    )
    print(
        f"{name:16}{v:6}{table.clocks:7}{bubbles[name][0]:15.1%}{bubbles[name][1]:10.1%}{held[name]:6.1f}"
    )
assert min(held, key=held.get) == "v_1f1b"
for execution in (0, 1):
    assert min(bubbles, key=lambda name: bubbles[name][execution]) == "zb_interleaved"
assert all(lockstep >= alone - 1e-9 for alone, lockstep in bubbles.values())

# %% [markdown]
# ## A schedule of your own
# A table is text: a title, the stages' names, a line a clock, a cell a stage. Our aim: a frugal 1F1B for 2 stages, with never more than two
# microbatches on stage 0. A first attempt, with two mistakes that everyone makes once. `validate` names clock, line, cell and reason.


# %%
def refused(text):
    try:
        validate(parse_csv(text))
    except mt.ConfigError as error:
        return str(error)


attempt = """\
# schedule=frugal stages=2 microbatches=4
stage 0,stage 1
F0,
F1,F0 B1
B0,F1 B0
F2 B1,
F3 B2,F2 B2
B3,F3 B3
"""
print(refused(attempt))
assert "it needs the loss of F1" in refused(attempt)

# %% [markdown]
# On stage 1 the backwards stand the wrong way round. We swap them:

# %%
attempt = attempt.replace("F1,F0 B1\nB0,F1 B0\n", "F1,F0 B0\nB0,F1 B1\n")
print(refused(attempt))
assert "sends in clock 4" in refused(attempt)

# %% [markdown]
# A message takes a clock: what stage 1 does in clock 4, stage 0 can have in clock 5. So B2 goes one line down, and B3 gets a line of its own.

# %%
frugal = parse_csv(
    attempt.replace("F3 B2,F2 B2\nB3,F3 B3\n", "F3,F2 B2\nB2,F3 B3\nB3,\n")
)
validate(frugal)
frugal

# %%
rival = make_table("1f1b", stages=2, microbatches=4)
for table in (rival, frugal):
    alone, lockstep = (
        simulate(table, Durations(), execution)
        for execution in ("asynchronous", "lockstep")
    )
    spans = f"makespan {alone.makespan:g} alone, {lockstep.makespan:g} in lockstep"
    print(f"{table.name:7} {table.clocks} clocks, {spans}, held {alone.peak_in_flight}")
assert alone.makespan == simulate(rival, Durations(), "asynchronous").makespan
assert lockstep.makespan - simulate(rival, Durations(), "lockstep").makespan == 3
assert simulate(frugal, Durations()).peak_in_flight.tolist() == [2, 1]
simulate(frugal, Durations(), "lockstep")

# %% [markdown]
# It holds two in place of three. Alone that costs nothing; in lockstep it costs a clock more, $F+B$. Now train with it: a config takes the
# file's path where the name of a schedule stands. Loss and gradient of a step must be those of one device without a pipeline.

# %%
path = Path(tempfile.mkdtemp()) / "frugal.csv"
path.write_text(frugal.to_csv())
config = {
    "model": {"layers": 4, "d_model": 32, "heads": 4, "vocab_size": 260},
    "data": {"source": "synthetic"},
    "train": {"global_batch_size": 16, "sequence_length": 32},
}
batch = mt.open_data(mt.load(config))[0].batch(0)


def step(program):
    """Loss and gradient norm of the first step, and the bytes that the compiled program needs besides its state."""
    compiled = program.lower().compile()
    _, metrics = compiled(program.init(), program.place(batch))
    return (
        float(metrics["loss"]),
        float(metrics["grad_norm"]),
        compiled.memory_analysis().temp_size_in_bytes,
    )


*reference, _ = step(mt.Program(mt.load(config)))
settings = ["mesh.pipeline=2", "parallel.microbatches=4", f"parallel.schedule={path}"]
mine = mt.Program(mt.load(config, settings))
*found, _ = step(mine)
print(
    "one device:",
    [f"{value:.4f}" for value in reference],
    " frugal:",
    [f"{value:.4f}" for value in found],
)
assert np.allclose(found, reference, rtol=1e-5)

# %% [markdown]
# What was sent? The table needs $m(p-1) = 4$ messages each way. But one program for all sends in *every* clock, needed or not, as
# XLA's compiled program says. (An accelerator's program has loops of their own for clocks with no forward, or no backward, anywhere: they
# send one way.)

# %%
hops = [c for c in mine.collectives() if c.kind == "collective-permute"]
assert [c.times for c in hops] == [frugal.clocks, frugal.clocks] and all(
    c.axis == "pipeline" for c in hops
)
[(c.kind, c.axis, c.bytes, c.times) for c in hops]

# %% [markdown]
# ## The same as a formula
# A file is for one $p$ and $m$. A *generator* gives the clocks of every forward and backward, for all: what each waits for, plus one. The limit
# says how many microbatches a stage may hold. Registered, its name is as good as `1f1b`, in configs, plans and searches.


# %%
def holding(limit):
    """1F1B in which stage s of p holds limit(p, s) microbatches at most; the first axis of f and b is the stage."""

    def clocks(p, m, chunks):
        f, b = np.zeros((2, p, m), int)
        for j in range(m):
            for s in range(p):
                room = b[s, j - limit(p, s)] + 1 if j >= limit(p, s) else 0
                f[s, j] = max(
                    f[s - 1, j] + 1 if s else 0, f[s, j - 1] + 1 if j else 0, room
                )
            for s in reversed(range(p)):
                b[s, j] = max(
                    b[s + 1, j] + 1 if s < p - 1 else f[s, j],
                    b[s, j - 1] + 1 if j else 0,
                )
        return f, b

    return clocks


mt.schedule.SCHEDULES.register(Schedule("textbook", holding(lambda p, s: p - s)))
assert np.array_equal(make_table("textbook", 2, 4).cells, frugal.cells)
make_table("textbook", 4, 8)

# %% [markdown]
# So what you wrote by hand was the papers' 1F1B. The limit is a knob between memory and time; turn it, from one microbatch at a time (no
# pipeline at all) to $2p-1$ (meshtrain's `1f1b`), and look at both models of execution.

# %%
p, m = 4, 16
executions = {"lockstep": "k-o", "asynchronous": "k--s"}
knob = {
    k: Schedule("knob", holding(lambda p, s, k=k: k)).table(p, m, 1)
    for k in range(1, 2 * p)
}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for model, style in executions.items():
    spans = [simulate(table, Durations(), model).makespan for table in knob.values()]
    axes.plot(list(knob), spans, style)
    axes.annotate(
        model,
        (2, spans[1]),
        xytext=(4, 6 if model == "lockstep" else -24),
        textcoords="offset points",
    )
    axes.plot(
        p,
        simulate(make_table("textbook", p, m), Durations(), model).makespan,
        "k*",
        markersize=12,
    )
axes.set(
    xlabel="microbatches in flight on stage 0",
    ylabel="makespan, in forwards",
    ylim=(0, None),
)
axes.annotate(
    "textbook ★", (p, 50), xytext=(-8, -18), textcoords="offset points", ha="center"
)

assert np.array_equal(knob[2 * p - 1].cells, make_table("1f1b", p, m).cells)
textbook = {
    execution: simulate(make_table("textbook", p, m), Durations(), execution)
    for execution in executions
}
ours, four = (
    simulate(knob[k], Durations(), "asynchronous").makespan for k in (2 * p - 1, p)
)
assert textbook["asynchronous"].makespan == ours < four
assert textbook["lockstep"].makespan > 1.5 * ours

# %% [markdown]
# Alone, the textbook's order is as fast as 1F1B with $p$ in flight instead of $2p-1$: it is the better schedule, on machines that keep their
# own pace. (Four on *every* stage is slower than 4, 3, 2, 1: the stages run ahead and then have no cotangent to work on.) In lockstep
# it takes over half as long again, since in most of its clocks one stage has only a forward, and its neighbour only a backward.
#
# ## What the compiler says
# Does a peak in flight in a table become bytes in a program? Three schedules, 16 microbatches on 4 stages, compiled, run once, and asked.

# %% tags=["varies"]
names = ("gpipe", "1f1b", "textbook")
peaks, bytes_, planned = [], [], []
for name in names:
    chosen = mt.load(
        config,
        ["mesh.pipeline=4", "parallel.microbatches=16", f"parallel.schedule={name}"],
    )
    *found, temporary = step(mt.Program(chosen))
    assert np.allclose(found, reference, rtol=1e-5)
    peaks.append(
        int(simulate(make_table(name, 4, 16), Durations()).peak_in_flight.max())
    )
    bytes_.append(temporary)
    planned.append(mt.plan(chosen, "cpu").bytes)
    print(
        f"{name:9} peak in flight {peaks[-1]:2}, temporary memory of a device {temporary / 2**20:.2f} MiB"
    )

# %% tags=["varies"]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(peaks, np.array(bytes_) / 2**20, "ko")
slope, rest = np.polyfit(peaks, bytes_, 1)
axes.plot([0, 16], np.array([rest, rest + 16 * slope]) / 2**20, "k:", linewidth=1)
for name, x, y in zip(names, peaks, bytes_, strict=True):
    axes.annotate(name, (x, y / 2**20), xytext=(6, -10), textcoords="offset points")
axes.set(
    xlabel="peak in flight",
    ylabel="temporary MiB a device",
    xlim=(0, 18),
    ylim=(0, None),
)
foreseen = (planned[0] - planned[1]) / (peaks[0] - peaks[1])
print(
    f"a microbatch in flight: {slope / 1024:.0f} KiB compiled, {foreseen / 1024:.0f} KiB planned"
)
assert np.allclose(np.array(peaks) * slope + rest, bytes_, rtol=0.03)
assert np.isclose(foreseen, slope, rtol=0.1)

# %% [markdown]
# ## Things to try
# - In `attempt`, write an order of your own, say two pairs, each all forwards and then all backwards. Predict clocks, peak and makespan
#   before `simulate` says them (9, 2 and 18, in both models of execution). `print(make_table("1f1b", 2, 4).to_csv())` gives a legal table to begin with.
# - Give stage 0 of `one` half a forward more, `Durations(forward=np.array([1.5, 1, 1, 1]))`: alone that costs half a forward, in lockstep
#   half a forward in every clock that has one. That is why stages should be of one length.
# - `Durations(head=1.0)` puts the loss on the last stage, and all wait for it in each of 8 microbatches; `head_spread=True` shares it among the
#   stages: 33 + 8 becomes 33 + 2. meshtrain shares it (`parallel.vocab: spread`).
# - Change the limit to `lambda p, s: min(p - s + 1, 2 * (p - 1 - s) + 1)`: one more in flight saves 15 forwards of 90 in lockstep, alone nothing.
# - Split the backward by hand: a table with `split=yes` and the letters F, I and W. Put every W last: each stage then holds all microbatches.
# - Set `mesh.data=2` beside `mesh.pipeline=2` in `settings`: table and loss stay, and `mine.collectives()` gets sums over data.
