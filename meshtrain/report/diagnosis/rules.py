"""Why a run is slow, as rules: each looks at the evidence for one reason and gives its finding, or none.

    shared ──► none of the others has a verdict, but for memory and faults
    memory  faults  slow_rank  compiling  loader  disk  saving  host  layout (tensor, data, pipeline, bubble, recomputation)

Pure: the same evidence gives the same findings.
"""

from collections.abc import Callable, Iterator

import numpy as np

from meshtrain.errors import short
from meshtrain.report.diagnosis.evidence import HOST, Evidence
from meshtrain.report.diagnosis.findings import Finding

# A share of the step below which nothing is said: step times differ by as much from minute to minute.
LEAST = 0.08
# Of a machine's CPU time, used by others, where none is left idle.
OTHERS, FULL = 0.12, 0.9
NEAR = 0.9  # of a memory limit
SLOW = 0.75  # the score of a slow rank, as in `survive.stragglers`
COMPILED_ROWS = 4  # that compiled: the loss of held-out text and the first save each compile once
SAVE_OVERHEAD, SLOW_DISK = 0.5, 3.0  # seconds of a save that no disk explains; times as long as its bytes need

Rule = Callable[[Evidence], Iterator[Finding]]


def shared(evidence: Evidence) -> Iterator[Finding]:
    """Others take CPU time that the run would have used.

    Pressure (PSI) does not tell whose it is: eight devices on two cores wait for each other all the time, and the machine says 99%. So
    what the run's own processes use is taken off what the machine does. If no core is idle, the run would have had the rest too.
    """
    for machine, ranks in evidence.machines():
        busy = [b for rank in ranks if (b := evidence.mean(rank, "machine_cpu_ratio")) is not None]
        own = [o for rank in ranks if (o := evidence.mean(rank, "cpu_ratio")) is not None]
        if not busy or len(own) < len(ranks):
            continue
        whole, ours = float(np.mean(busy)), sum(own)
        others = whole - ours
        if others < OTHERS or whole < FULL:
            continue
        won = others / whole
        pressure = [p for rank in ranks if (p := evidence.mean(rank, "pressure_cpu_ratio")) is not None]
        # Where nobody waited for a core, as on a machine whose devices compute, nothing would be won.
        if pressure:
            won = min(won, float(np.mean(pressure)))
        if won < LEAST:
            continue
        yield Finding(
            "shared",
            "machine_cpu_ratio - cpu_ratio",
            others,
            OTHERS,
            won,
            f"The machine {machine} is shared: other processes take {others:.0%} of its CPU time, this run {ours:.0%}, and none is left. "
            "No other verdict on speed holds meanwhile.",
            "End what else runs there, or give this run cores of its own; then diagnose again.",
        )


def memory(evidence: Evidence) -> Iterator[Finding]:
    """Host memory near its limit. A process that is killed loses more than time: how near it is counts as the severity."""
    names = {
        "memory_limit_used_ratio": ("of the memory that its limit allows", NEAR),
        "memory_used_ratio": ("of its machine's memory", 0.95),
    }
    found = []
    for rank in evidence.samples:
        for name, (what, near) in names.items():
            most = evidence.most(rank, name)
            if most is not None and most >= near:
                found.append((most, near, rank, name, what))
    if found:
        most, near, rank, name, what = max(found)
        yield Finding(
            "memory",
            name,
            most,
            near,
            min(1.0, LEAST + (most - near) / (1 - near)),
            f"Rank {rank} uses {most:.0%} {what}; at 100% the system ends it.",
            "Raise the limit, or lower data.prefetch; where the weights themselves lie in host memory take fewer processes a machine.",
        )


def faults(evidence: Evidence) -> Iterator[Finding]:
    """Work that was done again after faults, and time without processes."""
    if evidence.lost is not None and evidence.lost >= LEAST:
        yield Finding(
            "faults",
            "survive: lost and down",
            evidence.lost,
            LEAST,
            evidence.lost,
            f"Faults have cost {evidence.lost:.0%} of the run's time: work that was done again, and waiting for processes.",
            "See `python -m meshtrain.survive stats` for which and where; save more often if it is work done again.",
        )


def slow_rank(evidence: Evidence) -> Iterator[Finding]:
    """The steps of all ranks take equally long; a rank that is slow waits least for the others."""
    shares = {rank: s for rank in evidence.samples if (s := evidence.phases(rank)) is not None}
    if len(shares) < 2:
        return
    host = {rank: 1 - s["wait"] for rank, s in shares.items()}
    slowest = max(host, key=lambda rank: host[rank])
    others = float(np.median([h for rank, h in host.items() if rank != slowest]))
    excess = host[slowest] - others
    if excess <= 1 - SLOW:
        return
    phase = max(HOST, key=lambda p: shares[slowest][p] - min(s[p] for s in shares.values()))
    doing = {"data": "getting its batch", "dispatch": "starting the step", "log": "writing down what came of it"}[phase]
    where = evidence.hosts.get(slowest)
    yield Finding(
        "slow_rank",
        "phase_seconds, a rank beside the others",
        host[slowest],
        others,
        excess,
        f"Rank {slowest}{f' on {where}' if where else ''} is slow: {host[slowest]:.0%} of its time goes on its host, most of it on "
        f"{doing}, where the others have {others:.0%} and wait for it.",
        "Look at what else that machine does, and at its disk; or leave it out of the run.",
    )


