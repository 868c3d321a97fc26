"""Several processes train as one does, and end in a way that tells what happened, when one of them is hurt."""

import json
import os
import shutil
import signal
import time
from functools import cache
from pathlib import Path

import jax
import pytest
from free_port import free_port
from supervised import Rank, supervised
from training_processes import rows, settings

from meshtrain.checkpoint.steps import committed_in
from meshtrain.run.lock import RunLock
from meshtrain.survive.child import ABORTED
from meshtrain.survive.stragglers import judge
from meshtrain.train import main

pytestmark = pytest.mark.thorough

MESHES = {
    "3x1x1": {"data": 3},
    "2x2x2": {"data": 2, "tensor": 2, "pipeline": 2},
    "4x2x1": {"data": 4, "tensor": 2, "islands": 2},
}
STEPS, EVERY = 6, 2


def train(config: Path, cache: str) -> None:
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    raise SystemExit(main(["--config", str(config)]))


def start(
    directory: Path,
    processes: int,
    mesh: str = "2x2x2",
    inject: tuple[str, ...] = (),
    steps: int = STEPS,
    **sections: dict,
) -> list[Rank]:
    directory.mkdir(exist_ok=True)
    sections |= {
        "mesh": MESHES[mesh],
        "log": {"batches": True},
        "survive": {"inject": list(inject)},
    }
    sections |= {
        "parallel": {"microbatches": 2},
        "train": {"global_batch_size": 8, "uneven_batch": "pad"},
    }
    config = settings(directory, steps, EVERY, **sections)
    named = {}
    if processes > 1:
        address = f"127.0.0.1:{free_port()}"
        named = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(processes),
        }
    cache = str(jax.config.jax_compilation_cache_dir)
    told = [supervised(directory / "run", rank) for rank in range(processes)]
    return [
        Rank(one, train, config, cache, **named, JAX_PROCESS_ID=str(rank))
        for rank, one in enumerate(told)
    ]


