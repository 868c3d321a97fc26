import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import covering, slow_but, thorough_but
from jax.sharding import PartitionSpec

from experiments.adopt import stash
from meshtrain.compat import residuals, vary, varying
from meshtrain.config import load, replaced
from meshtrain.config.follow import as_run_on
from meshtrain.mesh import AXES, DATA, make_mesh
from meshtrain.model.weights import parameters
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.plan import activations, memory, named, pipeline, plan, shapes
from meshtrain.schedule.facts import ONE_STAGE
from meshtrain.step import Program


def odd(family, mesh, **parallel):
    """A model whose sizes divide by nothing, on a mesh (data, tensor, pipeline)."""
    data, tensor, stages = mesh
    return load(
        {
            "model": {
                "family": family,
                "layers": 5,
                "d_model": 84,
                "heads": 6,
                "kv_heads": 3,
                "d_ff": 190,
                "vocab_size": 257,
            },
            "mesh": {"data": data, "tensor": tensor, "pipeline": stages},
            "parallel": parallel,
            "train": {"global_batch_size": 4, "sequence_length": 40},
        }
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 1), (4, 1, 1), (2, 2, 1), (1, 6, 1), (2, 2, 2), (1, 3, 2), (4, 1, 2)],
    ids=str,
)
def test_elements_on_a_device_are_those_of_the_layout(family, mesh):
    for stage, vocab in ((0, "edge"), (1, "spread"), (3, "edge"), (3, "spread")):
        config = odd(family, mesh, zero_stage=stage, vocab=vocab)
        layout = Layout(config, make_mesh(config))
        shards = [
            x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(layout.masters)
        ]
        held = memory.between_steps(config)[0]
        assert held.name == "float32 masters"
        assert held.nbytes == sum(
            4 * jnp.prod(jnp.array(shape)).item() for shape in shards
        )


def beside(now: list[Any], cells: list[Any]) -> list[Any]:
    """The cells of now; and, every third as thorough and the others as slow, a pairwise covering of all."""
    pairwise = covering(cells)
    return thorough_but(
        dict.fromkeys([*now, *pairwise]), now.__contains__, pairwise[::3]
    )


OPTIMIZED = list(
    itertools.product(
        ("adamw", "sgd", "lion", "adafactor", "muon"),
        ((1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2)),
        ("llama", "gpt2"),
    )
)
NOW_OPTIMIZED = covering(
    [cell for cell in OPTIMIZED if cell[1] in ((4, 1, 1), (2, 2, 2))]
)


@pytest.mark.parametrize("cell", beside(NOW_OPTIMIZED, OPTIMIZED), ids=str)
def test_optimizer_state_on_a_device_is_that_of_the_program(cell):
    name, mesh, family = cell
    config = odd(family, mesh)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name=name)
    )
    state = Program(config, make_mesh(config)).state_shapes.optimizer
    found = sum(
        4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state)
    )
    assert memory.between_steps(config)[1].nbytes == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "tuned",
    [
        {"lora": {"rank": 3}},
        {"lora": {"rank": 2, "targets": ("q", "up")}},
        {"train": {"trainable": ("head.*",)}},
    ],
    ids=str,
)
def test_what_lies_on_a_device_between_steps_of_a_tuned_model_is_that_of_the_program(
    tuned, stage
):
    config = replaced(
        odd("llama", (2, 2, 2), zero_stage=stage),
        precision={"compute": "bfloat16"},
        **tuned,
    )
    shapes_ = Program(config, make_mesh(config)).state_shapes

    def held(tree):
        return sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(tree)
        )

    masters, moments, frozen = (item.nbytes for item in memory.between_steps(config))
    assert masters + frozen == held(shapes_.params)
    assert moments == pytest.approx(held(shapes_.optimizer), rel=0.005)


STASHED = list(itertools.product(stash.CASES, ("none", "selective", "dots", "full")))
NOW_STASHED = [STASHED[5 * i % len(STASHED)] for i in range(4)] + [
    ("norms alone", "none")
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cell", slow_but(STASHED, [*NOW_STASHED, *STASHED[2::4]]), ids=str
)
def test_a_tuned_layer_keeps_what_the_pipelines_stash_has_of_it(cell):
    case, remat = cell
    config = stash.config(stash.CASES[case], remat)
    assert activations.kept(config, remat) == pytest.approx(
        stash.stashed(config), rel=0.03
    )


