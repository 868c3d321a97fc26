"""HAProxy and nginx with the files of configs/serving/, where they are installed: see experiments/serving/balance.py."""

import subprocess

import pytest

from experiments.serving import balance, balancers

pytestmark = pytest.mark.skipif(
    bool(balancers.missing()), reason=f"{', '.join(balancers.missing())}: not installed (Debian's packages)"
)


@pytest.mark.parametrize("name", balancers.CONFIGS)
def test_the_program_takes_the_file_as_it_stands(name, tmp_path):
    ended = subprocess.run(balancers.checks(name, balancers.CONFIGS[name], tmp_path), capture_output=True, text=True)
    assert ended.returncode == 0 and "warn" not in ended.stderr.lower(), ended.stderr


@pytest.mark.parametrize("name", balancers.CONFIGS)
def test_what_was_sent_to_a_server_is_sent_to_no_other(name, tmp_path):
    found = balance.sent(name, tmp_path)
    assert found.good, found
