"""Why a run is slow, as rules: each looks at the evidence for one reason and gives its finding, or none.

    shared ──► none of the others has a verdict, but for memory and faults
    memory  faults  router  slow_rank  compiling  loader  disk  saving  host
    layout (tensor, data, pipeline, bubble, recomputation)

Pure: the same evidence gives the same findings.
"""

from collections.abc import Callable, Iterator

import numpy as np

from meshtrain.errors import short
from meshtrain.report.diagnosis.evidence import Evidence, Finding
from meshtrain.survive.stragglers import judge
from meshtrain.telemetry.thresholds import BY_RULE

Findings = Iterator[Finding]

# A share of the step below which nothing is said: step times differ by as much from minute to minute.
LEAST = 0.08
# Of a machine's CPU time, used by others, where none is left idle.
OTHERS = 0.12
FULL = 0.9
# Of the largest load that there can be: nearly all tokens choose the same experts
COLLAPSED = 0.7
MOST_RANKS = 8  # that are named beside the slowest
# That compiled: the loss of validation text and the first save each compile once
COMPILED_ROWS = 4
# seconds of a save that no disk explains; times as long as its bytes need
SAVE_OVERHEAD = 0.5
SLOW_DISK = 3.0

Rule = Callable[[Evidence], Findings]


def _share_finding(
    name: str,
    signal: str,
    share: float,
    sentence: str,
    advice: str,
) -> Finding:
    """The finding of a share of the time, all of which curing it would win."""
    return Finding(name, signal, share, LEAST, share, sentence, advice)


def shared(evidence: Evidence) -> Findings:
    """Others take CPU time that the run would have used.

    Pressure (PSI) does not tell whose it is: eight devices on two cores wait for each other all the time, and the
    machine says 99%. So what the run's own processes use is taken off what the machine does. If no core is idle, the
    run would have had the rest too.
    """
    for machine, ranks in evidence.machines():
        busy, own, pressure = (
            [mean for rank in ranks if (mean := evidence.mean(rank, name)) is not None]
            for name in ("machine_cpu_ratio", "cpu_ratio", "pressure_cpu_ratio")
        )
        if not busy or len(own) < len(ranks):
            continue
        whole = float(np.mean(busy))
        ours = sum(own)
        others = whole - ours
        if others < OTHERS or whole < FULL:
            continue
        # Where nobody waited for a core, as on a machine whose devices compute, nothing would be won.
        won = min([others / whole, *([float(np.mean(pressure))] if pressure else [])])
        if won >= LEAST:
            sentence = (
                f"The machine {machine} is shared: other processes take {others:.0%} of its CPU time, this run "
                f"{ours:.0%}, and none is left. "
                "No other verdict on speed holds meanwhile."
            )
            advice = "End what else runs there, or give this run cores of its own; then diagnose again."
            yield Finding(
                "shared",
                "machine_cpu_ratio - cpu_ratio",
                others,
                OTHERS,
                won,
                sentence,
                advice,
            )


def memory(evidence: Evidence) -> Findings:
    """Host memory near its limit.

    A process that is killed loses more than time: how near it is counts as the severity.
    """
    limits = {
        "memory_limit_used_ratio": (
            "of the memory that its limit allows",
            BY_RULE["memory_limit"].fires,
        ),
        "memory_used_ratio": (
            "of its machine's memory",
            BY_RULE["machine_memory"].fires,
        ),
    }
    near_limits = []
    for rank in evidence.samples:
        for name, (what, near) in limits.items():
            most = max(evidence.sampled(rank, name), default=0.0)
            if most >= near:
                near_limits.append((float(most), near, rank, name, what))
    if near_limits:
        most, near, rank, name, what = max(near_limits)
        sentence = f"Rank {rank} uses {most:.0%} {what}; at 100% the system ends it."
        advice = (
            "Raise the limit, or lower data.prefetch; where the weights themselves lie in host memory take fewer "
            "processes a machine."
        )
        severity = min(1.0, LEAST + (most - near) / (1 - near))
        yield Finding("memory", name, most, near, severity, sentence, advice)