def test_parameters_are_counted_without_padding():
    for family in ("llama", "gpt2"):
        config = odd(family, (1, 1, 1))
        whole = Layout(config, make_mesh(config)).masters
        assert parameters(config.model) == sum(x.size for x in jax.tree.leaves(whole))


def traced_residuals(config) -> float:
    """Bytes a token that one layer of the real model keeps, from its traced vjp."""
    program = Program(config, make_mesh(config))
    found: list[int] = []

    def local(masters, tokens):
        weights = program.local.zero.gather_params(masters)
        rows = vary(jnp.arange(tokens.shape[0]), (DATA,))
        batch = {"tokens": tokens, "labels": tokens, "rows": rows}
        key = jax.random.key(0) if config.model.dropout else None
        x = program.local.forward.embed(weights, batch, None)
        layer, layer_at = (
            program.local.forward.layer(
                batch, key, program.layout.segments[0].period[0]
            ),
            jnp.asarray(program.layout.layer_at[0, 0]),
        )

        def stack(blocks, x):
            def step(x, of_layer):
                (differentiated, constant), index = of_layer
                return layer(differentiated, x, constant, index), None

            return jax.lax.scan(step, x, (blocks, layer_at))[0]

        y, vjp = jax.vjp(stack, weights.part("blocks"), x)
        layers = config.model.layers
        found.extend(
            r.size * r.dtype.itemsize
            for r in residuals(vjp)
            if r.shape[:1] == (layers,) and DATA in varying(r)
        )
        return vary(jnp.sum(y.astype(jnp.float32)), AXES)[None]

    shape = (config.train.global_batch_size, config.train.sequence_length)
    specs = (program.layout.shards, PartitionSpec(DATA))
    mapped = jax.shard_map(
        local, mesh=program.mesh, in_specs=specs, out_specs=PartitionSpec(AXES)
    )
    jax.eval_shape(
        mapped, program.layout.masters, jax.ShapeDtypeStruct(shape, jnp.int32)
    )
    return sum(found) / config.model.layers / (shape[0] * shape[1])


NAMES = ("qkv", "attention", "attention_out", "mlp_in", "mlp_hidden", "mlp_out")
KEPT = [(), *((name,) for name in NAMES), ("qkv", "attention"), NAMES]


def layer(
    family,
    tensor=2,
    stages=1,
    layers=7,
    dropout=0.0,
    kv_heads=4,
    model=None,
    **parallel,
):
    """A model of odd sizes; with one block of queries, so that the blockwise attention of CPUs keeps the scores as one
    array.
    """
    sizes = {
        "layers": layers,
        "d_model": 96,
        "heads": 8,
        "kv_heads": kv_heads,
        "d_ff": 320,
        "vocab_size": 64,
    }
    return load(
        {
            "model": {"family": family, "dropout": dropout} | sizes | (model or {}),
            "mesh": {"tensor": tensor, "pipeline": stages},
            "precision": {"compute": "bfloat16"},
            "parallel": parallel,
            "train": {"global_batch_size": 6, "sequence_length": 60},
        }
    )


# Of each layer: family, what is kept, sequence parallelism, dropout.
LAYERS = list(
    itertools.product(
        ("llama", "gpt2", "gemma3"),
        ("none", "selective", "dots", "full", *KEPT),
        (False, True),
        (0.0, 0.1),
    )
)


# Each policy with each family, and each name that may be kept with one.
POLICIES = covering([cell for cell in LAYERS if isinstance(cell[1], str)])
NAMED = [
    ("llama", kept, i % 2 == 0, (0.0, 0.1)[i % 2]) for i, kept in enumerate(KEPT[1:])
]
NOW_LAYERS = [*POLICIES, *NAMED]


