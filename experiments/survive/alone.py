"""Faults that need a run of their own: they end it, are there before it begins, or change all that comes after."""

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from experiments.survive.cluster import Cluster, rows_of
from experiments.survive.judge import Judged, judge_verdict

if TYPE_CHECKING:
    from experiments.survive.kinds import Campaign

DISK = 24  # MiB of a disk that gets full
LONGER = 120  # steps after which it is known who is slow
SHORT = 40  # steps of a run that is to end by itself


def cluster_for(campaign: "Campaign", found: Judged) -> Cluster | None:
    """The run for a kind; None where it cannot be tried."""
    step = campaign.draw.randrange(6, 20)
    inject = {"survive": {"inject": [f"{found.kind}@{step}:{found.rank}"]}}
    if found.kind == "bad-config":
        nowhere = campaign.work / "nowhere"
        nowhere.mkdir(exist_ok=True)
        return campaign.cluster(SHORT, data={"source": str(nowhere)})
    if found.kind == "disk-full":
        place = campaign.work / "disk"
        place.mkdir(exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(place)],
            capture_output=True,
        )
        return (
            None
            if made.returncode
            else campaign.cluster(place=place, log={"batches": False})
        )
    return campaign.cluster(SHORT if found.kind == "preempt" else 600, **inject)


def clear(cluster: Cluster) -> None:
    """Takes a disk away again."""
    if cluster.directory.parent.name == "disk":
        subprocess.run(["umount", str(cluster.directory.parent)], check=True)


def nan_always(cluster: Cluster, found: Judged, draw: random.Random) -> None:
    """Twice the same: given up with 3."""
    ends_with(cluster, found, 3, generations=2)
    judge_verdict(cluster, found, 1, [f"n{found.rank}"])


def crash_loop(cluster: Cluster, found: Judged, draw: random.Random) -> None:
    """Three times: given up with 3."""
    ends_with(cluster, found, 3, generations=3)
    judge_verdict(cluster, found, 1, [f"n{found.rank}"])


def slow(cluster: Cluster, found: Judged, draw: random.Random) -> None:
    """Reported, not ended."""
    cluster.start()
    cluster.until_going(0)
    began = time.time()
    cluster.until(
        lambda: cluster.of("straggler") or cluster.step() > LONGER,
        "a slow rank to be found",
    )
    said = cluster.of("straggler")
    found.said = f"straggler {','.join(e['node'] for e in said) or '-'}"
    found.named = [e["node"] for e in said] == [f"n{found.rank}"]
    found.verdict = said[0]["wall"] - began if said else None
    found.reason = said[0]["sentence"] if said else ""
    if not found.named:
        found.problems.append(
            f"said {found.said}, where n{found.rank} is slow: {found.reason}"
        )
    if cluster.generation != 1:
        found.problems.append("it was ended for that")
    cluster.stop()


def disk_full(cluster: Cluster, found: Judged, draw: random.Random) -> None:
    """It trains on, and what could not be written is written once there is room."""
    cluster.start()
    cluster.until_going(0)
    start = cluster.step() + draw.randrange(1, 12)
    cluster.until(lambda: rank_step(cluster) >= start, "some steps")
    filler = cluster.directory.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    full = rank_step(cluster)
    cluster.until(lambda: rank_step(cluster) >= full + 12, "steps on a full disk")
    filler.unlink()
    free = rank_step(cluster)
    cluster.until(
        lambda: cluster.step() >= free + 12, "rows of metrics once there is room"
    )
    found.step, found.said, found.named = full, "trains on", cluster.generation == 1
    if not found.named:
        found.problems.append(
            "it was ended for that: "
            + "; ".join(e["reason"] for e in cluster.of("verdict"))
        )
    cluster.stop()


def bad_config(cluster: Cluster, found: Judged, draw: random.Random) -> None:
    """Refused with 2, in one sentence, and not tried again."""
    ends_with(cluster, found, 2, generations=1)
    over = cluster.of("over")
    found.said, found.named = (
        f"{over[0]['kind']} -" if over else "nothing",
        bool(over) and over[0]["kind"] == "refused",
    )
    found.reason = over[0]["reason"] if over else ""


def preempt(cluster: Cluster, found: Judged, draw: random.Random) -> None:
    """All stop with 75 after a save; started again, the run goes on to its end."""
    ends_with(cluster, found, 75, generations=1)
    stopped = rows_of(cluster.run)[-1]["step"]
    found.step, found.said, found.named = (
        stopped,
        "stopped -",
        [e["kind"] for e in cluster.of("over")] == ["stopped"],
    )
    cluster.start()
    cluster.until_going(1)
    found.lost = stopped - cluster.of("going", generation=2)[0]["start"]
    codes = cluster.end()
    if found.lost or set(codes.values()) != {0}:
        found.problems.append(f"went on {found.lost} steps before, exit codes {codes}")


def ends_with(cluster: Cluster, found: Judged, code: int, generations: int) -> None:
    cluster.start()
    codes = cluster.end()
    time.sleep(0.2)
    if set(codes.values()) != {code}:
        found.problems.append(f"exit codes {codes}, where all must be {code}")
    if cluster.generation != generations:
        found.problems.append(
            f"{cluster.generation} generations, where {generations} are right"
        )


def rank_step(cluster: Cluster) -> int:
    """Steps taken, by what the first node says: on a full disk there are no metrics."""
    with contextlib.suppress(OSError, ValueError):
        rank: dict[str, Any] = (
            json.loads((cluster.root / "nodes" / "n0.json").read_text())["rank"] or {}
        )
        return rank.get("step", 0)
    return 0


KINDS: dict[str, Callable[[Cluster, Judged, random.Random], None]] = {
    "nan-always": nan_always,
    "slow": slow,
    "disk-full": disk_full,
    "bad-config": bad_config,
    "crash-loop": crash_loop,
    "preempt": preempt,
}
