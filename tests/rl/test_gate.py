"""A run whose drawing and training disagree ends on its first step of answers, and names what is different."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answering_runs import EXPERTS, MODEL, answering
from refusals import tells

import meshtrain as mt
from meshtrain.generate import held
from meshtrain.generate.resharding import Resharding
from meshtrain.parallel.forward import ROW_GAPS
from meshtrain.rl import answering as batches
from meshtrain.rl import gate, rollouts
from meshtrain.rl.gate import Disagreement
from meshtrain.rl.rollouts import Rollouts

MESH = {"data": 2, "tensor": 2}
Patch = pytest.MonkeyPatch


def stale_weights(patch: Patch) -> None:
    synchronise = Rollouts.synchronise

    def only_once(self: Rollouts, params: Any) -> None:
        synchronise(self, jax.tree.map(lambda x: 2 * x, params))

    patch.setattr(Rollouts, "synchronise", only_once)


def one_factor(patch: Patch) -> None:
    resharded = Resharding._resharded

    def without_b(
        self: Resharding, trained: Any, decoded: Any, stored: Any
    ) -> list[Any]:
        arrays = resharded(self, trained, decoded, stored)
        return [0 * x for x in arrays] if trained.name.endswith("lora_b") else arrays

    patch.setattr(Resharding, "_resharded", without_b)


def neighbours_attended(patch: Patch) -> None:
    pack = batches.pack

    def one_segment(*given: Any) -> dict[str, np.ndarray]:
        batch = pack(*given)
        return {**batch, "segments": np.minimum(batch["segments"], 1)}

    patch.setattr(batches, "pack", one_segment)
    patch.setattr(gate, "pack", one_segment)


def padding_read(patch: Patch) -> None:
    waves = Rollouts._waves

    def full(self: Rollouts, *given: Any) -> Any:
        for wave in waves(self, *given):
            yield wave._replace(
                lengths=np.full_like(wave.lengths, wave.prompts.shape[1])
            )

    patch.setattr(Rollouts, "_waves", full)


def drawn_at_one(patch: Patch) -> None:
    draw = rollouts.draw

    def told_plainly(logits: jax.Array, how: Any, positions: jax.Array) -> Any:
        chosen = draw(logits, how, positions)
        plain = jax.nn.log_softmax(logits)
        return chosen._replace(
            logprobs=jnp.take_along_axis(plain, chosen.tokens[:, None], 1)[:, 0]
        )

    patch.setattr(rollouts, "draw", told_plainly)


def other_choice(patch: Patch) -> None:
    multiplied = held.multiplied

    def turned(leaves: Any, dtype: Any) -> Any:
        leaves = multiplied(leaves, dtype)
        flipped = lambda path, x: -x if "router" in jax.tree_util.keystr(path) else x
        return jax.tree_util.tree_map_with_path(flipped, leaves)

    patch.setattr(held, "multiplied", turned)


# what is broken, the config's sections, what the sentence must name
SABOTAGES: dict[
    str, tuple[Callable[[Patch], None], dict[str, Any], tuple[str, ...]]
] = {
    "weights": (stale_weights, {}, ("weights that are trained", "blocks.attention.q")),
    "factor": (
        one_factor,
        {
            "lora": {"rank": 2},
            "optimizer": {"learning_rate": 0.3},
            "rl": {"supervised": 2, "gap_limit": 1e-3},
            "train": {"steps": 4},
        },
        ("adapters' factors", "lora_b"),
    ),
    "neighbours": (neighbours_attended, {}, ("training attends beyond a text",)),
    "padding": (padding_read, {}, ("drawing attends to the padding",)),
    "temperature": (
        drawn_at_one,
        {"rl": {"temperature": 0.5}},
        ("drawing", "temperature 1"),
    ),
    "experts": (
        other_choice,
        {"model": {**MODEL, **EXPERTS}},
        ("choose other experts",),
    ),
}


def config_of(directory: Path, sections: dict[str, Any]) -> mt.Config:
    # Sharp enough that what is read otherwise is not drowned in a flat distribution.
    rl = {"gap_limit": 1e-3, **sections.get("rl", {})}
    return answering(directory, **{"mesh": MESH, **sections, "rl": rl})


def test_the_guide_has_each_cause_that_a_sentence_may_name() -> None:
    source = Path(gate.__file__).read_text()
    tree = ast.parse(source)
    told = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    causes = [
        value.value for value in told if isinstance(value, ast.Constant) and value.value
    ]
    guide = (Path(__file__).parents[2] / "docs" / "reinforcement.md").read_text()
    assert len(causes) == 7
    for cause in [*causes, "does not hold the weights", "the adapters' factors"]:
        assert f"| {cause} |" in guide or f"{cause} that are trained" in guide, cause


def test_rows_that_cannot_be_written_hide_no_disagreement(tmp_path: Path) -> None:
    (tmp_path / "gaps").write_text("in the way")
    ours: Any = SimpleNamespace(
        forward=None,
        weights=(),
        resharding=SimpleNamespace(
            differing=lambda *_: [SimpleNamespace(name="head.weight", adapter=False)]
        ),
        synchronise=lambda params: None,
    )
    program: Any = SimpleNamespace(config=answering(tmp_path))
    closing = gate.GapGate(program, ours, tmp_path, lambda batch: batch)
    with pytest.raises(Disagreement) as ended:
        closing.close(4, np.array([0.0, 3.0]), {"tokens": np.zeros((2, 8))}, None, list)
    assert tells(
        str(ended.value), "step 4", "3", "head.weight", "1 rows", "cannot be written"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", SABOTAGES)
def test_each_class_of_disagreement_ends_the_first_step_with_its_name(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    sabotage, sections, named = SABOTAGES[name]
    config = config_of(tmp_path, sections)
    sabotage(monkeypatch)
    with pytest.raises(Disagreement) as ended:
        mt.train(config)
    first = config.rl.supervised + 1
    sentence = str(ended.value)
    assert f"step {first}:" in sentence
    assert "rl.gap_limit 0.001" in sentence
    for words in named:
        assert words in sentence
    with np.load(config.run.directory + f"/gaps/{first}.npz") as rows:
        assert (rows["gaps"] > config.rl.gap_limit).all()
        assert len(rows["tokens"]) == len(rows["gaps"]) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["weights", "experts", "factor"])
def test_the_same_run_goes_on_where_nothing_is_broken(
    name: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, SABOTAGES[name][1])
    rows: list[dict[str, Any]] = []
    mt.train(config, callbacks=[rows.append])
    gaps = [row["rl/gap_max"] for row in rows if "rl/gap_max" in row]
    assert len(gaps) == config.train.steps - config.rl.supervised
    assert max(gaps) <= 1e-5
    assert ROW_GAPS not in rows[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{}, MESH, {"data": 2, "tensor": 2, "pipeline": 2}])
def test_in_bfloat16_the_small_model_stays_within_its_rounding(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "mesh": mesh,
        "precision": {"compute": "bfloat16"},
        "rl": {"gap_limit": 2e-2},
        "train": {"steps": 5},
    }
    rows: list[dict[str, Any]] = []
    mt.train(config_of(tmp_path, sections), callbacks=[rows.append])
    gaps = [row["rl/gap_max"] for row in rows]
    assert len(gaps) == 5
    assert 1e-5 < max(gaps) <= 2e-2