@pytest.mark.thorough
@pytest.mark.parametrize("cell", beside(NOW_LAYERS, LAYERS), ids=str)
def test_activations_of_a_layer_are_what_the_traced_model_keeps(cell):
    family, remat, split, dropout = cell
    keys = (
        {"remat": remat}
        if isinstance(remat, str)
        else {"remat": "names", "remat_keep": remat}
    )
    config = layer(family, dropout=dropout, sequence_parallel=split, **keys)
    planned = activations.kept(config, config.parallel.remat) / shapes.tokens(config)
    assert planned == pytest.approx(traced_residuals(config), rel=0.03)


LINEAR = {
    "pattern": ["linear"],
    "linear": {
        "key_heads": 4,
        "value_heads": 8,
        "key_dim": 16,
        "value_dim": 12,
        "chunk": 16,
    },
}
KDA, MAMBA2 = (
    LINEAR | {"linear": LINEAR["linear"] | {"kind": kind}} for kind in ("kda", "mamba2")
)
GATED = {"family": "qwen3_5", "pattern": ["full"], "rope_share": 0.5}
MIXERS = [
    (LINEAR, "none", False),
    (LINEAR, "dots", True),
    (LINEAR, "full", False),
    (LINEAR, "selective", True),
    (LINEAR, ("qkv",), False),
    (LINEAR, ("attention",), True),
    (KDA, "none", False),
    (KDA, "selective", True),
    (KDA, "full", False),
    (MAMBA2, "none", True),
    (MAMBA2, "dots", False),
    (GATED, "none", True),
    (GATED, "dots", False),
    (GATED, "selective", False),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "remat", "split"), MIXERS)
def test_linear_and_gated_attention_keep_and_leave_what_the_traced_model_does(
    model, remat, split
):
    keys = (
        {"remat": remat}
        if isinstance(remat, str)
        else {"remat": "names", "remat_keep": remat}
    )
    config = layer("llama", model=model, sequence_parallel=split, **keys)
    planned = activations.kept(config, config.parallel.remat) / shapes.tokens(config)
    assert planned == pytest.approx(traced_residuals(config), rel=0.03)
    pipeline = {"schedule": "zb_h1", "microbatches": 2, "sequence_parallel": split}
    config = layer("llama", stages=2, layers=8, model=model, **pipeline, **keys)
    kept = activations.kept(config, config.parallel.remat)
    planned = kept, activations.weight_grad_residuals(config)
    assert planned == pytest.approx(traced_stage(config), rel=0.03)


def traced_stage(config) -> tuple[float, float]:
    """Bytes that one layer of one microbatch has in a stage's stash, and that the input gradient leaves of it, from the
    traced halves.
    """
    program = Program(config, make_mesh(config))
    found: list[float] = []

    def local(masters, tokens):
        rows = jnp.arange(math.prod(tokens.shape[:2])).reshape(tokens.shape[:2])
        batch = {"tokens": tokens, "labels": tokens, "rows": rows}
        key = jax.random.key(0) if config.model.dropout else None
        stage = Stage(
            program.local.forward,
            1,
            program.local.zero.gather_params(masters),
            batch,
            key,
        )
        found.extend(
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
            for tree in stage.stash_shapes(split=True)
        )
        return vary(jnp.zeros(1), AXES)

    shape = (
        config.parallel.microbatches,
        shapes.microbatch_rows(config),
        config.train.sequence_length,
    )
    mapped = jax.shard_map(
        local,
        mesh=program.mesh,
        in_specs=(program.layout.shards, PartitionSpec()),
        out_specs=PartitionSpec(AXES),
    )
    jax.eval_shape(
        mapped, program.layout.masters, jax.ShapeDtypeStruct(shape, jnp.int32)
    )
    return found[0], found[1]


# Of each stage: family, what is kept, sequence parallelism.
STAGES = list(
    itertools.product(
        ("llama", "gpt2", "gemma3"),
        (
            "none",
            "selective",
            "dots",
            "full",
            (),
            ("attention",),
            ("qkv", "mlp_in"),
            ("mlp_hidden",),
        ),
        (False, True),
    )
)


