"""HAProxy and nginx with the files of configs/serving/, where they are installed: see
experiments/serving/balance.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.serving import balance, balancers
from experiments.serving.servers import servers

pytestmark = pytest.mark.skipif(
    bool(balancers.missing()),
    reason=f"{', '.join(balancers.missing())}: not installed (Debian's packages)",
)
FAKE = Path(__file__).parents[1] / "helpers/fake_serving.py"


@pytest.mark.parametrize("name", balancers.CONFIGS)
def test_the_program_takes_the_file_as_it_stands(name, tmp_path):
    ended = subprocess.run(
        balancers.checks(name, balancers.CONFIGS[name], tmp_path),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and "warn" not in ended.stderr.lower(), ended.stderr


@pytest.mark.parametrize("name", balancers.CONFIGS)
def test_what_was_sent_to_a_server_is_sent_to_no_other(name, tmp_path):
    found = balance.sent(name, tmp_path)
    assert found.good, found


def test_what_a_server_refuses_since_it_loads_or_ends_nginx_sends_to_another(tmp_path):
    found = balance.sent("nginx", tmp_path, status=503)
    assert found.to_a > 0 and found.answered == found.to_b == found.requests, found


@pytest.mark.thorough
def test_nothing_is_lost_but_on_a_server_that_is_killed(tmp_path):
    with servers(lambda port: [sys.executable, str(FAKE), str(port)], tmp_path, 2) as (
        a,
        b,
    ):
        rows = [
            balance.measure("haproxy", happens, a, b, tmp_path, before=1.0, after=3.0)
            for happens in balance.HAPPENS
        ]
    assert all(row.good for row in rows), rows
    assert all(row.answers > 50 for row in rows)
