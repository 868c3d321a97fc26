# %% [markdown]
# # 10 Faults: hurt, judged, going on
# Three nodes train one model. The process of one is killed, that of another is frozen, and then a node is gone for
# good. How is it known who is to blame, and what is lost? First a judge is asked by hand, about nodes that do not
# exist; then the same judge leads a real run on three processes of this machine to its last step. At the end stand its
# losses beside those of a run that nothing disturbed, and an account of every second. How often to save is a question
# for the planner: notebook 8.

# %%
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np

import meshtrain as mt
from meshtrain.config.follow import padded_batch_size
from meshtrain.draw.picture import Picture
from meshtrain.draw.svg import image
from meshtrain.survive import history, picture
from meshtrain.survive.decide import SupervisorOptions, decide
from meshtrain.survive.ledger import ledger, word
from meshtrain.survive.records import Node, ProcessEnd, Rank, RestartPlan
from meshtrain.survive.store import config_of

# %% [markdown]
# ## The judge
# On each node a supervisor looks after one training process, the rank, and writes what it sees into the shared run
# directory: one small record a node. There is no server: the live node of the lowest name reads all records and asks
# one pure function what follows (`meshtrain/survive/decide.py`), `decide(now, nodes, plan, history, options)`. It
# looks at no clock, file or process, so it can be asked about anything. Here are three nodes whose ranks have taken 10
# steps and wait for their devices in the next one.

# %%
names = ["n0", "n1", "n2"]
options = SupervisorOptions(
    used=lambda nodes: nodes, wanted=3, least=2, step_timeout=8, node_timeout=6
)
plan = RestartPlan(
    2,
    1,
    "running",
    "n0",
    900,
    "start",
    "the run begins",
    members=names,
    incarnations=names,
    age=100,
)


def node(number, end=None, age=0.5, since=2.0, **changed):
    """A node's record. The judge has seen it stand still for `age` seconds, and the end in it, if there is one, `since` so many."""
    usual = {
        "proc": "S",
        "step": 10,
        "phase": "wait",
        "phase_age": 1.0,
        "pace": 0.5,
        "start": 0,
    }
    rank, state = (
        Rank(number, 100 + number, **usual | changed),
        "ended" if end else "running",
    )
    name, seen = names[number], {"age": age, "ended_for": since if end else 0.0}
    return Node(
        name,
        name,
        f"host{number}",
        state=state,
        generation=1,
        rank=rank,
        end=end,
        **seen,
    )


def judged(*records, plan=plan, before=()):
    found = decide(1000, records, plan, before, options)
    blamed = (
        [f"({found.kind}), blamed: {', '.join(found.blamed) or 'nobody'}"]
        if found.kind
        else []
    )
    print(found.verdict, *blamed, *found.members)
    for line in textwrap.wrap(found.reason, 96):
        print("   ", line)
    return found


assert judged(node(0), node(1), node(2)).verdict == "go on"

# %% [markdown]
# ## A cause among its effects
# A rank that is killed makes the others fail in their next collective. Three processes have ended then, two of them
# with an error of their own, and which record comes first is chance. The verdict may not depend on it: causes have an
# order, and what stands later in it follows from what stands earlier (`causes.py`).

# %%
failed = ProcessEnd(73, "peer", "lost another process", 10)
killed = ProcessEnd(-9, "signal", "was ended by SIGKILL", 10)
scene = [node(0, failed), node(1, failed), node(2, killed)]
found = judged(*scene)
assert found.blamed == ("n2",)
assert all(
    decide(1000, records, plan, [], options) == found for records in permutations(scene)
)

# %% [markdown]
# Without the third end there are effects only. Then it is right to wait for as long as a cause may still show: a
# moment, or, while a node is silent, until its time is up (6 s here). Is n2 well all along, nobody is blamed.

# %%
silent = [
    judged(
        node(0, failed, since=seconds),
        node(1, failed, since=seconds),
        node(2, age=seconds),
    )
    for seconds in (1.0, 4.0, 6.5)
]
well = judged(node(0, failed, since=4.0), node(1, failed, since=4.0), node(2))
assert [found.verdict for found in silent] == ["go on", "go on", "form"]
assert (silent[-1].kind, silent[-1].blamed) == ("lost", ("n2",))
assert (well.verdict, well.blamed) == ("form", ())

