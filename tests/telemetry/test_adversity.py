"""A real run on which all that watches it fails at once: it goes on, exits 0, and what it learned is complete."""

import contextlib
import json
import shutil
import socket
import threading
import time
from functools import partial
from itertools import pairwise

import pytest
from mounts import may_mount, mount, own_mounts
from training_processes import Trainer, rows, settings

from meshtrain.data.token_rows import SyntheticRows

STEPS = 1500
# Seconds of a step, so that on the fastest machine too the run is longer than the disk is full
LEAST = 0.012
FULL = 4.0  # seconds


def hostile_disk(run):
    """Smaller than what a run needs, full for a while from step 100 on; and a file where a tracker wants a
    directory.
    """
    read = SyntheticRows.read
    SyntheticRows.read = lambda *given: (time.sleep(LEAST), read(*given))[1]
    own_mounts()
    mount("tmpfs", run, options="size=64m")
    (run / "tensorboard").touch()
    threading.Thread(target=fill_for_a_while, args=(run,), daemon=True).start()


def fill_for_a_while(run):
    while len(rows(run)) < 100:
        time.sleep(0.01)
    with contextlib.suppress(OSError), (run / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    # What a file's last page has room for is written still.
    samples = run / "resources/0.jsonl"
    size, since = -1, time.monotonic()
    while time.monotonic() - since < FULL:
        if samples.stat().st_size != size:
            size, since = samples.stat().st_size, time.monotonic()
        time.sleep(0.05)
    (run / "filler").unlink()


@pytest.mark.thorough
def test_a_run_goes_on_with_a_port_taken_a_disk_full_a_tracker_raising_and_webhooks_that_hang_or_refuse(
    tmp_path,
):
    if not may_mount():
        pytest.skip("mounts are not allowed here")
    run, left = tmp_path / "run", tmp_path / "left"
    run.mkdir()
    # One takes connections and says nothing; at the other, which is bound and does not listen, nobody is.
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        hangs, refuses = (
            f"webhook:http://127.0.0.1:{one.getsockname()[1]}/"
            for one in (silent, nobody)
        )
        telemetry = {
            "every": 0.5,
            "endpoint": silent.getsockname()[1],
            "trackers": ["tensorboard"],
            "alerts": ["log", "file", hangs, refuses, "command:false"],
        }
        config = settings(tmp_path, STEPS, 0, telemetry=telemetry)
        trainer = Trainer(
            config,
            before=partial(hostile_disk, run),
            after=partial(shutil.copytree, run, left),
        )
        code = trainer.end()
        ended = time.time()
    said = trainer.log.read_text()
    assert code == 0, said
    found = rows(left)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert ended - found[-1]["time"] < 20, "the end waits for nobody"
    assert max(b["time"] - a["time"] for a, b in pairwise(found)) < 5, (
        "no step waits for anybody"
    )
    for sentence in (
        "metrics cannot be served on 127.0.0.1",
        "the tracker tensorboard is left out",
        "samples cannot be written",
        "alert (disk_space)",
    ):
        assert said.count(sentence) == 1, said
    assert said.count("not delivered by webhook to 127.0.0.1") == 2, said
    assert said.count("delivered by command:false: it ended with 1") == 1, said
    alerts = [
        json.loads(line) for line in (left / "alerts.jsonl").read_text().splitlines()
    ]
    assert (alerts[0]["rule"], alerts[0]["state"]) == ("disk_space", "firing")
    lines = (left / "resources/0.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines if line.endswith("}}")]
    assert len(lines) - len(times) <= 1, "the full disk tears one line"
    assert (
        max(b - a for a, b in pairwise(times)) > FULL / 2
        and times[-1] > found[-1]["time"] - 2
    )
