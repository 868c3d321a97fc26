# %% [markdown]
# # 11 Watch: a trace read, a bottleneck cured
# A run is slow. Is it, and against what? A small model is trained on eight tensor ranks, a layout that somebody might
# well choose. Its rows, its samples and a trace of three steps are read, every microsecond of the trace is given a
# reason, the reasons stand beside what the planner had foreseen, and a diagnosis says in words what to change. Then it
# is changed, and the second run held against the first.

# %%
import contextlib
import io
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import meshtrain as mt
from meshtrain.report.compare import compare
from meshtrain.report.diagnosis.diagnose import diagnose, read
from meshtrain.report.diagnosis.layouts import layouts
from meshtrain.report.diagnosis.tracing import newest_trace
from meshtrain.report.facts import gather
from meshtrain.report.sections import findings
from meshtrain.report.text import section_text
from meshtrain.report.trace import MEANING, PARTS, attribute, planned, read_trace
from meshtrain.telemetry.alerts import Judge
from meshtrain.telemetry.catalogue import METRICS

mt.fake_devices(8)
work = Path(tempfile.mkdtemp())

# %% [markdown]
# ## What a run says of itself
# Training writes files and everything else reads them: a row of `metrics.jsonl` for each step, a row of
# `resources/0.jsonl` every few seconds for each process, and `traces/` where `telemetry.trace_at` asks for one. Each
# metric stands once in a catalogue, from which the endpoint for Prometheus, the dashboard and the alert rules are made
# too.

# %%
for metric in [m for m in METRICS if "seconds" in m.name][:8]:
    print(f"{metric.source:8} {metric.name:28} {metric.sample:40} {metric.meaning}")
print(f"... and {len(METRICS) - 8} more")

# %% tags=["varies"]
settings = {
    "run": {"directory": str(work / "first")},
    "model": {"layers": 4, "d_model": 64, "heads": 8, "d_ff": 192, "vocab_size": 264},
    "mesh": {"tensor": 8},
    "data": {"source": "synthetic"},
    "train": {"steps": 30, "global_batch_size": 16, "sequence_length": 64},
    "telemetry": {"every": 1.0, "trace_at": [12], "trace_steps": 3},
    "log": {"every": 1},
}


