"""Muon on a mesh: updates are those of one device, each matrix is iterated by one rank, and shards travel twice."""

import math
from collections import defaultdict

import jax
import numpy as np
import optax
import pytest
from short_runs import canonical_numbers, place, start_optimizer

from meshtrain.config import load
from meshtrain.hlo import collectives
from meshtrain.mesh import make_mesh
from meshtrain.optimizers import matrix_sides, orthogonalized
from meshtrain.parallel.orthogonal import orthogonalizer
from meshtrain.parallel.placement import all_placed
from meshtrain.parallel.stacks import make_stacks
from meshtrain.plan.orthogonal import orthogonal_transfers
from meshtrain.step import Program

MODEL = {
    "layers": 3,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 48,
    "vocab_size": 64,
}
EXPERTS = {
    "d_ff": 0,
    "family": "mixtral",
    "moe": {"experts": 4, "top_k": 2, "d_ff": 48},
}
SQUARE = {"kv_heads": 4, "d_ff": 33}
LORA = {"lora": {"rank": 3}}
BATCH_OF_10 = {"train": {"global_batch_size": 10, "sequence_length": 32}}


def on(mesh, model=None, sections=None, **parallel):
    return {
        "model": MODEL | (model or {}),
        "mesh": mesh,
        "parallel": parallel,
        "optimizer": {"name": "muon", "learning_rate": 0.01, "warmup_steps": 0},
        "train": {"global_batch_size": 8, "sequence_length": 32},
        **(sections or {}),
    }


LAYOUTS = {
    "data 8": on({"data": 8}),
    "data 4, tensor 2": on({"data": 4, "tensor": 2}, SQUARE),
    "data, tensor, pipeline": on(
        {"data": 2, "tensor": 2, "pipeline": 2}, microbatches=2
    ),
    "interleaved stages": on(
        {"data": 2, "pipeline": 2},
        {"layers": 5},
        microbatches=2,
        schedule="interleaved",
        virtual_stages=2,
    ),
    "context": on({"data": 2, "context": 2, "tensor": 2}),
    "keys on every tensor rank": on({"data": 2, "tensor": 4}),
    "stage 0": on({"data": 4, "tensor": 2}, zero_stage=0),
    "stage 2": on({"data": 4, "tensor": 2}, zero_stage=2),
    "stage 3": on({"data": 4, "tensor": 2}, zero_stage=3),
    "nothing that data divides": on({"data": 5}, {"d_ff": 33}, BATCH_OF_10),
    "islands summed every step": on({"data": 4, "islands": 2, "tensor": 2}),
    "experts": on({"data": 4, "expert": 2, "tensor": 2}, EXPERTS),
    "experts on one rank": on({"data": 8}, EXPERTS),
    "adapters": on(
        {"data": 2, "tensor": 2, "pipeline": 2}, sections=LORA, microbatches=2
    ),
}


def updated(given):
    """Canonical weights after two updates by made-up gradients."""
    config = load(given)
    program = Program(config, make_mesh(config))
    layout = program.layout
    numbers = lambda seed: layout.only_trained(
        place(layout, canonical_numbers(layout, seed))
    )
    params = numbers(0)
    state, step = start_optimizer(program, params)
    for seed in (1, 2):
        params, state = step(params, state, numbers(seed))
    of = lambda weight, x: None if x is None else layout.canonical_leaf(weight, x)
    return jax.tree.map(np.asarray, jax.jit(lambda tree: layout.map(of, tree))(params))


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_on_any_mesh_are_those_of_one_device(name):
    given = LAYOUTS[name]
    alone = updated({**given, "mesh": {"data": 1}, "parallel": {}})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        updated(given),
        alone,
    )


def sent_by_update(program):
    """What a device sends in the optimizer's part of a step, compiled alone, but for sums of the gradient's norm."""
    shapes = program.state_shapes
    params = program.layout.only_trained(shapes.params)
    shardings = (
        jax.tree.map(lambda x: x.sharding, params),
        program.state_shardings.optimizer,
    )
    update = jax.jit(
        program.optimizer.update, out_shardings=shardings, donate_argnums=(0, 1)
    )
    compiled = update.lower(params, shapes.optimizer, params).compile()
    norm = lambda c: c.kind == "all-reduce" and c.bytes < 256
    return [c for c in collectives(compiled, program.mesh) if c.axes and not norm(c)]