# %% [markdown]
# ## Nobody moves
# No process has ended, but there was no progress for 9 s. In a collective all ranks wait for the one that does not
# come, so that those who look stuck are not to blame. What differs is small: the state that the kernel gives n2's
# process (proc(5): T stopped, D in the kernel, R running), its phase, and whether a thread that does nothing else
# still counts up. n0 and n1 say the same each time.

# %%
scenes = {
    "all alike": {},
    "state T": {"proc": "T"},
    "state D": {"proc": "D"},
    "still in phase data": {"phase": "data"},
    "and its thread is silent": {"phase": "data", "proc": "R", "alive_age": 8.0},
    "no record for 7 s": {"age": 7.0},
}
hangs = {}
for what, evidence in scenes.items():
    print(f"{what}: ", end="")
    hangs[what] = judged(
        *[node(i, phase_age=9.0) for i in (0, 1)],
        node(2, **{"phase_age": 9.0} | evidence),
    )
assert [h.kind for h in hangs.values()] == [
    "collective",
    "frozen",
    "uninterruptible",
    "stuck",
    "gil",
    "lost",
]
assert [h.blamed for h in hangs.values()] == [()] + 5 * [("n2",)]

# %% [markdown]
# ## The same once more
# A restart helps against an accident, not against a bug. After numbers that are not finite every rank is moved to
# another node and the steps are taken again. Gone: it was a device. The same at the same step, with every shard
# computed elsewhere: it is the data or the optimizer, and the run ends with exit code 3, which says that starting it
# again is of no use.

# %%
nan = [
    node(i, ProcessEnd(70, "numbers", "found NaN in the loss", 10)) for i in range(3)
]
first = judged(*nan)
forming = replace(
    plan,
    number=3,
    generation=2,
    state="forming",
    kind="numbers",
    reason=first.reason,
    step=10,
)
ready = [replace(node(i), state="idle", acked=2) for i in range(3)]
turned = judged(*ready, plan=forming, before=[plan])
assert first.verdict == "form" and turned.members == ("n1", "n2", "n0")
again = judged(*nan, before=[forming])
assert (again.verdict, again.code) == ("over", 3)

# %% [markdown]
# ## For real
# Now processes. A model small enough to take 48 steps in seconds, three nodes of two fake devices each, and timeouts
# of seconds where a cluster has minutes. `python -m meshtrain.launch local 3` starts three supervisors on this
# machine; each starts a training process, and those are one JAX program over gloo. First undisturbed.

# %%
os.chdir(tempfile.mkdtemp())
Path("text.txt").write_text(
    "the mesh is a placement, the schedule is a table, the step is one program. " * 200
)
Path("tiny.yaml").write_text("""
model:      {layers: 2, d_model: 48, heads: 4, d_ff: 96, vocab_size: 264}
mesh:       {data: 3, tensor: 2, pipeline: 1}
data:       {source: text.txt, validation: 0.0}
train:      {steps: 48, global_batch_size: 15, sequence_length: 32}
optimizer:  {learning_rate: 3.0e-3, warmup_steps: 4}
checkpoint: {every: 5, keep: 3}
log:        {batches: true}
survive:    {wanted: 3, least: 2, step_timeout: 6, node_timeout: 6}
""")
# Without optimisation XLA compiles in a third of the time; what it has compiled is kept for the next process.
shared = {
    "JAX_PLATFORMS": "cpu",
    "XDG_CACHE_HOME": "cache",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}
environment = {
    **os.environ,
    **shared,
    "JAX_COMPILATION_CACHE_DIR": os.path.abspath("compiled"),
}


def launched(directory, *overrides):
    """A run on three nodes of this machine until it is over: its exit code and how many seconds that took."""
    command = [
        sys.executable,
        "-m",
        "meshtrain.launch",
        "local",
        "3",
        "--config",
        "tiny.yaml",
    ]
    for setting in (f"run.directory={directory}", *overrides):
        command += ["--set", setting]
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, time.monotonic() - began


def metrics(directory):
    """The run's own rows, one a step."""
    return list(
        map(json.loads, Path(directory, "metrics.jsonl").read_text().splitlines())
    )


def losses(directory):
    return [(row["step"], row["loss"]) for row in metrics(directory)]


