"""experiments/bench_layouts.py --by-hand: our layouts beside plain JAX that is sharded by hand, whose first step has
our loss.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--by-hand", "--rounds", "1", "--batch", "8", "--length", "16"


def bench(layouts):
    command = [
        sys.executable,
        "experiments/bench_layouts.py",
        *SMALL,
        "--layouts",
        layouts,
    ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_two_layouts_have_the_loss_of_those_sharded_by_hand_and_a_speed_beside_them():
    printed = bench("2,2,2 zero_stage=3; 2,4,1 zero_stage=1")
    assert printed.returncode == 0, printed.stderr
    rows = [
        line for line in printed.stdout.splitlines() if re.match(r"\d,\d,\d ", line)
    ]
    assert len(rows) == 2
    for row in rows:
        temp, speed, processor = map(float, row.split(" | ")[2].split())
        assert temp > 0 and speed > 0 and processor > 0


@pytest.mark.thorough
def test_what_is_not_written_by_hand_is_refused():
    printed = bench("2,2,2 sequence_parallel=true")
    assert printed.returncode == 1
    assert printed.stderr.splitlines()[-1].startswith(
        "by hand there are data, tensor, pipeline and ZeRO"
    )
