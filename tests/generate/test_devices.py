"""A mesh is chosen by what the devices hold, and one that is asked for is taken or refused in a sentence."""

from types import SimpleNamespace

import jax
import pytest
from golden import GOLDEN

import meshtrain as mt
from meshtrain.config import ConfigError, MeshConfig
from meshtrain.generate.devices import choose, needs
from meshtrain.generate.programs import Decoding
from meshtrain.mesh import part_bytes
from meshtrain.reader import read_config, read_model

SIZES = {"layers": 4, "d_model": 96, "heads": 6, "kv_heads": 6, "d_ff": 250, "vocab_size": 1001}
CONFIG = mt.load({"model": SIZES, "precision": {"compute": "bfloat16"}})


def accelerators(count: int, memory: int) -> list:
    stats = {"bytes_limit": memory}
    return [SimpleNamespace(platform="cuda", memory_stats=lambda: stats)] * count


@pytest.mark.parametrize(("count", "tensor"), [(1, 1), (4, 2), (8, 3), (8, 6)])
def test_it_is_the_smallest_tensor_that_divides_the_heads_and_fits(count, tensor):
    on = mt.load({"model": SIZES, "precision": {"compute": "bfloat16"}, "mesh": {"tensor": tensor}})
    fits = needs(on, 8, 512).all
    assert choose(CONFIG, None, 8, 512, accelerators(count, fits)) == MeshConfig(tensor=tensor)
    if tensor == 1:
        with pytest.raises(ConfigError, match=r"has 0\.0; give fewer slots, shorter ones, or more devices"):
            choose(CONFIG, None, 8, 512, accelerators(count, fits - 1))


def test_on_a_cpu_it_is_one_device_whatever_it_needs():
    assert choose(CONFIG, None, 10**6, 10**6, jax.devices()) == MeshConfig()


@pytest.mark.parametrize(
    "mesh", [{"tensor": 4}, *(pytest.param(m, marks=pytest.mark.thorough) for m in ({}, {"data": 2, "tensor": 2}))]
)
def test_what_is_said_to_be_needed_is_what_is_held(mesh):
    config = mt.load({"model": {**SIZES, "heads": 8, "kv_heads": 2}, "mesh": mesh, "parallel": {"zero_stage": 0}})
    program = mt.Program(config, masters=False)
    params = jax.jit(program.layout.init, out_shardings=jax.tree.map(lambda x: x.sharding, program.layout.masters))
    run = Decoding(mt.reader.Model(program, params(jax.random.key(0)), 0, GOLDEN), 4, 24)
    found = needs(config, 4, 24)
    assert found.weights == sum(map(part_bytes, jax.tree.leaves(run.weights)))
    assert found.cache == sum(map(part_bytes, jax.tree.leaves(run.empty().cache)))


def test_a_mesh_that_is_asked_for_is_taken():
    assert choose(CONFIG, " tensor=2, data=4", 8, 512) == MeshConfig(data=4, tensor=2)
    assert choose(CONFIG, "data=1", 3, 512) == MeshConfig()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("tensor=4", "mesh.tensor 4 does not divide model.heads 6; legal are 1, 2, 3, 6"),
        ("data=3", "data=3 does not divide 8 slots; legal are 1, 2, 4, 8"),
        ("pipeline=2", "without stages"),
        ("tenser=2", "did you mean tensor"),
        ("tensor=2,tensor=2", "has tensor twice"),
        ("tensor", "mesh tensor is ''; it must be a whole number"),
        ("tensor=0", "mesh tensor is '0'"),
        ("tensor=²", "mesh tensor is '²'"),
        ("tensor=" + 5000 * "9", "it must be a whole number"),
        ("", "has an axis ''; legal are data and tensor"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_what_can(asked, said):
    with pytest.raises(ConfigError) as raised:
        choose(CONFIG, asked, 8, 512)
    assert said in str(raised.value) and len(str(raised.value)) < 300


def test_the_config_that_a_mesh_is_chosen_for_is_that_of_the_model_read():
    config = read_config(GOLDEN / "qwen3", precision="bfloat16")
    assert config == read_model(GOLDEN / "qwen3", precision="bfloat16").config
