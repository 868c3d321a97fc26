"""Samples of a process: what the machine tells, by files that stand in for it where it matters, and nothing that it
does not.
"""

import time
from types import SimpleNamespace

import psutil
import pytest
from fake_nvml import Nvml

from meshtrain.telemetry import resources
from meshtrain.telemetry.catalogue import BY_NAME
from meshtrain.telemetry.resources import Cgroup, Gpus, Resources

NONE = "9223372036854771712\n"


def memory_v2(where: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    """What the kernel says of cgroups, as files."""
    at = f"sys/fs/cgroup/{where}"
    return {
        f"{at}memory.max": f"{limit}\n",
        f"{at}memory.current": f"{used}\n",
        f"{at}memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }


def machine(root, files):
    """A machine whose files are these, below a root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {"proc": root / "proc", "root": root}


def test_a_sample_of_this_machine_has_names_of_the_catalogue_and_numbers_in_their_range(
    tmp_path,
):
    values = Resources(
        tmp_path,
        phases=lambda: {"wait": time.perf_counter()},
        gpus=Gpus([0], Nvml(), {}),
    ).sample()
    assert {
        "cpu_ratio",
        "process_rss_bytes",
        "memory_used_ratio",
        "disk_free_bytes",
        "disk_used_ratio",
    } <= set(values)
    for name, value in values.items():
        assert BY_NAME[name].source == "process"
        assert bool(BY_NAME[name].labels) == isinstance(value, dict), name
        assert (
            BY_NAME[name].unit != "ratio"
            or isinstance(value, dict)
            or 0 <= value <= 1.5
        ), (
            name,
            value,
        )


def test_busy_is_told_from_idle(tmp_path):
    taken = Resources(tmp_path)
    time.sleep(0.2)
    idle = taken.sample()["cpu_ratio"]
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert taken.sample()["cpu_ratio"] > 5 * idle


def test_pressure_is_a_share_and_left_out_where_the_kernel_keeps_none(tmp_path):
    some = "some avg10=12.50 avg60=1.00 avg300=0.50 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"
    where = machine(
        tmp_path, {"proc/pressure/cpu": some, "proc/pressure/io": "nonsense"}
    )
    values = Resources(tmp_path, **where).sample()
    assert values["pressure_cpu_ratio"] == 0.125
    assert not {"pressure_io_ratio", "pressure_memory_ratio"} & values.keys()


def test_the_limit_is_the_cgroups_and_ones_own_wins(tmp_path):
    where = machine(
        tmp_path,
        memory_v2("job/", "4000", 3500, 500) | {"proc/self/cgroup": "0::/job\n"},
    )
    values = Resources(tmp_path, **where).sample()
    assert (values["memory_limit_bytes"], values["memory_limit_used_ratio"]) == (
        4000,
        0.75,
    )
    own = Resources(tmp_path, limit=2**40, **where).sample()
    assert own["memory_limit_bytes"] == 2**40
    assert own["memory_limit_used_ratio"] == pytest.approx(
        own["process_rss_bytes"] / 2**40
    )


def test_rates_are_over_the_time_between_and_a_counter_that_was_set_back_has_none(
    tmp_path, monkeypatch
):
    clock, read = [100.0], [1000]
    monkeypatch.setattr(resources.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        psutil,
        "disk_io_counters",
        lambda: SimpleNamespace(read_bytes=read[0], write_bytes=5),
    )
    taken = Resources(tmp_path)
    clock[0], read[0] = 110.0, 6000
    assert taken.sample()["disk_read_bytes_per_second"] == 500.0
    clock[0], read[0] = 120.0, 10
    values = taken.sample()
    assert (
        "disk_read_bytes_per_second" not in values
        and values["disk_written_bytes_per_second"] == 0.0
    )


def test_what_fails_is_left_out_and_nothing_else(tmp_path, monkeypatch):
    whole = Resources(tmp_path).sample().keys()

    def refused():
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "virtual_memory", refused)
    # No tick of the clock may have passed since the sample before.
    lost = whole - Resources(tmp_path).sample().keys() - {"machine_cpu_ratio"}
    limits = {"memory_limit_bytes", "memory_limit_used_ratio"}
    assert lost - limits == {
        "memory_used_ratio",
        "process_rss_bytes",
        "swap_used_bytes",
    }


def test_phases_are_those_since_the_sample_before_and_at_first_since_the_process_began(
    tmp_path,
):
    spent = {"wait": 1.0, "save": 0.0}
    taken = Resources(tmp_path, phases=lambda: dict(spent))
    assert taken.sample()["phase_seconds"] == {"wait": 1.0}
    spent |= {"wait": 3.0, "log": 0.5}
    assert taken.sample()["phase_seconds"] == {"wait": 2.0, "log": 0.5}


def test_memory_of_devices_is_by_jax_where_it_tells_and_by_nvml_where_not(tmp_path):
    tells = SimpleNamespace(
        local_hardware_id=0, memory_stats=lambda: {"bytes_in_use": 5, "bytes_limit": 9}
    )
    silent = SimpleNamespace(local_hardware_id=1, memory_stats=lambda: None)
    values = Resources(
        tmp_path, devices=[tells, silent], gpus=Gpus([0, 1], Nvml(), {})
    ).sample()
    assert values["device_memory_used_bytes"] == {"0": 5, "1": 60 * 2**30}
    assert values["device_memory_limit_bytes"] == {"0": 9, "1": 80 * 2**30}


def test_bridges_and_the_loopback_do_not_count_as_network(tmp_path):
    for card in ("lo", "eth0/device", "docker0"):
        (tmp_path / "sys/class/net" / card).mkdir(parents=True)
    assert resources._cards(tmp_path) == {"eth0"}
    (tmp_path / "sys/class/net/eth0/device").rmdir()
    assert resources._cards(tmp_path) == {"eth0", "docker0"}


# --- cgroups


def memory_v1(where: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{where}"
    return {
        f"{at}memory.limit_in_bytes": limit,
        f"{at}memory.usage_in_bytes": f"{used}\n",
        f"{at}memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def quota_v1(where: str, quota: str) -> dict[str, str]:
    at = f"sys/fs/cgroup/cpu,cpuacct/{where}cpu.cfs"
    return {f"{at}_quota_us": quota, f"{at}_period_us": "100000\n"}


def cpu_v2(where: str, content: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{where}cpu.max": f"{content} 100000\n"}


OF_V1 = "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n"
OUTER = (
    memory_v2("job/", "2000", 1900)
    | memory_v2("", "max", 5000)
    | cpu_v2("job/", "200000")
)
CGROUPS = {
    "version 2, without the cache that the kernel drops first": (
        "0::/job/step\n",
        memory_v2("job/step/", "1000", 700, 300) | cpu_v2("job/step/", "150000"),
        (1000, 400),
        1.5,
    ),
    "of several the nearest to its limit": (
        "0::/job/step\n",
        memory_v2("job/step/", "1000", 400) | OUTER | cpu_v2("job/step/", "max"),
        (2000, 1900),
        2.0,
    ),
    "version 1 of the machine": (
        OF_V1,
        memory_v1("docker/abc/", "1000\n", 700, 300)
        | quota_v1("docker/abc/", "50000\n"),
        (1000, 400),
        0.5,
    ),
    "version 1 in a container": (
        OF_V1,
        memory_v1("", "1000\n", 700, 300) | quota_v1("", "50000\n"),
        (1000, 400),
        0.5,
    ),
    "version 1 without limits": (
        "5:memory:/\n3:cpu,cpuacct:/\n",
        memory_v1("", NONE, 700) | quota_v1("", "-1\n"),
        None,
        None,
    ),
    "version 2 without limits": ("0::/\n", memory_v2("", "max", 700), None, None),
    "nonsense": ("nonsense\n", {}, None, None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_limits_of_cgroups_as_the_kernels_files_say_them(name, tmp_path):
    assert Cgroup(tmp_path / "proc", tmp_path).memory() is None, (
        "a machine without cgroups"
    )
    groups, files, memory, cores = CGROUPS[name]
    cgroup = Cgroup(**machine(tmp_path, {"proc/self/cgroup": groups} | files))
    assert (cgroup.memory(), cgroup.cores()) == (memory, cores)
