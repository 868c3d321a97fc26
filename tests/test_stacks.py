"""Layers of several kinds, each in a stack of its own, give the losses and gradients of one device, in float64."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_experts
from covering import thorough_but
from flax import nnx
from short_runs import canonical_numbers, packed_batch, place, token_batches

import meshtrain as mt
from meshtrain.config import Config, ConfigError, load, replaced
from meshtrain.config.stacks import KINDS, LayerKind
from meshtrain.model.decoder import Decoder
from meshtrain.model.products import make_adapters, make_parameters, project, rows_of
from meshtrain.parallel.placement import slots_of_stages, stages
from meshtrain.step import Program

WITHIN = 1e-6
# A mesh sums in another order; it may not be further from float64 than this many times the most that one device rounds.
BESIDE_ONE_DEVICE = 1.5
MOE = {
    "experts": 8,
    "top_k": 3,
    "d_ff": 20,
    "router": "sigmoid",
    "balance": "bias",
    "groups": [4, 2],
    "route_scale": 2.5,
    "shared_experts": 1,
}
FULL = {"data": 2, "tensor": 2, "pipeline": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "data 4, ZeRO-3": ({"data": 4}, {"zero_stage": 3, "microbatches": 2}),
    "2 x 2 x 2": (FULL, {"zero_stage": 3, "microbatches": 4, "schedule": "1f1b"}),
    "2 x 2 x 2, remat": (
        FULL,
        {"microbatches": 4, "schedule": "1f1b", "remat": "full"},
    ),
    "gpipe": ({"pipeline": 4}, {"microbatches": 4, "schedule": "gpipe"}),
    "interleaved": (
        {"pipeline": 2, "data": 2},
        {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    ),
    "shared places": (
        {"pipeline": 2, "data": 2},
        {
            "microbatches": 4,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "zero_stage": 2,
        }
        | {"layer_split": [1, 1, 1, 2]},
    ),
    "shared places, ring": (
        {"pipeline": 2, "context": 2},
        {"microbatches": 4, "schedule": "zb_interleaved", "virtual_stages": 2}
        | {"layer_split": [1, 1, 1, 2], "context_strategy": "ring"},
    ),
    "shared places, V": (
        {"pipeline": 2},
        {"microbatches": 4, "schedule": "v_1f1b", "layer_split": [1, 1, 1, 2]},
    ),
    "zero bubble": (
        {"data": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "zb_h1", "zero_stage": 2},
    ),
    "paired": ({"pipeline": 2, "tensor": 2}, {"microbatches": 4, "schedule": "paired"}),
    "paired, one stage": ({"data": 2}, {"microbatches": 4, "schedule": "paired"}),
    "expert 2": ({"data": 4, "expert": 2}, {"zero_stage": 3}),
    "expert 2, pipeline": (
        {"data": 2, "expert": 2, "pipeline": 2, "tensor": 2},
        {"microbatches": 2, "schedule": "1f1b", "experts": {"dispatch": "all_to_all"}},
    ),
    "context 2": ({"context": 2, "data": 2}, {"zero_stage": 3}),
    "context 2, pipeline": (
        {"context": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "1f1b"},
    ),
}


def config_of(layout: str, dense: int = 2, **sections: Any) -> Config:
    mesh, parallel = LAYOUTS[layout]
    return load(
        {
            "model": {
                "layers": 5,
                "dense_layers": dense,
                "dense_d_ff": 40,
                "d_model": 24,
                "heads": 4,
                "kv_heads": 2,
                "vocab_size": 61,
                "moe": MOE,
            },
            "train": {"global_batch_size": 8, "sequence_length": 24, "steps": 4},
            "parallel": parallel,
            "mesh": mesh,
            **sections,
        }
    )


def batch_of(packed: bool) -> dict[str, np.ndarray]:
    tokens, labels = token_batches(config_of("one"), 1)[0]
    return (
        packed_batch(tokens, labels) if packed else {"tokens": tokens, "labels": labels}
    )


@cache
def right(dense: int, packed: bool) -> tuple[Any, float, Any, np.ndarray]:
    """Canonical numbers, and what the reference makes of them: loss, gradients, counts."""
    config = config_of("one", dense)
    numbers = canonical_numbers(Program(config).layout)
    moe = vars(config.model.moe)
    model = reference.Model("llama")
    return numbers, *reference_experts.run(model, moe, numbers, batch_of(packed))


def gradients_of(config: Config, numbers: Any, batch: Any) -> tuple[float, Any]:
    program = Program(config)
    given = (
        place(program.layout, numbers),
        program.place(batch),
        jnp.int32(0),
        jnp.float32(1),
    )
    loss, shards = jax.jit(program.gradients)(*given)
    return float(loss), jax.tree.map(np.asarray, program.layout.canonical(shards))


def errors_of(gradients: Any, packed: bool) -> dict[str, float]:
    """The distance of each weight's gradient from the reference, over its norm; loads are compared apart."""

    def apart(mine: np.ndarray, theirs: np.ndarray) -> float:
        return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))

    errors = jax.tree.map(apart, gradients, right(2, packed)[2])
    paths, _ = jax.tree.flatten_with_path(errors)
    named = {jax.tree_util.keystr(path): error for path, error in paths}
    return {name: error for name, error in named.items() if "load" not in name}


