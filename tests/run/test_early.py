import subprocess
import sys

PROGRAM = """
import sys
from meshtrain.run.early import Stopped
try:
    exec("raise Stopped")
except Stopped:
    sys.exit(75)
"""


def test_a_request_that_was_met_while_a_text_was_executed_does_not_end_the_process_by_a_signal(tmp_path):
    """As a bare KeyboardInterrupt does under `python -m`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    assert subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path).returncode == 75