def compiling(evidence: Evidence) -> Iterator[Finding]:
    """Programs are compiled again and again, not once at the start."""
    seconds = evidence.step("compile_seconds")
    rows = int(np.sum(np.nan_to_num(seconds) > 0))
    whole = evidence.seconds + float(np.nansum(seconds))
    if rows < COMPILED_ROWS or not whole:
        return
    share = float(np.nansum(seconds)) / whole
    if share < LEAST:
        return
    data = evidence.config.data
    lengths = data.batching in ("grouped", "budget")
    yield Finding(
        "compiling",
        "compile_seconds",
        share,
        LEAST,
        share,
        f"After the first step {rows} of {evidence.rows} rows still compiled: {share:.0%} of the time went on that.",
        f"Each length of data.batching={data.batching} is a shape to compile: give fewer with --set data.lengths={max(1, data.lengths // 4)}."
        if lengths
        else "Something changes the shapes, or the program, from step to step: pad what is fed to it to a few shapes.",
    )


def loader(evidence: Evidence) -> Iterator[Finding]:
    """The step waits for data: what all ranks wait alike, since what one waits longer is the slow rank's."""
    whole = evidence.seconds
    if not whole:
        return
    waits = [evidence.total("data_wait_seconds") / whole]
    waits += [
        s["data"] for rank in evidence.samples if (s := evidence.phases(rank)) is not None and len(evidence.samples) > 1
    ]
    share = min(waits)
    if share >= LEAST:
        yield Finding(
            "loader",
            "data_wait_seconds",
            share,
            LEAST,
            share,
            f"The devices wait for data {share:.0%} of the time: a batch takes longer to read than a step to compute.",
            "Prepare the text once with `python -m meshtrain.data prepare`, put it on a faster disk, or raise data.prefetch if only some "
            "batches are late.",
        )


def saves(evidence: Evidence) -> Iterator[Finding]:
    """Checkpoints hold up the steps: because the disk is slow, or because there are too many."""
    whole, blocked = evidence.seconds, evidence.total("checkpoint_blocked_seconds")
    if not whole or blocked / whole < LEAST:
        return
    share = blocked / whole
    nbytes, seconds = evidence.total("checkpoint_bytes"), evidence.total("checkpoint_seconds")
    count = int(np.isfinite(evidence.step("checkpoint_seconds")).sum())
    every = evidence.config.checkpoint.every
    rate = evidence.plan.cluster.storage_bandwidth * 1e9 if evidence.plan else None
    needed = count * SAVE_OVERHEAD + (nbytes / rate if rate else 0.0)
    if rate is not None and seconds > SLOW_DISK * needed:
        yield Finding(
            "disk",
            "checkpoint_seconds",
            seconds / count,
            needed / count,
            share,
            f"The disk is slow: a save of {nbytes / count / 1e6:,.1f} MB takes {seconds / count:.1f} s, {nbytes / seconds / 1e6:,.1f} MB/s, and "
            f"the steps stand still for it {share:.0%} of the time.",
            "Put run.directory on a faster disk"
            + (f", or save less often with --set checkpoint.every={4 * every}." if every else "."),
        )
        return
    yield Finding(
        "saving",
        "checkpoint_blocked_seconds",
        share,
        LEAST,
        share,
        f"The steps stand still for checkpoints {share:.0%} of the time.",
        f"Save less often, with --set checkpoint.every={4 * every}." if every else "Save less often.",
    )


def host(evidence: Evidence) -> Iterator[Finding]:
    """The devices wait for Python: starting steps, writing rows. What all ranks spend alike."""
    shares = [s for rank in evidence.samples if (s := evidence.phases(rank)) is not None]
    if not shares:
        return
    share = min(s["dispatch"] + s["log"] for s in shares)
    if share >= LEAST:
        yield Finding(
            "host",
            "phase_seconds: dispatch, log",
            share,
            LEAST,
            share,
            f"The host needs {share:.0%} of the time to start steps and to write down what came of them.",
            "Take a larger batch, so that a step is longer; or write fewer rows, with --set log.every=10.",
        )


def throttled(evidence: Evidence) -> Iterator[Finding]:
    """A device that slows itself down, most of the time. By how much its counters do not say."""
    worst: tuple[float, int, str] | None = None
    for rank, columns in evidence.samples.items():
        for name in columns.names("device_throttled."):
            device, _, reason = name.removeprefix("device_throttled.").partition(".")
            share = evidence.mean(rank, name)
            # A board at its power cap does what it can.
            if reason != "power_cap" and share is not None and share >= 0.5 and (worst is None or share > worst[0]):
                worst = share, rank, f"device {short(device)} of rank {rank}: {short(reason.replace('_', ' '))}"
    if worst is not None:
        yield Finding(
            "throttled",
            "device_throttled",
            worst[0],
            0.5,
            LEAST,
            f"A device slows itself down {worst[0]:.0%} of the time ({worst[2]}).",
            "Look at its cooling and its power limit.",
            sure=False,
        )


# What holds whoever else uses the machine; what does not.
ALWAYS: tuple[Rule, ...] = (memory, faults)
ON_OUR_OWN: tuple[Rule, ...] = (slow_rank, compiling, loader, saves, host, throttled)
