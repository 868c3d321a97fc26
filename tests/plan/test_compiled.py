import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from experiments.plan.__main__ import GROUPS, row_config
from meshtrain.config import ConfigError, to_yaml
from meshtrain.plan.compiled import GPUS, parse_target, target_config

CUDA = (
    importlib.util.find_spec("jax_plugins") is not None
    and importlib.util.find_spec("jax_plugins.xla_cuda12") is not None
)


def test_a_target_is_a_name_with_or_without_the_number_of_devices():
    assert parse_target("h100", 8) == parse_target("H100x8", 8) == "h100"
    with pytest.raises(ConfigError, match=r"mesh has 8 devices, .* h100 or h100x8"):
        parse_target("h100x16", 8)
    with pytest.raises(ConfigError, match="must be one of cpu, a100, h100, h200, b200"):
        parse_target("h300", 8)


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_described_by_balanced_braces_with_its_memory(name):
    text = target_config(name)
    assert text.count("{") == text.count("}") == 4
    assert f"device_memory_size: {GPUS[name]['memory']}" in text


def planned(config, target, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu,cuda",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    command = [
        sys.executable,
        "-m",
        "meshtrain.plan",
        "--config",
        str(path),
        "--json",
        "--compile",
        target,
    ]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.thorough
@pytest.mark.skipif(CUDA, reason="the CUDA compiler is installed")
def test_without_the_cuda_compiler_one_sentence_says_what_to_install(
    llama_8b, tmp_path
):
    done = planned(llama_8b(), "h100", tmp_path)
    assert done.returncode == 2
    assert re.match(
        "meshtrain: --compile h100 .* CUDA compiler, .* install jax-cuda12",
        done.stderr.splitlines()[-1],
    )


@pytest.mark.skipif(not CUDA, reason="needs the extra meshtrain[compile]")
def test_memory_and_traffic_are_those_of_xlas_gpu_program(llama_8b, tmp_path):
    """8B parameters on 16 H100 that nobody has."""
    found = json.loads(
        planned(
            llama_8b(remat="full", sequence_parallel=True), "h100x16", tmp_path
        ).stdout
    )
    compiled = found["compiled"]
    assert found["per_device_bytes"]["total"] == pytest.approx(
        compiled["total_bytes"], rel=0.08
    )
    for axis in ("data", "tensor", "pipeline"):
        sent = sum(
            c["sent_bytes"] for c in compiled["collectives"] if c["axis"] == axis
        )
        assert found["traffic_bytes_per_step"][axis] == pytest.approx(sent, rel=0.01)


@pytest.mark.thorough
@pytest.mark.skipif(not CUDA, reason="needs the extra meshtrain[compile]")
def test_a_hybrids_embedding_has_a_float32_gradient_beside_its_logits(tmp_path):
    found = json.loads(
        planned(row_config(GROUPS["hybrids"][0]), "h100x8", tmp_path).stdout
    )
    compiled = found["compiled"]["total_bytes"]
    assert found["per_device_bytes"]["total"] == pytest.approx(compiled, rel=0.05)