code, _ = launched("calm")
calm = losses("calm")
print(f"exit code {code}, {len(calm)} steps")
assert code == 0 and [step for step, _ in calm] == list(range(1, 49))

# %% [markdown]
# ## Hurt
# The same command, and three faults to inject: after step 12 rank 1 is killed, after step 20 rank 2 is frozen
# (SIGSTOP), and after step 28 the node of rank 2 is gone, its supervisor killed in the same moment. All 32 kinds that
# there are: `python -m meshtrain.survive inject --list`.

# %%
code, seconds = launched(
    "hurt", "survive.inject=[kill@12:1, frozen@20:2, node-lost@28:2]"
)
hurt = losses("hurt")
print(f"exit code {code}, {len(hurt)} steps")
assert code == 0 and len(hurt) == 48

# %% [markdown]
# Every decision is a file, numbered, made once and never changed; a number can be taken by one leader only, so two who
# think that they lead do no harm. A *generation* is one set of training processes. It forms when every process of the
# one before has ended: two generations that write into one directory would be worse than any fault.

# %%
told = history.read(Path("hurt"))
for p in told.plans:
    members, blamed = " ".join(p.members) or "-", " ".join(p.blamed) or "-"
    print(
        f"{p.number}  generation {p.generation} {p.state:9}{p.kind:8}members: {members:10}blamed: {blamed}"
    )
verdicts = [p for p in told.plans if p.state == "forming"]
assert [p.kind for p in verdicts] == ["start", "signal", "frozen", "lost"]
assert [p.blamed for p in verdicts] == [[], ["n1"], ["n2"], ["n2"]]
assert told.plans[-1].kind == "done" and told.plans[-2].members == ["n0", "n1"]

# %% [markdown]
# What it said to people, and how long things took: from the fault to the verdict, to the new processes, and to the
# first step that they take. A kill is seen at once. Of a frozen rank and of a silent node only the timeout tells, here
# 6 s. (JAX itself gives up a peer that it has not heard of for 100 s, and would wait for one that is alive but stuck
# for ever.) The rest is mostly what a start costs: JAX's import, joining the others, compiling (on
# accelerators the program comes out of the compilation cache), the newest checkpoint.

# %% tags=["varies"]
# A file each, made in the moment of the fault.
injected = sorted(
    path.stat().st_mtime for path in Path("hurt", "survive", "injected").iterdir()
)
started = {e.integer("generation"): e.time for e in told.of("started")}
going = {e.integer("generation"): e for e in told.of("going")}
for fault, verdict in zip(injected, verdicts[1:], strict=True):
    times = verdict.wall, started[verdict.generation], going[verdict.generation].time
    judgement, processes, step = (moment - fault for moment in times)
    print(verdict.reason)
    print(
        f"    {judgement:.1f} s to the verdict, {processes:.1f} s to new processes, {step:.1f} s to a step"
    )
    assert 0 < judgement < processes < step and (judgement > 4) == (
        verdict.kind != "signal"
    )

# %% [markdown]
# ## Nothing lost, nothing twice
# Steps after the newest checkpoint are taken again, but each has one row. As long as the mesh is the same their losses
# are those of the calm run, to the last bit; so the weights were restored in full, and the data went on in its place.

# %%
starts = [going[generation].integer("start") for generation in (1, 2, 3, 4)]
assert [step for step, _ in hurt] == list(range(1, 49))
assert hurt[: starts[3]] == calm[: starts[3]]
apart = [
    abs(one - other) / other for (_, one), (_, other) in zip(hurt, calm, strict=True)
]
assert max(apart) < 1e-5
print("bit-equal as long as there are three nodes; on two a part in 100,000 at most")

# %% [markdown]
# How many steps were taken again? A save is written while training goes on, and one that is not finished is none; the
# next one waits for it. So at most two intervals of `checkpoint.every`.

# %% tags=["varies"]
redone = [
    verdict.step - start
    for verdict, start in zip(verdicts[1:], starts[1:], strict=True)
]
print("steps taken again:", ", ".join(map(str, redone)))
assert all(0 <= steps <= 2 * 5 for steps in redone)

# %% [markdown]
# The data, row by row. With `log.batches` each rank notes a checksum of every row it reads, in whatever generation.
# Put together: each step had the same 15 rows in the same places in both runs, and those taken twice had them twice.


