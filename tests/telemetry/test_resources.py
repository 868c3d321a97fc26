"""Samples of a process: what the machine tells, by files that stand in for it where it matters, and nothing that it does not."""

import time
from types import SimpleNamespace

import psutil
import pytest
from cgroup_files import memory_v2
from fake_nvml import Nvml

from meshtrain.telemetry import resources
from meshtrain.telemetry.catalogue import BY_NAME
from meshtrain.telemetry.resources import Gpus, Resources


def machine(root, **files):
    """Files below a root, `__` for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": root / "proc", "root": root}


def test_a_sample_of_this_machine_has_names_of_the_catalogue_and_numbers_in_their_range(tmp_path):
    taken = Resources(tmp_path, phases=lambda: {"wait": time.perf_counter()}, gpus=Gpus([0], Nvml(), {}))
    found = taken.sample()
    assert {"cpu_ratio", "process_rss_bytes", "memory_used_ratio", "disk_free_bytes", "disk_used_ratio"} <= found.keys()
    for name, value in found.items():
        assert BY_NAME[name].source == "process"
        assert bool(BY_NAME[name].labels) == isinstance(value, dict), name
        assert BY_NAME[name].unit != "ratio" or isinstance(value, dict) or 0 <= value <= 1.5, (name, value)


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
    found = Resources(tmp_path, **machine(tmp_path, proc__pressure__cpu=some, proc__pressure__io="nonsense")).sample()
    assert found["pressure_cpu_ratio"] == 0.125
    assert not {"pressure_io_ratio", "pressure_memory_ratio"} & found.keys()


def test_the_limit_is_the_cgroups_and_ones_own_wins(tmp_path):
    files = {name.replace("/", "__"): text for name, text in memory_v2("job/", "4000", 3500, 500).items()}
    files |= {
        "proc__self__cgroup": "0::/job\n",
        "sys__fs__cgroup__job__cpu.max": "100000 200000\n",
    }
    where = machine(tmp_path, **files)
    found = Resources(tmp_path, **where).sample()
    assert (found["memory_limit_bytes"], found["memory_limit_used_ratio"]) == (4000, 0.75)
    own = Resources(tmp_path, limit=2**40, **where).sample()
    assert own["memory_limit_bytes"] == 2**40
    assert own["memory_limit_used_ratio"] == pytest.approx(own["process_rss_bytes"] / 2**40)


def test_rates_are_over_the_time_between_and_a_counter_that_was_set_back_has_none(tmp_path, monkeypatch):
    clock, read = [100.0], [1000]
    monkeypatch.setattr(resources.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=read[0], write_bytes=5))
    taken = Resources(tmp_path)
    clock[0], read[0] = 110.0, 6000
    assert taken.sample()["disk_read_bytes_per_second"] == 500.0
    clock[0], read[0] = 120.0, 10
    found = taken.sample()
    assert "disk_read_bytes_per_second" not in found and found["disk_written_bytes_per_second"] == 0.0


def test_what_fails_is_left_out_and_nothing_else(tmp_path, monkeypatch):
    whole = Resources(tmp_path).sample().keys()

    def refused():
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "virtual_memory", refused)
    # No tick of the clock may have passed since the sample before.
    lost = whole - Resources(tmp_path).sample().keys() - {"machine_cpu_ratio"}
    assert lost - {"memory_limit_bytes", "memory_limit_used_ratio"} == {
        "memory_used_ratio",
        "process_rss_bytes",
        "swap_used_bytes",
    }


def test_phases_are_those_since_the_sample_before_and_at_first_since_the_process_began(tmp_path):
    spent = {"wait": 1.0, "save": 0.0}
    taken = Resources(tmp_path, phases=lambda: dict(spent))
    assert taken.sample()["phase_seconds"] == {"wait": 1.0}
    spent |= {"wait": 3.0, "log": 0.5}
    assert taken.sample()["phase_seconds"] == {"wait": 2.0, "log": 0.5}


def test_memory_of_devices_is_by_jax_where_it_tells_and_by_nvml_where_not(tmp_path):
    told = SimpleNamespace(local_hardware_id=0, memory_stats=lambda: {"bytes_in_use": 5, "bytes_limit": 9})
    silent = SimpleNamespace(local_hardware_id=1, memory_stats=lambda: None)
    found = Resources(tmp_path, devices=[told, silent], gpus=Gpus([0, 1], Nvml(), {})).sample()
    assert found["device_memory_used_bytes"] == {"0": 5, "1": 60 * 2**30}
    assert found["device_memory_limit_bytes"] == {"0": 9, "1": 80 * 2**30}


def test_bridges_and_the_loopback_do_not_count_as_network(tmp_path):
    for card in ("lo", "eth0/device", "docker0"):
        (tmp_path / "sys/class/net" / card).mkdir(parents=True)
    assert resources._cards(tmp_path) == {"eth0"}
    (tmp_path / "sys/class/net/eth0/device").rmdir()
    assert resources._cards(tmp_path) == {"eth0", "docker0"}
