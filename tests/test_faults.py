"""Every fault that was found or thought of, injected for real (experiments/faults): none is met in silence, none with a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_no_fault_is_met_in_silence_or_with_a_traceback():
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    command = [sys.executable, "-m", "experiments.faults", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    found = json.loads(done.stdout)
    bad = [fault for fault in found["faults"] if fault["verdict"] in ("silent", "traceback")]
    assert not bad, json.dumps(bad, indent=1)
    assert found["sums"]["all"]["tried"] >= 100
    assert found["sums"]["controls"]["named"] == found["sums"]["controls"]["tried"] > 0
    assert done.returncode == 0