NOW_STAGES = covering(
    [
        cell
        for cell in STAGES
        if cell[1] in ("none", "selective", "full", ("qkv", "mlp_in"))
    ]
)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", beside(NOW_STAGES, STAGES), ids=str)
def test_a_stage_keeps_and_leaves_for_w_what_its_traced_halves_do(cell):
    family, remat, split = cell
    keys = (
        {"remat": remat}
        if isinstance(remat, str)
        else {"remat": "names", "remat_keep": remat}
    )
    pipeline = {"schedule": "zb_h1", "microbatches": 2, "sequence_parallel": split}
    config = layer(family, stages=2, layers=8, **pipeline, **keys)
    planned = (
        activations.kept(config, config.parallel.remat),
        activations.weight_grad_residuals(config),
    )
    assert planned == pytest.approx(traced_stage(config), rel=0.03)


MADE_OF_LATENTS = {"q_rank": 24, "kv_rank": 40, "nope": 16, "rope": 8, "value": 12}
LATENTS = [
    (24, "none", False),
    (0, "selective", True),
    (24, "dots", True),
    (24, "full", False),
    (0, ("qkv",), False),
    (24, ("attention",), True),
]


@pytest.mark.thorough
@pytest.mark.parametrize("q_rank, remat, split", LATENTS)
def test_a_stage_of_latent_attention_keeps_and_leaves_what_its_traced_halves_do(
    q_rank, remat, split
):
    keys = (
        {"remat": remat}
        if isinstance(remat, str)
        else {"remat": "names", "remat_keep": remat}
    )
    pipeline = {"schedule": "zb_h1", "microbatches": 2, "sequence_parallel": split}
    config = layer("llama", stages=2, layers=8, kv_heads=8, **pipeline, **keys)
    config = replaced(config, model={"mla": {**MADE_OF_LATENTS, "q_rank": q_rank}})
    planned = (
        activations.kept(config, config.parallel.remat),
        activations.weight_grad_residuals(config),
    )
    assert planned == pytest.approx(traced_stage(config), rel=0.03)