def codes(ranks: list[Rank]) -> list[int | None]:
    try:
        return [rank.end() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def batches(run: Path) -> dict[int, dict[int, int]]:
    """The checksum of each row of each batch, by step, from all processes; they must not contradict each other."""
    found: dict[int, dict[int, int]] = {}
    for path in sorted((run / "survive" / "gen-0").glob("rank-*.batches.jsonl")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            batch = found.setdefault(told["step"], {})
            for number, row in enumerate(told["rows"], told["first"]):
                assert batch.setdefault(number, row) == row
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run directory of one process, by mesh; each is trained when it is asked for."""

    @cache
    def of(mesh: str) -> Path:
        directory = tmp_path_factory.mktemp(mesh)
        assert codes(start(directory, 1, mesh)) == [0]
        return directory / "run"

    return of


def test_patience_ends_all_processes_after_the_same_step(tmp_path):
    """With so small a learning rate no evaluation is lower than the first."""
    still = {
        "optimizer": {"learning_rate": 1e-30},
        "eval": {"every": 1, "batches": 1, "patience": 2},
    }
    ranks = start(tmp_path, 2, **still)
    assert codes(ranks) == [0, 0], [rank.output.read_text() for rank in ranks]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert committed_in(tmp_path / "run" / "checkpoints") == [1, 2, 3]


# Three processes with rows that fill the batch up are those of tests/test_uneven_batch.py.
@pytest.mark.parametrize(
    ("mesh", "processes"),
    [
        ("2x2x2", 4),
        pytest.param("4x2x1", 2, marks=pytest.mark.slow),
        pytest.param("3x1x1", 3, marks=pytest.mark.slow),
    ],
)
def test_the_losses_and_the_batches_are_those_of_one_process(
    alone, tmp_path, mesh, processes
):
    ranks = start(tmp_path, processes, mesh)
    assert codes(ranks) == [0] * processes, [rank.output.read_text() for rank in ranks]
    expected = {row["step"]: row["loss"] for row in rows(alone(mesh))}
    assert {
        row["step"]: row["loss"] for row in rows(tmp_path / "run")
    } == pytest.approx(expected, rel=2e-6)
    assert len(expected) == STEPS
    read = batches(alone("2x2x2"))
    assert (
        batches(tmp_path / "run") == read
        and [len(read[step]) for step in read] == [8] * STEPS
    )
    assert len({row for batch in read.values() for row in batch.values()}) == 8 * STEPS


@pytest.mark.parametrize(
    ("fault", "ends", "kinds"),
    [
        ("bit-flip@3:1", [71, 71], ["sick", "sick"]),
        pytest.param(
            "nan@3:1", [70, 70], ["numbers", "numbers"], marks=pytest.mark.slow
        ),
        ("kill@3:1", [73, -9], ["peer", None]),
        ("out-of-memory@3:0", [1, 73], ["memory", "peer"]),
        pytest.param("error@3:0", [1, 73], ["error", "peer"], marks=pytest.mark.slow),
    ],
)
def test_the_end_of_each_process_tells_the_cause_from_its_effects(
    tmp_path, fault, ends, kinds
):
    ranks = start(tmp_path, 2, inject=(fault,))
    found = codes(ranks)
    # Rank 0 holds the coordinator: a peer that hears of its end before a collective fails is aborted by JAX's client,
    # which writes no file.
    if found[1] == -signal.SIGABRT and ends[0] == 1:
        assert ABORTED.search(ranks[1].output.read_bytes()), ranks[1].output.read_text()
        found[1], kinds = 73, [kinds[0], None]
    assert found == ends, [rank.output.read_text() for rank in ranks]
    for rank, kind in zip(ranks, kinds, strict=True):
        assert (
            not rank.told.own("fault.json").exists()
            if kind is None
            else rank.fault["kind"] == kind
        )
    assert [row["step"] for row in rows(tmp_path / "run")] in ([1, 2, 3], [1, 2, 3, 4])
    if fault.startswith("bit-flip"):
        assert [rank.fault["ranks"] for rank in ranks] == [[1], [1]]
        # The flipped bits are in no checkpoint; that of step 2 may still be written when the run ends.
        steps = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
        assert steps in (["2"], ["2.writing"])


def test_a_run_that_another_has_is_told_from_a_wrong_config_by_all_processes(tmp_path):
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    try:
        ranks = start(tmp_path, 2)
        assert codes(ranks) == [72, 72]
    finally:
        lock.release()
    assert [rank.fault["kind"] for rank in ranks] == ["lock", "lock"]
    (refused,) = start(tmp_path, 1, data={"source": str(tmp_path / "nothing")})
    assert codes([refused]) == [2] and refused.fault["kind"] == "config"


# 16 patches, as many positions as the text of `settings` has
IMAGES: dict[str, dict] = {
    "model": {
        "family": "vit",
        "image_size": 16,
        "patch_size": 4,
        "channels": 1,
        "pool": "mean",
        "vocab_size": 10,
    },
    "data": {"source": "synthetic", "images": {"shift": 2, "mixup": 0.8}},
}


@pytest.mark.slow
def test_a_run_on_images_goes_on_behind_a_killed_process_as_if_nothing_had_been(
    tmp_path,
):
    (whole,) = start(tmp_path / "whole", 1, **IMAGES)
    assert codes([whole]) == [0], whole.output.read_text()
    hurt = start(tmp_path / "hurt", 2, inject=("kill@5:1",), **IMAGES)
    assert codes(hurt)[1] == -9
    saved = committed_in(tmp_path / "hurt" / "run" / "checkpoints")[-1]
    assert saved in (2, 4)
    shutil.rmtree(tmp_path / "hurt" / "run" / "survive")
    again = start(tmp_path / "hurt", 2, **IMAGES)
    assert codes(again) == [0, 0], [rank.output.read_text() for rank in again]
    expected, found = (
        {row["step"]: row["loss"] for row in rows(tmp_path / name / "run")}
        for name in ("whole", "hurt")
    )
    assert list(found) == list(expected) and found == pytest.approx(expected, rel=2e-6)
    read = batches(tmp_path / "whole" / "run")
    assert {step: read[step] for step in range(saved + 1, STEPS + 1)} == batches(
        tmp_path / "hurt" / "run"
    )
    assert len({row for batch in read.values() for row in batch.values()}) == 8 * STEPS


def test_a_rank_that_is_stopped_most_of_the_time_is_the_slow_one_and_of_two_alike_none_is(
    tmp_path,
):
    ranks = start(tmp_path, 2, "4x2x1", steps=10**6, checkpoint={"every": 10**6})
    try:
        for rank in ranks:
            rank.until(lambda rank=rank: rank.beat.get("step", 0) >= 5)

        def over_a_while(pid: int | None = None) -> dict[int, dict[str, float]]:
            """Seconds by phase and rank; `pid` is stopped for 0.4 of each 0.5 s."""
            before = [rank.beat["phases"] for rank in ranks]
            deadline = time.monotonic() + 8
            while time.monotonic() < deadline:
                for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                    if pid is not None:
                        os.kill(pid, number)
                    time.sleep(seconds)
            after = [rank.beat["phases"] for rank in ranks]
            return {
                k: {p: b[p] - a[p] for p in b}
                for k, (a, b) in enumerate(zip(before, after, strict=True))
            }

        alike = over_a_while()
        assert not any(pace.is_slow for pace in judge(alike).values()), alike
        stopped = over_a_while(ranks[1].process.pid)
        paces = judge(stopped)
        assert (
            paces[1].is_slow and not paces[0].is_slow and paces[1].phase == "stopped"
        ), (
            alike,
            stopped,
        )
    finally:
        for rank in ranks:
            rank.kill()