EVEN = {"layers": 8, "d_model": 64, "heads": 8, "kv_heads": 8, "d_ff": 256}
SENT = {
    "data 8": on({"data": 8}, EVEN),
    "data 4, tensor 2": on({"data": 4, "tensor": 2}, EVEN),
    "data, tensor, pipeline": on(
        {"data": 2, "tensor": 2, "pipeline": 2}, EVEN, microbatches=2
    ),
    "stage 3": on({"data": 8}, EVEN, zero_stage=3),
    "context": on({"data": 2, "context": 2, "tensor": 2}, EVEN),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SENT)
def test_a_rank_sends_its_shards_twice_and_no_matrix_whole(name):
    config = load(SENT[name])
    program = Program(config, make_mesh(config))
    ranks = config.mesh.devices // config.mesh.pipeline
    shards = sum(4 * w.on_rank() for w in program.layout.flat if orthogonalized(w))
    found = sent_by_update(program)
    assert {c.kind for c in found} == {"all-to-all"}
    assert sum(c.sent * c.times for c in found) == 2 * shards * (ranks - 1) / ranks


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*LAYOUTS])
def test_the_planner_knows_what_matrices_send_and_on_which_axes(name):
    config = load(LAYOUTS[name])
    program = Program(config, make_mesh(config))
    planned = defaultdict(float)
    for transfer in orthogonal_transfers(config):
        planned[transfer.axis, transfer.kind] += transfer.sent
    found = defaultdict(float)
    for c in sent_by_update(program):
        found[c.axis, c.kind] += c.sent * c.times
    assert planned and found == pytest.approx(planned, rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_matrix_is_one_ranks_and_ranks_have_equally_many(name):
    config = load(LAYOUTS[name])
    weights = [w for w in all_placed(config) if w.updated and orthogonalized(w)]
    stacks = make_stacks(config.mesh, weights)
    assert sorted(w.name for s in stacks for w, _ in s.members) == sorted(
        w.name for w in weights
    )
    for stack in stacks:
        matrices = sum(
            math.prod(
                w.padded[d] // w.ways[d] for d in range(len(w.axes)) if d not in dims
            )
            for w, dims in stack.members
        )
        assert matrices <= stack.ranks * stack.on_rank < matrices + stack.ranks
        of_experts = "experts" in stack.members[0][0].axes
        over = config.mesh.expert if of_experts else 1
        assert stack.ranks == config.mesh.shards * config.mesh.tensor // over


def test_what_leads_into_the_stream_joins_what_leads_out_of_it():
    config = load(SENT["data 4, tensor 2"])
    weights = [w for w in all_placed(config) if orthogonalized(w)]
    names = [
        {w.name.split(".")[-1] for w, _ in s.members}
        for s in make_stacks(config.mesh, weights)
    ]
    assert names == [{"q", "k", "v", "out"}, {"gate", "up", "down"}]


def test_an_adapters_factors_are_matrices_of_its_rank():
    """A factor, as the dense layout has it: every input of its weight x rank, and rank x every output."""
    for weight in all_placed(load(on({"data": 1}, sections=LORA))):
        if weight.adapter:
            sides = [
                math.prod(weight.shape[d] for d in side)
                for side in matrix_sides(weight)
            ]
            whole = math.prod(weight.shape[1:])
            assert sides == (
                [whole // 3, 3] if weight.name.endswith("_a") else [3, whole // 3]
            ), weight.name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given", [on({"data": 1}), on({"data": 1}, EXPERTS)], ids=["dense", "experts"]
)
def test_on_one_device_updates_are_optaxs_to_the_bit(given):
    """Of each layer by itself, as Optax takes it."""
    config = load(given)
    program = Program(config, make_mesh(config))
    weights = [w for w in program.layout.flat if orthogonalized(w)]
    random = np.random.default_rng(0)
    arrays = {
        w.name: random.standard_normal(w.shape).astype(np.float32) for w in weights
    }

    def of_optax(weight, x):
        dims = [
            tuple(d - 1 for d in side) for side in matrix_sides(weight)
        ]  # without that of the layers
        muon = optax.contrib.scale_by_muon(
            beta=0.0,
            nesterov=False,
            eps=1e-8,
            weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(*dims),
        )
        return jax.vmap(lambda one: muon.update(one, muon.init(one))[0])(x)

    theirs = jax.jit(lambda xs: {w.name: of_optax(w, xs[w.name]) for w in weights})(
        arrays
    )
    ours = jax.jit(orthogonalizer(program.layout, weights, 1e-8))(arrays)
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
