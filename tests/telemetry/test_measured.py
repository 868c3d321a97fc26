"""What is measured of a step: the seconds between two of them, what was compiled, memory where a device tells it."""

import jax
import pytest

from meshtrain.telemetry.catalogue import BY_NAME
from meshtrain.telemetry.measured import Measured, compiles


class Device:
    def __init__(self, stats):
        self.memory_stats = lambda: stats


def measured(phases=lambda: {"dispatch": 0.0, "wait": 0.0}, devices=(), peak=None):
    return Measured(phases, devices, peak)


def test_seconds_are_those_since_the_step_before():
    spent = {"dispatch": 1.0, "wait": 10.0, "log": 5.0}
    of = measured(lambda: dict(spent))
    spent |= {"dispatch": 1.25, "wait": 12.0}
    first = of.step(100, 0.0)
    assert (first["dispatch_seconds"], first["wait_seconds"]) == (0.25, 2.0)
    spent |= {"dispatch": 1.5}
    second = of.step(100, 0.0)
    assert (second["dispatch_seconds"], second["wait_seconds"]) == (0.25, 0.0)
    assert second["time"] >= first["time"] > 1.7e9


def test_what_was_no_part_of_the_step_is_left_out_of_its_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    of = measured()
    now = 105.0
    of.leave_out(3.0)
    first = of.step(100, 0.5)
    assert (
        first["step_seconds"],
        first["tokens_per_second"],
        first["data_wait_seconds"],
    ) == (
        2.0,
        50.0,
        0.5,
    )
    now = 125.0
    of.restart()
    now = 126.0
    second = of.step(100, 0.75)
    assert (second["step_seconds"], second["data_wait_seconds"]) == (1.0, 0.25)


def test_a_program_that_is_compiled_stands_in_the_next_row_alone():
    of = measured()
    jax.jit(lambda x: x * 3.0 + 0.123).lower(1.0).compile()
    found = of.row()
    assert found["compiles"] >= 1 and found["compile_seconds"] > 0
    assert of.row() == {}
    jax.jit(lambda x: x * 3.0 + 0.789).lower(1.0).compile()
    assert 1 <= of.row()["compiles"] < compiles().count, "not those of rows before"


def test_utilisation_is_left_out_where_the_peak_is_not_known():
    assert "mfu" not in measured().step(100, 0.0)
    values = measured(peak=400.0).step(100, 0.0)
    assert values["mfu"] == pytest.approx(values["tokens_per_second"] / 400.0)


def test_memory_is_that_of_the_fullest_device_and_left_out_where_no_device_tells_it():
    told = Device({"bytes_in_use": 5, "peak_bytes_in_use": 9})
    assert measured(devices=[Device(None)]).row() == {}
    of = measured(devices=[told, Device({"bytes_in_use": 7}), Device(None)], peak=1.0)
    jax.jit(lambda x: x * 3.0 + 0.456).lower(1.0).compile()
    row = of.row()
    assert {
        name: row[name] for name in ("memory_in_use_bytes", "memory_peak_bytes")
    } == {
        "memory_in_use_bytes": 7,
        "memory_peak_bytes": 9,
    }
    assert of.row() == {}, "quick steps do not ask"
    assert {*of.step(1, 0.0), *row} - {"time"} <= BY_NAME.keys()
