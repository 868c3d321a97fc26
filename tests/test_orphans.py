"""What a process has started ends with it, even if it is killed, and even if what it started is frozen."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTS = """
import subprocess, sys, time
from meshtrain.orphans import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=die_with_parent())
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_process_leaves_no_orphan(frozen):
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        if frozen:
            subprocess.run(["kill", "-STOP", child.name], check=True)
        assert child.exists()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    ends = time.monotonic() + 20
    while child.exists() and ") Z" not in (child / "stat").read_text():
        assert time.monotonic() < ends
        time.sleep(0.01)
