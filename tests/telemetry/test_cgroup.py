"""Limits of cgroups, versions 1 and 2, as the kernel's files say them."""

from pathlib import Path

import pytest
from cgroup_files import memory_v2

from meshtrain.telemetry.resources import Cgroup

NONE = "9223372036854771712\n"


def made(root: Path, groups: str, files: dict[str, str]) -> Cgroup:
    """A machine whose files are these, below `root`."""
    files = {"proc/self/cgroup": groups} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Cgroup(root / "proc", root)


def memory_v1(where: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{where}"
    return {
        f"{at}memory.limit_in_bytes": limit, f"{at}memory.usage_in_bytes": f"{used}\n",
        f"{at}memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }  # fmt: skip


def test_version_2_without_the_cache_that_the_kernel_drops_first(tmp_path):
    files = memory_v2("job/step/", "1000", 700, 300) | {"sys/fs/cgroup/job/step/cpu.max": "150000 100000\n"}
    found = made(tmp_path, "0::/job/step\n", files)
    assert found.memory() == (1000, 400)
    assert found.cores() == 1.5


def test_of_several_limits_the_one_that_is_nearest_to_being_reached(tmp_path):
    files = memory_v2("job/step/", "1000", 400) | memory_v2("job/", "2000", 1900) | memory_v2("", "max", 5000)
    files |= {"sys/fs/cgroup/job/cpu.max": "200000 100000\n", "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}
    found = made(tmp_path, "0::/job/step\n", files)
    assert found.memory() == (2000, 1900)
    assert found.cores() == 2.0


@pytest.mark.parametrize("where", ["docker/abc/", ""])
def test_version_1_of_the_machine_and_in_a_container(tmp_path, where):
    files = memory_v1(where, "1000\n", 700, 300) | {
        f"sys/fs/cgroup/cpu,cpuacct/{where}cpu.cfs_quota_us": "50000\n",
        f"sys/fs/cgroup/cpu,cpuacct/{where}cpu.cfs_period_us": "100000\n",
    }
    groups = "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n"
    found = made(tmp_path, groups, files)
    assert found.memory() == (1000, 400)
    assert found.cores() == 0.5


def test_no_limit_is_none_however_a_version_says_it(tmp_path):
    quota = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    old = made(tmp_path / "1", "5:memory:/\n3:cpu,cpuacct:/\n", memory_v1("", NONE, 700) | quota)
    new = made(tmp_path / "2", "0::/\n", memory_v2("", "max", 700))
    assert (old.memory(), old.cores()) == (new.memory(), new.cores()) == (None, None)


def test_a_machine_without_cgroups_has_no_limits(tmp_path):
    assert Cgroup(tmp_path / "proc", tmp_path).memory() is None
    odd = made(tmp_path, "nonsense\n", {})
    assert odd.memory() is None and odd.cores() is None
