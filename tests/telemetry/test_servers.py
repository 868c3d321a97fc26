"""A real Prometheus and a real Alertmanager, where they are installed: see experiments/watch/servers.py."""

import shutil

import pytest

from experiments.watch import servers

MISSING = [program for program in servers.PROGRAMS if shutil.which(program) is None]


@pytest.mark.thorough
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed")
def test_rules_fire_and_clear_through_real_servers_and_every_query_has_data(tmp_path):
    assert [check for check in servers.measure(tmp_path) if not check.good] == []