# Of each stage: family, key and value heads that tensor does not divide, tensor, remat.
WHOLE = [
    ("llama", 2, 4, "none"),
    ("llama", 2, 4, "full"),
    ("llama", 1, 2, "dots"),
    ("gemma3", 1, 2, "selective"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("family, kv_heads, tensor, remat", WHOLE)
def test_a_stage_keeps_and_leaves_key_and_value_heads_that_are_whole_on_every_rank(
    family, kv_heads, tensor, remat
):
    pipeline = {"schedule": "zb_h1", "microbatches": 2}
    config = layer(
        family,
        tensor=tensor,
        stages=2,
        layers=8,
        kv_heads=kv_heads,
        remat=remat,
        **pipeline,
    )
    planned = activations.kept(config, remat), activations.weight_grad_residuals(config)
    assert planned == pytest.approx(traced_stage(config), rel=0.006)


SMALL = {
    "model": {
        "layers": 8,
        "d_model": 256,
        "heads": 8,
        "kv_heads": 4,
        "d_ff": 704,
        "vocab_size": 512,
    },
    "train": {"global_batch_size": 16, "sequence_length": 256},
}
ON_CPU: list[Any] = [
    ((1, 1, 1), {"microbatches": 4, "remat": "full"}),
    ((4, 1, 1), {"microbatches": 2, "zero_stage": 3, "remat": "full"}),
    ((2, 2, 1), {"microbatches": 4, "remat": "dots", "sequence_parallel": True}),
    ((2, 2, 2), {"microbatches": 4, "schedule": "1f1b"}),
    ((2, 1, 4), {"microbatches": 8, "schedule": "zb_h1"}),
]
DEEP = {"q_rank": 96, "kv_rank": 64, "nope": 32, "rope": 16, "value": 32}
LATENT_ON_CPU: list[Any] = [
    ((1, 1, 1), {"microbatches": 4, "remat": "full"}),
    ((4, 1, 1), {"microbatches": 2, "zero_stage": 3, "remat": "full"}),
    ((2, 2, 2), {"microbatches": 4, "schedule": "1f1b"}),
    ((1, 1, 2), {"microbatches": 4, "remat": "full"}),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cell", slow_but(LATENT_ON_CPU, LATENT_ON_CPU[1:3]), ids=str)
def test_a_step_of_latent_attention_holds_what_xlas_cpu_program_holds(cell):
    model = SMALL["model"] | {"kv_heads": None, "mla": DEEP}
    compare_with_program(SMALL | {"model": model}, *cell)


@pytest.mark.thorough
def test_heads_that_outweigh_the_mlp_are_what_a_layer_works_on():
    model = {"layers": 8, "d_model": 128, "heads": 16, "d_ff": 256, "vocab_size": 512}
    mla = {"q_rank": 64, "kv_rank": 64, "nope": 32, "rope": 16, "value": 32}
    sections = SMALL | {"model": model | {"mla": mla}}
    compare_with_program(sections, (1, 1, 1), {"microbatches": 4, "remat": "full"})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cell", slow_but(ON_CPU, [ON_CPU[i] for i in (1, 3, 4)]), ids=str
)
def test_what_a_step_holds_is_what_xlas_cpu_program_holds(cell):
    compare_with_program(SMALL, *cell)


# how many tokens further, and a layout
FURTHER_ON_CPU: list[Any] = [
    (1, (1, 1, 2), {"microbatches": 4, "remat": "full"}),
    (2, *ON_CPU[0]),
    (1, *ON_CPU[0]),
    (1, *ON_CPU[1]),
    (1, *ON_CPU[3]),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cell", slow_but(FURTHER_ON_CPU, FURTHER_ON_CPU[:2]), ids=str)
def test_further_predictions_hold_what_xlas_cpu_program_holds(cell):
    depths, *layout = cell
    compare_with_program(
        SMALL | {"model": SMALL["model"] | {"mtp": depths}}, *layout, most=1.05
    )


EVERY_LAYER = {"float8_skip": [0, 0]}
FLOAT8_ON_CPU: list[Any] = [
    ((2, 1, 1), {"microbatches": 4, "zero_stage": 1}, {}),
    ((4, 1, 1), {"microbatches": 2, "zero_stage": 3}, EVERY_LAYER),
    ((2, 1, 1), {"microbatches": 4}, EVERY_LAYER | {"float8_recipe": "tensorwise"}),
    ((2, 1, 2), {"microbatches": 4, "schedule": "1f1b"}, EVERY_LAYER),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cell", slow_but(FLOAT8_ON_CPU, FLOAT8_ON_CPU[:2]), ids=str)
def test_weights_that_are_held_in_float8_are_counted(cell):
    mesh, parallel, precision = cell
    compare_with_program(
        SMALL | {"precision": {"matmul": "float8", **precision}}, mesh, parallel
    )


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "dots", "selective", "full"])
def test_a_layer_keeps_more_where_cpus_skip_padding_by_a_conditional(remat):
    keys = {
        "schedule": "zb_h1",
        "microbatches": 2,
        "layer_split": [1, 6],
        "remat": remat,
    }
    config = layer("llama", stages=2, **keys)
    planned, _ = memory._add_conditional(config, activations.kept(config, remat), 0.0)
    assert planned == pytest.approx(traced_stage(config)[0], rel=0.03)


def compare_with_program(sections, mesh, parallel, most=1.08):
    config = load(
        sections | {"mesh": dict(zip(AXES, mesh, strict=True)), "parallel": parallel}
    )
    compiled = Program(config, make_mesh(config)).lower().compile().memory_analysis()
    held = (
        compiled.argument_size_in_bytes
        + compiled.output_size_in_bytes
        - compiled.alias_size_in_bytes
    )
    config = as_run_on("cpu", config)
    planned = memory.total(memory.items(config, pipeline.facts(config), platform="cpu"))
    assert 0.95 < planned / (held + compiled.temp_size_in_bytes) < most


def test_every_byte_has_a_name_and_a_kind(llama_8b):
    found = plan(llama_8b(), named("h100", 16))
    assert sum(memory.sum_by_kind(found.memory).values()) == pytest.approx(found.bytes)
    assert not [
        name
        for name, count in Counter(item.name for item in found.memory).items()
        if count > 1
    ]


def test_memory_falls_with_zero_stage_recomputation_and_sequence_parallelism(llama_8b):
    cluster = named("h100", 16)

    def size(mesh=None, **parallel):
        return plan(llama_8b(mesh, microbatches=2, **parallel), cluster).bytes

    mesh = {"data": 16}
    stages = [size(mesh, zero_stage=stage, zero_hold=False) for stage in (0, 1, 2, 3)]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4
    assert size(remat="none") > size(remat="dots") > size(remat="full")
    assert size(remat="full", sequence_parallel=False) > size(
        remat="full", sequence_parallel=True
    )


def test_more_microbatches_hold_more_with_gpipe_and_no_more_with_1f1b(llama_8b):
    cluster = named("h100", 16)

    def kept(schedule, microbatches):
        train = {"global_batch_size": 2 * microbatches}
        config = llama_8b(None, train, schedule=schedule, microbatches=microbatches)
        return next(
            i.nbytes
            for i in plan(config, cluster).memory
            if i.name.startswith("activations kept")
        )

    assert kept("1f1b", 64) == kept("1f1b", 8)
    # one place more is where idle stages write
    assert kept("gpipe", 64) / 65 == pytest.approx(kept("gpipe", 8) / 9)


def test_the_fullest_moment_is_what_counts(llama_8b):
    config = llama_8b({"data": 16}, zero_stage=3, microbatches=1, remat="full")
    name, held = memory.fullest(config, ONE_STAGE)
    passing = {
        moment: memory.total(items)
        for moment, items in memory.passing(config, ONE_STAGE).items()
    }
    assert passing[name] == max(passing.values())
    assert (
        memory.total(held)
        == memory.total([*memory.state(config), *memory.kept(config, ONE_STAGE)])
        + passing[name]
    )


def test_activations_and_state_are_an_nth_on_n_ranks_of_context(llama_8b):
    kinds = {}
    for ranks in (2, 8):
        mesh, train = (
            {"context": ranks},
            {"global_batch_size": 1, "sequence_length": 2**17},
        )
        config = llama_8b(mesh, train, microbatches=1, remat="full", zero_stage=3)
        kinds[ranks] = memory.sum_by_kind(plan(config, named("h100", ranks)).memory)
    for kind in ("activations", "optimizer_state"):
        assert kinds[8][kind] == pytest.approx(kinds[2][kind] / 4, rel=0.05)


def test_keys_and_values_of_the_whole_row_are_held_where_they_are_gathered_and_neither_in_a_ring_nor_by_heads(
    llama_8b,
):
    work = {}
    for strategy in ("ring", "all_gather", "ulysses"):
        train = {"global_batch_size": 1, "sequence_length": 2**20}
        config = llama_8b(
            {"context": 32}, train, microbatches=1, context_strategy=strategy
        )
        work[strategy] = activations.work(config, "gpu")
    # Keys and values, and their float32 cotangents
    whole = 2**20 * 2 * 8 * 128 * (2 + 4)
    assert work["all_gather"] > whole > work["ring"] > work["ulysses"]


def test_what_a_stage_holds_for_a_moment_is_what_one_counts_by_hand():
    """A llama of 8 layers of 64, hidden 96, in bfloat16: 2 sequences of 32 tokens are a microbatch on a rank."""
    model = {
        "layers": 8,
        "d_model": 64,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 96,
        "vocab_size": 128,
    }
    config = load(
        {
            "model": model,
            "mesh": {"pipeline": 2},
            "parallel": {"microbatches": 4},
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": 8, "sequence_length": 32},
        }
    )
    moments = memory.passing(config, pipeline.facts(config))
    items = {item.name: item.nbytes for moment in moments.values() for item in moment}
    assert items["hidden states at the head"] == 2 * 2 * 32 * 64
    # gate and up with cotangents, the stream four times as products take it and three times besides, queries three
    # times
    mlp = 2 * (2 * 2 * 96 + 4 * 64 + 3 * 64 + 3 * 64)
    assert (
        activations.work(replaced(config, parallel={"remat": "none"}), "gpu")
        >= 2 * 32 * mlp
    )
    assert activations.work(
        replaced(config, parallel={"remat": "none"}), "gpu"
    ) <= 2 * 32 * (mlp + 24 * 4 * 32 + 4 * 64)
