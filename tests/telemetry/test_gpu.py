"""NVML's values, of a module that stands in for it: what cannot be, and what a board refuses, is left out."""

import sys
from types import SimpleNamespace

import pytest
from fake_nvml import Nvml, NVMLError

from meshtrain.telemetry.catalogue import BY_NAME
from meshtrain.telemetry.resources import Gpus, open_gpus

ABSURD = 9223372036854775794


def sample(devices=(0,), **nvml):
    return Gpus(devices, Nvml(**nvml), {}).sample()


def test_every_value_in_the_unit_of_its_metric():
    values = sample((0, 1))
    assert values["device_memory_used_bytes"] == {"0": 60 * 2**30, "1": 60 * 2**30}
    assert values["device_load_ratio"]["0"] == 0.97
    assert values["device_power_watts"]["1"] == 650.5
    assert values["device_temperature_celsius"]["0"] == 55
    assert values["device_memory_temperature_celsius"]["0"] == 70
    held = {
        "power_cap": 1,
        "hardware": 0,
        "heat": 0,
        "hardware_heat": 1,
        "power_brake": 0,
    }
    assert values["device_throttled"]["0"] == held
    assert values.keys() <= BY_NAME.keys()


@pytest.mark.parametrize(
    ("nvml", "lost"),
    [
        *(
            ({"memory_temperature": k}, {"device_memory_temperature_celsius"})
            for k in (ABSURD, 2**63 - 1, 2**32 - 1, 0)
        ),
        (
            {"refuses": ["nvmlDeviceGetMemoryInfo"]},
            {"device_memory_used_bytes", "device_memory_limit_bytes"},
        ),
        ({"refuses": ["nvmlDeviceGetUtilizationRates"]}, {"device_load_ratio"}),
        ({"refuses": ["nvmlDeviceGetPowerUsage"]}, {"device_power_watts"}),
        (
            {"refuses": ["nvmlDeviceGetCurrentClocksThrottleReasons"]},
            {"device_throttled"},
        ),
        (
            {"load": 2**32 - 1, "power": 2**64 - 1},
            {"device_load_ratio", "device_power_watts"},
        ),
    ],
)
def test_what_cannot_be_and_what_a_board_refuses_is_left_out_and_nothing_else(
    nvml, lost
):
    assert sample(**nvml).keys() == sample().keys() - lost


def test_a_device_is_the_one_that_cuda_counts_for_the_process():
    nvml = Nvml()
    Gpus([0, 1, 2], nvml, {"CUDA_VISIBLE_DEVICES": "3,GPU-abc"}).sample()
    handles = [call for call in nvml.asked if "Handle" in call[0]]
    assert handles == [
        ("nvmlDeviceGetHandleByIndex", 3),
        ("nvmlDeviceGetHandleByUUID", "GPU-abc"),
    ]


def test_without_a_driver_or_a_gpu_there_is_nothing(monkeypatch):
    class NoDriver(SimpleNamespace):
        @staticmethod
        def nvmlInit():
            raise NVMLError("Driver/library not found")

    monkeypatch.setitem(sys.modules, "pynvml", NoDriver())
    assert open_gpus([0]) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # cannot be imported
    assert open_gpus([0]) is None and open_gpus([]) is None