# %%
def batches(directory):
    """{step: {place in the batch: checksum}} of all ranks and generations, which may not contradict each other."""
    found = {}
    for path in Path(directory, "survive").glob("gen-*/rank-*.batches.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            for place, row in enumerate(line["rows"], line["first"]):
                assert found.setdefault(line["step"], {}).setdefault(place, row) == row
    return found


read = batches("hurt")
assert read == batches("calm") and {len(rows) for rows in read.values()} == {15}
print(
    f"{sum(map(len, read.values()))} rows in {len(read)} steps, the same in both runs"
)

# %% [markdown]
# ## One node less
# Two nodes are left for a mesh of data 3 × tensor 2. Tensor and pipeline are kept, since one copy of the model is cut
# over them; data shrinks to 2. But 15 rows do not divide by 2, and the batch must stay what it was, or the losses
# would be others. So it is filled up with empty rows, of weight zero; and the microbatches become two, so that none
# has more rows than before, or memory might run out.

# %%
running = [p for p in told.plans if p.state == "running"]
before, since = (mt.load(config_of(Path("hurt", "survive"), p)) for p in running[2:])
for config in (before, since):
    data, _ = mt.open_data(config)
    weights = data.batch(30).get("weights", np.ones(data.batch_shape(30))).mean(axis=1)
    print(
        f"data {config.mesh.data}, microbatches {config.parallel.microbatches}: rows that weigh {weights}"
    )
    assert sum(weights == 1) == 15 and len(weights) == padded_batch_size(config)
assert (padded_batch_size(before), padded_batch_size(since)) == (15, 16)

# %% [markdown]
# ## Every second
# Each process counts its own seconds by phase, on a clock of its own, and supervisors note when it began and ended.
# The ledger puts that together: every second of the run has one kind. `lost` is whatever came after the checkpoint
# that a later generation went on from, `down` is when there was no process, `other` what nobody counted. Two other
# clocks agree: the notebook's, around the whole command; and that of the rows in `metrics.jsonl`, which goes from step
# to step, so that they have the seconds of the steps that count and of most saves.

# %% tags=["varies"]
account = ledger(told)
for kind, spent in account.seconds.items():
    print(f"{word(kind):17}{spent:6.1f} s {spent / account.wall:6.1%}")
print(f"{'together':17}{account.wall:6.1f} s, by the clock here {seconds:.1f} s")
assert math.isclose(sum(account.seconds.values()), account.wall, rel_tol=0.01)
assert (
    0 <= seconds - account.wall < 10 and account.seconds["other"] < 0.02 * account.wall
)

rows = sum(row["step_seconds"] for row in metrics("hurt"))
steps, with_saves = account.goodput * account.wall, account.effective * account.wall
print(
    f"steps {steps:.1f} s, with data and saves {with_saves:.1f} s; by the rows {rows:.1f} s"
)
assert 0.95 * steps < rows < 1.05 * with_saves
Picture(
    image(picture.svg(Path("hurt"), width=860), "the life of the run"),
    "the life of the run",
)

# %% [markdown]
# A row for each node, and below it the steps: each fault takes the curve back to the newest save. Before `lost` is a
# gap: the two processes that were left had failed at once, but who was the cause showed only when n2's time was up. In
# a terminal `python -m meshtrain.survive stats hurt` says all this, and `status` while a run goes on. At the end
# nothing may be left of three supervisors and 11 ranks, the frozen one least of all.

# %%
processes = [e.integer("pid") for e in told.of("started", "join")]
left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
print(f"{len(processes)} processes, {len(left)} of them left")
assert left == []

# %% [markdown]
# ## Things to try
# - In `scenes`, let n2 say `"step": 9, "phase": "log"`, and then n1 the same: who is blamed when two are behind?
# - Ask the judge about a thousand nodes, 999 of which fail as peers of one: is it found, and in how many milliseconds?
# - Inject `asleep@8:1`, `loader@16:1` and `gil@24:1`, one after the other in one run: which hang is named, at which
#   line of Python does the rank stand, and why does n1 not take part a third time?
# - `nan-always@12:1`: one restart with the ranks turned, then exit code 3. With `nan@12:1` the run goes on.