@cache
def one_device_errors(packed: bool) -> dict[str, float]:
    """What float32 rounds on one device."""
    _, gradients = gradients_of(config_of("one"), right(2, packed)[0], batch_of(packed))
    return errors_of(gradients, packed)


@pytest.mark.parametrize(
    "packed", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "layout", thorough_but(list(LAYOUTS), lambda _: False, ["2 x 2 x 2"])
)
def test_dense_layers_that_come_first_are_those_of_a_loop_in_float64(
    layout: str, packed: bool
) -> None:
    numbers, loss, _, counts = right(2, packed)
    found, gradients = gradients_of(config_of(layout), numbers, batch_of(packed))
    assert found == pytest.approx(loss, rel=WITHIN)
    load_of = gradients["blocks"]["experts"]["load"]
    np.testing.assert_array_equal(load_of[:, : MOE["experts"]], counts)
    assert "experts" not in gradients["dense_blocks"]
    limit = max(WITHIN, BESIDE_ONE_DEVICE * max(one_device_errors(packed).values()))
    errors = errors_of(gradients, packed)
    assert {name: error for name, error in errors.items() if error > limit} == {}


@pytest.mark.parametrize("dense", [0, 1])
def test_the_layers_of_a_stack_are_told_by_its_name(dense: int) -> None:
    layout = mt.Program(config_of("one", dense)).layout
    stacks = {name: list(layers.layers) for name, layers in layout.stacks.items()}
    assert stacks == (
        {"dense_blocks": [0], "blocks": [1, 2, 3, 4]}
        if dense
        else {"blocks": [*range(5)]}
    )


@pytest.mark.parametrize(("schedule", "chunks", "split", "places"), [
    ("1f1b", 1, None, {"dense_blocks": 3, "blocks": 4}),
    ("interleaved", 4, None, {"dense_blocks": 2, "blocks": 4}),
    ("interleaved", 4, (*[1] * 15, 2), {"dense_blocks": 1, "blocks": 5}),
    ("v_1f1b", 2, None, {"dense_blocks": 3, "blocks": 4}),
])  # fmt: skip
def test_a_device_has_places_for_its_own_layers_however_many_chunks_it_has(
    schedule: str, chunks: int, split: tuple[int, ...] | None, places: dict[str, int]
) -> None:
    parallel = {"schedule": schedule, "virtual_stages": chunks, "layer_split": split}
    config = config_of("one", 3)
    config = replaced(
        config,
        model={"layers": 17},
        mesh={"pipeline": 4},
        parallel={"microbatches": 4, **parallel},
    )
    program = Program(config)
    # weights and both moments of AdamW
    shapes = [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in
              jax.tree_util.tree_leaves_with_path(program.state_shapes)]  # fmt: skip
    for stack, most in places.items():
        found = {shape[0] for name, shape in shapes if f"'{stack}'" in name}
        assert found == {4 * most}
    assert stages(config).on_device == sum(places.values())


# --- a pattern of kinds, one of which stands here alone


class Gate(nnx.Module):
    """A stand-in for a layer without attention: y = (silu(x z) * x v) out, each token by itself."""

    z: nnx.Param
    v: nnx.Param
    out: nnx.Param
    float8: Any = None

    def __init__(
        self, name: str, config: Any, rngs: nnx.Rngs, lora: Any = None
    ) -> None:
        make_parameters(self, name, config, rngs)
        make_adapters(self, name, config, rngs, lora)

    def __call__(
        self, x: Any, sequence: Any, collectives: Any, dropout: Any
    ) -> jax.Array:
        shape, rows = rows_of(self, x)
        h = jax.nn.silu(project(self, "z", rows)) * project(self, "v", rows)
        return collectives.leave(project(self, "out", h).reshape(shape))


def add_gate(model: Any, add: Any) -> None:
    embed, heads, head = (
        ("embed", model.d_model),
        ("heads", model.heads),
        ("head", 2 * model.head_dim),
    )
    for name in ("z", "v"):
        add(f"blocks.attention.{name}", (embed, heads, head), model.init_std)
    add("blocks.attention.out", (heads, head, embed), model.init_std)


@pytest.fixture
def gate() -> Any:
    KINDS.register(LayerKind("gate", add_gate, Gate))
    yield
    KINDS.forget("gate")


