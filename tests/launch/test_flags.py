"""Presets of flags: which, for what, and that the installed compiler takes each.

An unknown flag ends a process, so each trial has its own.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.config import load
from meshtrain.launch import flags
from meshtrain.plan import load_cluster, named
from meshtrain.plan.__main__ import main
from meshtrain.train import COMPILE_TIMEOUT
from meshtrain.xla import slop_factor

LARGE = load(Path(__file__).parents[2] / "configs/llama3_70b.yaml")
H100S = named("h100", LARGE.mesh.devices)
THERE = {flags.JAXLIB: "0.11.3", flags.NCCL: "2.28.7"}
PERMUTE = "xla_gpu_collective_permute_connected_components"
TERMINATE = "xla_gpu_nccl_termination_timeout_seconds"


def chosen(config=LARGE, cluster=H100S, versions=THERE, given=None):
    return {
        one.name: one for one in flags.settings(config, cluster, versions, given or {})
    }


def narrow(**changes):
    spine = dataclasses.replace(H100S.links.spine, oversubscription=7.0)
    return dataclasses.replace(
        H100S, links=dataclasses.replace(H100S.links, spine=spine), **changes
    )


def test_stages_on_several_nodes_have_their_messages_in_communicators_of_their_own():
    assert {name: one.value for name, one in chosen().items()} == {
        PERMUTE: "true",
        TERMINATE: "3600",
        "NCCL_DEBUG": "WARN",
    }


def test_a_process_that_waits_for_others_is_ended_and_not_before_one_may_have_compiled():
    assert int(chosen()[TERMINATE].value) >= COMPILE_TIMEOUT


def test_without_messages_to_some_alone_there_is_no_use_of_such_communicators():
    no_stages = {"mesh": {"data": 64}, "train": {"global_batch_size": 64}}
    assert list(chosen(load(no_stages))) == [TERMINATE, "NCCL_DEBUG"]
    assert PERMUTE in chosen(
        load(no_stages | {"parallel": {"reduce": {"algorithm": "ring"}}})
    )


def test_one_node_and_fake_devices_need_nothing():
    assert not chosen(load({"mesh": {"data": 4, "pipeline": 2}}))
    assert not chosen(cluster=named("cpu", 512))
    assert not flags.choose_step_settings(
        LARGE, named("cpu", 512)
    ) and flags.choose_step_settings(LARGE, H100S)


def test_rings_keep_to_their_rail_where_the_way_between_rails_is_narrow():
    assert chosen(cluster=narrow())["NCCL_CROSS_NIC"].value == "0"
    assert "NCCL_CROSS_NIC" not in chosen(cluster=narrow(topology="fat_tree"))
    assert "NCCL_PXN_DISABLE" not in chosen(cluster=narrow())
    assert (
        chosen(cluster=narrow(between_rails="spine"))["NCCL_PXN_DISABLE"].value == "1"
    )


@pytest.mark.parametrize(
    "version", ["", "0.9.2", "0.10.1", "0.10.2", "0.11.0", "0.12.0.1", "0.13.0", "1.0"]
)
def test_a_flag_is_left_alone_with_versions_that_were_not_seen_to_take_it(version):
    found = chosen(versions={flags.JAXLIB: version} if version else {})
    takes = version in ("0.10.2", "0.11.0", "0.12.0.1")
    assert bool(found[PERMUTE].left) != takes and not found["NCCL_DEBUG"].left
    assert ("XLA_FLAGS" in flags.environment(list(found.values()), {})) == takes


def test_what_the_user_set_wins_and_stays():
    given = {
        "XLA_FLAGS": f"--xla_dump_to=/x --{PERMUTE}=false --{TERMINATE}=60",
        "NCCL_DEBUG": "INFO",
    }
    found = chosen(given=given)
    assert {one.left for one in found.values()} == {"set by the user"}
    assert flags.environment(list(found.values()), given) == {}
    other = {"XLA_FLAGS": "--xla_dump_to=/x"}
    assert flags.environment(list(chosen(given=other).values()), other) == {
        "XLA_FLAGS": f"--xla_dump_to=/x --{PERMUTE}=true --{TERMINATE}=3600",
        "NCCL_DEBUG": "WARN",
    }


def test_the_command_says_of_each_what_why_and_for_which_versions(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("mesh: {data: 4, tensor: 8, pipeline: 2}")
    arguments = ["--config", str(file), "--cluster", "h100", "--flags"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert (
        f"{PERMUTE}=true" in said
        and "issue 40505" in said
        and "jaxlib 0.10.2 and later, before 0.13" in said
    )
    assert (
        f"xla_gpu_memory_limit_slop_factor={slop_factor()}" in said
        and "overlap_limit=4" in said
    )
    assert "train.gc_every=100" in said
    assert all(setting in said and why in said for setting, why in flags.ADVICE.items())
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["value"]) for one in found["by_the_run"]] == [
        ("train.gc_every", "100")
    ]
    assert [one["name"] for one in found["set"]] == [
        PERMUTE,
        TERMINATE,
        "NCCL_DEBUG",
    ] and len(found["left"]) == len(flags.ADVICE)


def run(code, *xla):
    """Under these flags and no others."""
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(f"--{flag}" for flag in xla),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


START = "import jax; jax.devices(); print('started')"
EVERY = chosen(cluster=narrow(between_rails="spine"))
SET = [*EVERY.values(), *flags.choose_step_settings(LARGE, H100S)]
ALL = [f"{one.name}={one.value}" for one in SET if one.name.startswith("xla_")]
GONE = [
    f"xla_gpu_enable_{what}=true"
    for what in ("async_collectives", "async_all_gather", "triton_softmax_fusion")
]


@pytest.mark.thorough
def test_the_compiler_that_is_installed_takes_every_flag():
    assert set(EVERY) == {preset.name for preset in flags.PRESETS} and len(ALL) == 6
    started = run(START, *ALL)
    assert (started.returncode, started.stdout) == (0, "started\n"), started.stderr[
        -500:
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flag", [*GONE, "xla_gpu_graph_level=0", "xla_gpu_no_such_flag=1"]
)
def test_flags_that_older_advice_names_end_the_process(flag):
    ended = run(START, *ALL, flag)
    assert (
        ended.returncode != 0
        and not ended.stdout
        and flag.partition("=")[0] in ended.stderr
    )


COMPILE = """
import jax
from meshtrain.plan.compiled import described_devices
mesh = jax.sharding.Mesh(described_devices("h100", 16), "x")
ring = jax.shard_map(lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 16) for i in range(16)]), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
shape = jax.ShapeDtypeStruct((16, 1024), "float32", sharding=jax.NamedSharding(mesh, jax.P("x")))
print("collective-permute" in jax.jit(ring).lower(shape).compile().as_text())
"""


HAS_CUDA = importlib.util.find_spec("jax_cuda12_plugin") is not None


@pytest.mark.skipif(not HAS_CUDA, reason="XLA's CUDA compiler is not installed")
def test_the_compiler_for_gpus_takes_every_flag():
    compiled = run(COMPILE, *ALL)
    assert (compiled.returncode, compiled.stdout) == (0, "True\n"), compiled.stderr[
        -500:
    ]


def test_a_file_of_the_presets_cluster_is_enough(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "nodes: 64\ndevices_per_node: 8\ntopology: rail_optimised\naccelerator: {name: h100}\n"
        "links: {node: {devices: 8, bandwidth: 450}, rail: {devices: 64, bandwidth: 50}, spine: {devices: 512, "
        "bandwidth: 50, oversubscription: 2}}\n"
    )
    assert "NCCL_CROSS_NIC" in chosen(cluster=load_cluster(file))