def trained(config):
    """Trains; of what it says of itself only the last lines."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert mt.train(config).exit_code == 0
    print(*said.getvalue().splitlines()[-2:], sep="\n")


first = mt.load(settings)
trained(first)

# %% [markdown]
# ## A trace, read
# JAX's profiler leaves one event for each instruction that a device has executed, and beside it stands the text of the
# compiled program. Joined by the instruction's name, an event knows what it is for: a layer's forward, a collective
# over `tensor`, the optimizer. None may be left over. And the collectives that ran, counted event by event, must be
# those that the program was compiled with.

# %% tags=["varies"]
trace = newest_trace(work / "first")
found = attribute(read_trace(trace))
program = mt.Program(first)
compiled = {(c.kind, c.axis): 0.0 for c in program.collectives()}
for c in program.collectives():
    compiled[c.kind, c.axis] += c.times
print(
    f"{found.events:,} events of {found.steps} steps, {found.unjoined} without an instruction"
)
print(f"{found.attributed:.1%} of the wall has a reason")
for key, times in sorted(found.collectives.items()):
    print(f"{key[0]:20} over {key[1]:8} {times:g} a step, compiled {compiled[key]:g}")

assert found.unjoined == 0
assert found.attributed > 0.95
assert dict(found.collectives) == compiled

# %% [markdown]
# On fake devices the durations of events cannot simply be summed: eight devices share a few cores, and most of the
# time an event lies there without a core. So the wall is shared out: each moment is split among the devices that run,
# and only where none runs among those that wait.

# %% tags=["varies"]
kinds = sorted((k for k in found.seconds if found.share(k) > 0.005), key=found.share)
fig, ax = plt.subplots(figsize=(8, 3.2))
ax.barh(kinds, [100 * found.share(k) for k in kinds])
ax.set_xlabel("% of a step")
plt.show()
for k in reversed(kinds):
    print(f"{k:14} {MEANING[k]}")

# %% [markdown]
# ## Beside the plan
# The planner knows the same parts under the same names. Its machine is a described one, so it is the shares that are
# held against each other.

# %% tags=["varies"]
evidence = read(work / "first", found)
expected = planned(dict(evidence.plan.time.parts()))
names = [
    n
    for n in PARTS
    if found.parts[n] > 0.005 * found.wall_seconds
    or expected.get(n, 0.0) > 0.005 * evidence.plan.seconds
]
for n in names:
    share = found.parts[n] / found.wall_seconds
    by_plan = expected.get(n, 0.0) / evidence.plan.seconds
    print(f"{n:14} traced {share:6.1%}, planned {by_plan:6.1%}")
assert set(expected) <= set(found.parts)
assert all(parts["tensor"] > 0 for parts in (expected, found.parts))

# %% [markdown]
# ## Why it is slow
# A diagnosis is a list of rules over this evidence, one small function a reason, each with what it looked at, what it
# expected, and how much of a step a cure would win. (Where others use the machine that comes first, since nothing can
# be said of the speed then; so it may be here.)

# %% tags=["varies"]
print(section_text(findings(diagnose(evidence).as_json())))

# %% [markdown]
# The rule for layouts, asked by itself: it proposes only what the planner shows to be faster on this cluster.

# %% tags=["varies"]
finding = next(f for f in layouts(evidence) if f.name == "tensor")
print(finding.sentence)
print(finding.advice)
assert finding.settings and 0 < finding.severity < 1

# %% [markdown]
# ## Cured
# The same run with the settings of the advice, and nothing else changed.

# %% tags=["varies"]
second = mt.load(
    first,
    [*finding.settings, f"run.directory={work / 'second'}", "telemetry.trace_at=[]"],
)
trained(second)

# %% tags=["varies"]
one, two = gather(work / "first"), gather(work / "second")
held = compare(one, two)
before, after = (
    np.median([row for row in f.steps["step_seconds"]][5:]) for f in (one, two)
)
print(
    f"a step took {1e3 * before:.0f} ms and takes {1e3 * after:.0f} ms: {after / before:.0%} of it; the plan said {1 - finding.severity:.0%}"
)
print(
    "config:",
    *(
        f"{name}: {a} -> {b}"
        for name, a, b in held.config
        if not name.startswith(("run.", "telemetry."))
    ),
    sep="\n  ",
)

assert after < 0.9 * before

# %% [markdown]
# The losses are those of before, bit for bit or nearly: a layout is only a placement.

# %%
losses = [np.array(f.steps["loss"]) for f in (one, two)]
assert np.max(np.abs(losses[1] / losses[0] - 1)) < 1e-5
print(f"of {len(losses[0])} losses none differs by more than 1 in 100,000")

# %% [markdown]
# ## Alerts look at no clock
# While a run goes on the same rows go through rules: `Judge()(row, heard, now) -> alerts`. It looks at no clock and no
# file, so any story can be told to it. Here is one: forty good steps, three whose loss is no number, and good ones
# again.

# %%
judge, said = Judge(), []
for step in range(1, 60):
    loss = float("nan") if 40 < step <= 43 else 3.0 - 0.01 * step
    row = {
        "step": step,
        "loss": loss,
        "step_seconds": 0.2,
        "tokens_per_second": 5000.0,
        "time": 1000 + 0.2 * step,
    }
    said += judge(row, "step", row["time"])
for alert in said:
    print(f"step {alert.step}: {alert.rule} {alert.state}: {alert.sentence}")
assert [a.state for a in said if a.rule == said[0].rule] == ["firing", "resolved"]

# %% [markdown]
# ## Things to try
# - `telemetry.trace_at=[1]`: what does a step look like that touches its memory for the first time?
# - The second run on 2 × 2 × 2: which parts of the plan grow, and does the trace say so too?
# - Let a rank be late: in `resources/` its `phase_seconds` tell, though all ranks' steps take as long.
# - From a terminal: `python -m meshtrain.report RUN --diagnose`, `python -m meshtrain.report RUN RUN2 --html
#   page.html`, `python -m meshtrain.monitor RUN`. What links and devices give by themselves is measured by `python -m
#   meshtrain.probe`.
