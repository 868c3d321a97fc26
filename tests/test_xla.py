"""A run takes as much of a GPU's memory as the planner counts on, and XLA plans for as much."""

import os

import pytest

from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.xla import POOL, XLA_SHARE, ask_for_pool, slop_factor

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_pool_is_asked_for_before_jax_starts():
    make_mesh(load({"run": {"fake_devices": 1}}))
    assert float(os.environ[NEW]) == POOL


@pytest.mark.parametrize("name", [NEW, OLD])
def test_a_share_that_the_environment_gives_is_left_alone(name, monkeypatch):
    monkeypatch.setenv(name, "0.5")
    ask_for_pool()
    # JAX refuses both at once
    assert {n: os.environ.get(n) for n in (NEW, OLD)} == {NEW: None, OLD: None} | {
        name: "0.5"
    }


def test_xla_plans_for_what_the_pool_holds():
    assert XLA_SHARE * slop_factor() / 100 == pytest.approx(POOL, abs=0.005)