def faults(evidence: Evidence) -> Findings:
    """Work that was done again after faults, and time without processes."""
    if evidence.lost is not None and evidence.lost >= LEAST:
        sentence = (
            f"Faults have cost {evidence.lost:.0%} of the run's time: work that was done again, and waiting "
            "for processes."
        )
        advice = "See `meshtrain survive stats` for which and where; save more often if it is work done again."
        yield _share_finding(
            "faults", "survive: lost and down", evidence.lost, sentence, advice
        )


def slow_rank(evidence: Evidence) -> Findings:
    """Ranks that keep the others waiting: the slowest, and how many more."""
    paces = judge(evidence.phases())
    slow = sorted((pace.score, rank) for rank, pace in paces.items() if pace.is_slow)
    if not slow:
        return
    (_, rank), *others = slow
    pace = paces[rank]
    host = evidence.hosts.get(rank)
    likewise = (
        f"; likewise rank {', '.join(str(other) for _, other in others[:MOST_RANKS])}"
        if others
        else ""
    )
    more = f" and {len(others) - MOST_RANKS} more" if len(others) > MOST_RANKS else ""
    sentence = f"Rank {rank}{f' on {host}' if host else ''} is slow: {pace.words()}{likewise}{more}."
    advice = (
        "Look at what else that machine does, at what its processes may use, and at its disk; or leave it out of "
        "the run."
    )
    signal = "phase_seconds, a rank beside the others"
    severity = pace.share - pace.least
    yield Finding(
        "slow_rank", signal, pace.share, pace.least, severity, sentence, advice
    )


def compiling(evidence: Evidence) -> Findings:
    """Programs are compiled again and again, not once at the start."""
    seconds = np.nan_to_num(evidence.step("compile_seconds"))
    rows = int(np.sum(seconds > 0))
    whole = evidence.seconds + float(np.sum(seconds))
    if (
        rows < COMPILED_ROWS
        or not whole
        or (share := float(np.sum(seconds)) / whole) < LEAST
    ):
        return
    data = evidence.config.data
    advice = "Something changes the shapes, or the program, from step to step: pad what is fed to it to a few shapes."
    if data.batching in ("grouped", "budget"):
        fewer = f"--set data.lengths={max(1, data.lengths // 4)}"
        advice = f"Each length of data.batching={data.batching} is a shape to compile: give fewer with {fewer}."
    sentence = (
        f"After the first step {rows} of {evidence.rows} rows still compiled: {share:.0%} of the time went on "
        "that."
    )
    yield _share_finding("compiling", "compile_seconds", share, sentence, advice)


def loader(evidence: Evidence) -> Findings:
    """The step waits for data: what all ranks wait alike, since what one waits longer is the slow rank's."""
    if not evidence.seconds:
        return
    waits = [evidence.total("data_wait_seconds") / evidence.seconds]
    if len(evidence.samples) > 1:
        waits += [shares["data"] for shares in evidence.phases().values()]
    share = min(waits)
    if share >= LEAST:
        sentence = (
            f"The devices wait for data {share:.0%} of the time: a batch takes longer to read than a step to "
            "compute."
        )
        advice = (
            "Prepare the text once with `meshtrain data prepare`, put it on a faster disk, or raise data.prefetch if "
            "only some "
            "batches are late."
        )
        yield _share_finding("loader", "data_wait_seconds", share, sentence, advice)