# name: pattern, first dense layers, mesh, section parallel
PATTERNS: dict[str, tuple[list[str], int, dict[str, int], dict[str, Any]]] = {
    "2 x 2 x 2": (
        ["gate", "gate", "full"],
        0,
        FULL,
        {"microbatches": 4, "schedule": "1f1b", "zero_stage": 3},
    ),
    "interleaved": (
        ["gate", "full"],
        0,
        {"pipeline": 2, "data": 2},
        {
            "microbatches": 4,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "remat": "full",
        },
    ),
    "within a period": (
        ["gate", "gate", "full"],
        0,
        {"pipeline": 2, "tensor": 2},
        {"microbatches": 2, "schedule": "1f1b", "layer_split": [5, 7]},
    ),
    "zero bubble": (
        ["gate", "full"],
        0,
        {"pipeline": 2, "data": 2},
        {"microbatches": 4, "schedule": "zb_h1"},
    ),
    "paired": (
        ["gate", "gate", "full"],
        0,
        {"pipeline": 2},
        {"microbatches": 4, "schedule": "paired"},
    ),
    "dense first": (
        ["gate", "gate", "full"],
        1,
        {"pipeline": 2, "data": 2},
        {"microbatches": 4, "schedule": "1f1b", "zero_stage": 2},
    ),
    "dense first, zero bubble, paired": (
        ["gate", "full"],
        1,
        {"pipeline": 2},
        {"microbatches": 4, "schedule": "zb_paired"},
    ),
}


def pattern_config(name: str, placed: bool) -> Config:
    pattern, dense, mesh, parallel = PATTERNS[name]
    model: dict[str, Any] = {
        "layers": 12,
        "pattern": pattern,
        "d_model": 24,
        "heads": 4,
        "kv_heads": 2,
        "vocab_size": 61,
    }
    experts = {"experts": 4, "top_k": 2, "d_ff": 20, "balance": "sequence"}
    model |= (
        {"dense_layers": 1, "dense_d_ff": 40, "moe": experts} if dense else {"d_ff": 40}
    )
    return load(
        {
            "model": model,
            "train": {"global_batch_size": 8, "sequence_length": 24, "steps": 4},
            "parallel": parallel if placed else {},
            "mesh": mesh if placed else {},
        }
    )


@pytest.mark.parametrize(
    "name", thorough_but(list(PATTERNS), lambda _: False, ["2 x 2 x 2"])
)
def test_a_pattern_of_kinds_has_the_gradients_of_one_device(
    name: str, gate: None
) -> None:
    alone = pattern_config(name, placed=False)
    layout = Program(alone).layout
    # matrices so small that 12 layers do not make rounding larger
    numbers = layout.map(
        lambda weight, x: x if weight.name.endswith("scale") else np.float32(0.3) * x,
        canonical_numbers(layout),
    )
    loss, gradients = gradients_of(alone, numbers, batch_of(False))
    mesh_loss, on_mesh = gradients_of(
        pattern_config(name, placed=True), numbers, batch_of(False)
    )
    assert mesh_loss == pytest.approx(loss, rel=WITHIN)
    apart = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), on_mesh, gradients
    )
    # both are rounded to float32
    assert max(jax.tree.leaves(apart)) < 2 * WITHIN


def test_a_pattern_runs_its_layers_in_their_order(gate: None) -> None:
    config = pattern_config("2 x 2 x 2", placed=False)
    program = Program(config)
    layout = program.layout
    assert [len(segment.period) for segment in layout.segments] == [3]
    numbers = canonical_numbers(layout)
    tokens = batch_of(False)["tokens"]
    found = program.logits(place(layout, numbers), jnp.asarray(tokens))
    decoder = Decoder(config.model, nnx.Rngs(0))
    nnx.update(decoder, jax.tree.map(jnp.asarray, numbers))
    np.testing.assert_allclose(
        found, decoder(jnp.asarray(tokens)), rtol=1e-4, atol=1e-4
    )


def test_stages_are_cut_at_periods_and_share_their_slots_elsewhere(gate: None) -> None:
    whole = stages(pattern_config("2 x 2 x 2", placed=True))
    assert whole.counts == (6, 6)
    assert whole.slots == ("gate_blocks", "gate_blocks", "blocks") * 2
    within = pattern_config("within a period", placed=True)
    assert stages(within).counts == (5, 7)
    rows = slots_of_stages(within)
    assert [[layer for layer in row if layer >= 0] for row in rows] == [
        [*range(5)],
        [*range(5, 12)],
    ]


def test_a_pattern_of_attention_alone_is_the_program_without_one() -> None:
    texts = []
    for pattern in ([], ["full"], ["full", "full"]):
        model = {"layers": 4, "pattern": pattern, "d_model": 24, "heads": 4, "d_ff": 40}
        parallel = {"microbatches": 2, "schedule": "1f1b"}
        config = load({"model": model, "mesh": {"pipeline": 2}, "parallel": parallel})
        texts.append(Program(config).lower().as_text())
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"dense_layers": 1},
            "model.dense_layers is 1, but without model.moe.experts all",
        ),
        ({"dense_layers": 4, "moe": {"experts": 4}}, "legal are at most 3"),
        (
            {"pattern": ["ful"]},
            "model.pattern has 'ful'; legal are full, linear; did you mean full?",
        ),
        (
            {"pattern": ["full"] * 5},
            "model.pattern has 5 kinds, but there are model.layers 4",
        ),
    ],
)
def test_layers_that_cannot_be_are_refused_in_a_sentence(
    model: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        load({"model": {"layers": 4, **model}})