def saves(evidence: Evidence) -> Findings:
    """Checkpoints hold up the steps: because the disk is slow, or because there are too many."""
    whole = evidence.seconds
    blocked = evidence.total("checkpoint_blocked_seconds")
    if not whole or (share := blocked / whole) < LEAST:
        return
    nbytes = evidence.total("checkpoint_bytes")
    seconds = evidence.total("checkpoint_seconds")
    count = int(np.isfinite(evidence.step("checkpoint_seconds")).sum())
    every = evidence.config.checkpoint.every
    less_often = (
        f"ave less often, with --set checkpoint.every={4 * every}."
        if every
        else "ave less often."
    )
    rate = evidence.plan.cluster.storage_bandwidth * 1e9 if evidence.plan else None
    needed = count * SAVE_OVERHEAD + (nbytes / rate if rate else 0.0)
    if rate is None or seconds <= SLOW_DISK * needed:
        sentence = f"The steps stand still for checkpoints {share:.0%} of the time."
        yield _share_finding(
            "saving", "checkpoint_blocked_seconds", share, sentence, f"S{less_often}"
        )
        return
    sentence = (
        f"The disk is slow: a save of {nbytes / count / 1e6:,.1f} MB takes {seconds / count:.1f} s, "
        f"{nbytes / seconds / 1e6:,.1f} MB/s, and "
        f"the steps stand still for it {share:.0%} of the time."
    )
    advice = (
        f"Put run.directory on a faster disk{f', or s{less_often}' if every else '.'}"
    )
    yield Finding(
        "disk",
        "checkpoint_seconds",
        seconds / count,
        needed / count,
        share,
        sentence,
        advice,
    )


def host(evidence: Evidence) -> Findings:
    """The devices wait for Python: starting steps, writing rows. Counts the share that every rank spends."""
    share = min(
        (shares["dispatch"] + shares["log"] for shares in evidence.phases().values()),
        default=0.0,
    )
    if share >= LEAST:
        sentence = f"The host needs {share:.0%} of the time to start steps and to write down what came of them."
        advice = "Take a larger batch, so that a step is longer; or write fewer rows, with --set log.every=10."
        yield _share_finding(
            "host", "phase_seconds: dispatch, log", share, sentence, advice
        )


def collapsed(evidence: Evidence) -> Findings:
    """Routers send most tokens to the same experts: the others learn nothing, and their devices wait."""
    moe = evidence.config.model.moe
    loads = evidence.step("expert_load")
    loads = loads[np.isfinite(loads)]
    if not len(loads):
        return
    load = float(np.median(loads[len(loads) // 2 :]))
    most = moe.experts / moe.top_k
    if load < COLLAPSED * most:
        return
    sentence = (
        f"The fullest of {moe.experts} experts has {load:.1f} times the mean load, of {most:.1f} that are "
        "possible."
    )
    advice = (
        "Keep loads even, with --set model.moe.balance=bias or sequence; or raise model.moe.bias_rate or "
        "balance_weight."
    )
    yield Finding(
        "router", "expert_load", load, COLLAPSED * most, 1 - 1 / load, sentence, advice
    )


def throttled(evidence: Evidence) -> Findings:
    """A device that slows itself down, most of the time. Its counters do not say by how much."""
    worst: tuple[float, str] | None = None
    for rank, columns in evidence.samples.items():
        for name in columns.names("device_throttled."):
            device, _, reason = name.removeprefix("device_throttled.").partition(".")
            share = evidence.mean(rank, name)
            # A board at its power cap does what it can.
            if (
                reason != "power_cap"
                and share is not None
                and share >= 0.5
                and (worst is None or share > worst[0])
            ):
                worst = (
                    share,
                    f"device {short(device)} of rank {rank}: {short(reason.replace('_', ' '))}",
                )
    if worst is not None:
        share, device = worst
        sentence = f"A device slows itself down {share:.0%} of the time ({device})."
        advice = "Look at its cooling and its power limit."
        yield Finding(
            "throttled",
            "device_throttled",
            share,
            0.5,
            LEAST,
            sentence,
            advice,
            sure=False,
        )


# What holds whoever else uses the machine; what does not.
ALWAYS: tuple[Rule, ...] = (memory, faults, collapsed)
ON_OUR_OWN: tuple[Rule, ...] = (slow_rank, compiling, loader, saves, host, throttled)
